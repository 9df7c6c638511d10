"""FP8Linear and the conversion of a model's linears, without distribution."""

import copy
import io
import pickle
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import titan_fp8
import titan_fp8.recipe
from titan_fp8 import FP8Linear, convert_linears, fp8_linear, reference
from titan_fp8.functional.weights import GatheredWeight

RECIPES = tuple(titan_fp8.recipe.RECIPES)


class SpecialLinear(nn.Linear):
    """A subclass, whose own forward a conversion would lose."""


class Block(nn.Module):
    def __init__(self, dim: int = 48):
        super().__init__()
        self.wq = nn.Linear(dim, 32, bias=False)
        self.wo = nn.Linear(32, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return x + self.wo(F.silu(self.wq(self.norm(x))))


class Model(nn.Module):
    """Linears that a conversion takes, and one of each kind that it leaves."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 48)
        self.layers = nn.ModuleDict({"0": Block(), "1": Block()})
        self.router = nn.ModuleDict({"gate": nn.Linear(48, 16)})
        self.special = SpecialLinear(48, 48)
        self.wide = nn.Linear(48, 24)
        self.narrow = nn.Linear(24, 48)
        self.half = nn.Linear(48, 48).half()
        self.normed = parametrizations.weight_norm(nn.Linear(48, 48))
        self.output = nn.Linear(48, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x)

    def init_weights(self):
        for parameter in self.parameters():
            nn.init.normal_(parameter)


CONVERTED = ["layers.0.wq", "layers.0.wo", "layers.1.wq", "layers.1.wo"]
LEFT = {
    "router.gate": 'filtered by "router.gate"',
    "special": "its class is SpecialLinear, not nn.Linear",
    "wide": "N = 24 is not a multiple of 16",
    "narrow": "K = 24 is not a multiple of 16",
    "half": "torch.float16 parameters",
    "normed": "its class is ParametrizedLinear, not nn.Linear",
    "output": "the output layer",
}


def converted_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is FP8Linear]


# Conversion


@pytest.mark.parametrize("recipe", RECIPES)
def test_conversion_takes_what_it_can_and_says_why_it_leaves_the_rest(recipe):
    model = Model()
    classes = {name: type(module) for name, module in model.named_modules()}
    report = convert_linears(model, recipe=recipe, emulate=True)
    assert converted_names(model) == CONVERTED
    for name, module in model.named_modules():
        if name in CONVERTED:
            assert (module.recipe, module.emulate, module.fqn) == (recipe, True, name)
        else:
            assert type(module) is classes[name]
    assert [(name, r) for name, _, r in report.converted] == [(n, recipe) for n in CONVERTED]
    assert {name: reason for name, _, reason in report.left} == LEFT
    assert ("layers.0.wq", "32 x 48", recipe) in report.converted


def test_the_report_is_a_table():
    model = nn.ModuleDict({"a": nn.Linear(48, 16), "long_name": nn.Linear(1024, 24)})
    report = convert_linears(model)
    assert [line.rstrip() for line in str(report).splitlines()] == [
        "  module     shape      recipe / left in high precision because",
        "  a          16 x 48    blockwise",
        "  long_name  24 x 1024  - N = 24 is not a multiple of 16",
    ]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_the_report_says_which_dimension_is_empty():
    report = convert_linears(nn.ModuleDict({"n": nn.Linear(48, 0), "k": nn.Linear(0, 24)}))
    assert [reason for *_, reason in report.left] == [
        "N = 0 is not a positive multiple of 16",
        "N = 24 is not a multiple of 16",
    ]


def test_parameters_hooks_and_modes_stay():
    model = Model()
    model.layers["1"].eval()
    model.layers["0"].wq.weight.requires_grad_(False)
    calls = []
    model.layers["0"].wo.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.layers["0"].wo.register_forward_hook(lambda *_: calls.append("after"))
    model.layers["0"].wo.register_full_backward_hook(lambda *_: calls.append("backward"))
    parameters = dict(model.named_parameters())
    keys, random_state = list(model.state_dict()), torch.get_rng_state()
    convert_linears(model)
    assert list(model.state_dict()) == keys
    assert torch.equal(torch.get_rng_state(), random_state)
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert all(type(parameter) is nn.Parameter for parameter in after.values())
    assert not after["layers.0.wq.weight"].requires_grad
    assert model.layers["0"].wo.training and not model.layers["1"].wo.training
    model(torch.arange(10)).sum().backward()
    assert calls == ["before", "after", "backward"]


def test_initialization_is_the_same():
    models = Model(), Model()
    convert_linears(models[1])
    for model in models:
        torch.manual_seed(7)
        model.init_weights()
    plain, fp8 = (model.state_dict() for model in models)
    assert all(torch.equal(plain[key], fp8[key]) for key in plain)
    torch.manual_seed(7)
    plain = nn.Linear(48, 32)
    torch.manual_seed(7)
    fp8 = models[1].layers["0"].wq
    fp8.reset_parameters()
    assert torch.equal(fp8.weight, plain.weight)


def test_a_shared_module_is_converted_once():
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": shared, "b": shared})
    report = convert_linears(model)
    assert [name for name, *_ in report.converted] == ["a"]
    assert model["a"] is model["b"] is shared and type(shared) is FP8Linear


def test_an_empty_linear_is_left():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(48, 16), nn.Linear(16, 0))
    report = convert_linears(model)
    assert [name for name, *_ in report.left] == ["1"]


def test_a_model_that_is_a_linear():
    linear = nn.Linear(32, 16)
    convert_linears(linear)
    assert type(linear) is FP8Linear


def test_a_second_conversion_changes_nothing():
    model = Model()
    convert_linears(model, recipe="rowwise")
    report = convert_linears(model, recipe="blockwise")
    assert not report.converted
    reasons = {name: reason for name, _, reason in report.left}
    assert all(reasons[name] == "already converted, rowwise" for name in CONVERTED)
    assert model.layers["0"].wq.recipe == "rowwise"


def test_bf16_converts_nothing():
    model = Model()
    report = convert_linears(model, recipe="bf16")
    assert not converted_names(model) and not report.converted
    assert {reason for *_, reason in report.left} == {'recipe = "bf16"'}


@pytest.mark.parametrize(
    "filter_fqns, expected",
    [
        ([], [*CONVERTED[:4], "router.gate", "output"]),
        (["wq"], ["layers.0.wo", "layers.1.wo", "router.gate", "output"]),
        (("layers.0",), ["layers.1.wq", "layers.1.wo", "router.gate", "output"]),
        (["output", "router.gate", "layers"], []),
        (["embed"], [*CONVERTED[:4], "router.gate", "output"]),
    ],
)
def test_filter(filter_fqns, expected):
    model = Model()
    report = convert_linears(model, filter_fqns=filter_fqns)
    assert converted_names(model) == [name for name, *_ in report.converted] == expected


def test_default_filters_may_match_nothing():
    model = nn.Sequential(nn.Linear(16, 16))
    convert_linears(model)
    convert_linears(nn.Sequential(nn.Linear(16, 16)), filter_fqns=["output"])
    assert converted_names(model) == ["0"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"recipe": "fp8"}, "recipe = 'fp8': allowed are 'blockwise', 'rowwise', "
         "'rowwise_with_gw_hp', 'blockwise_pow2', 'bf16'"),
        ({"recipe": None}, "recipe = None: allowed are 'blockwise', "),
        ({"recipe": ["rowwise"]}, "recipe = ['rowwise']: allowed are 'blockwise', "),
        ({"emulate": "no"}, "emulate = 'no': allowed are true and false"),
        ({"filter_fqns": "output"}, "filter_fqns = 'output': allowed is a list of strings"),
        ({"filter_fqns": (name for name in ["output"])}, ": allowed is a list of strings"),
        ({"filter_fqns": ["output", 3]}, "filter_fqns = ['output', 3]: allowed is a list of str"),
        ({"filter_fqns": ["output", ""]}, "filter_fqns = ['output', '']: an empty string would"),
        ({"filter_fqns": ["outptu"]}, "filter_fqns = ['outptu']: no module's name contains 'outp"),
        ({"filter_fqns": ["wq", "x"], "recipe": "bf16"}, "no module's name contains 'x'"),
    ],
)  # fmt: skip
def test_errors_come_before_anything_is_converted(options, message):
    model = Model()
    with pytest.raises(ValueError, match=re.escape(message)):
        convert_linears(model, **options)
    assert not converted_names(model)


# The module


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_module_is_the_function_of_its_parameters(recipe, bias):
    linear = nn.Linear(144, 48, bias=bias)
    convert_linears(linear, recipe=recipe)
    x = torch.randn(2, 5, 144, requires_grad=True)
    leaves = x, *linear.parameters()
    y, expected = linear(x), fp8_linear(*leaves, recipe=recipe)
    assert torch.equal(y, expected) and not torch.equal(y, F.linear(*leaves))
    g = torch.randn_like(y)
    got, want = torch.autograd.grad(y, leaves, g), torch.autograd.grad(expected, leaves, g)
    assert all(map(torch.equal, got, want))


def test_a_module_under_autocast():
    linear = nn.Linear(144, 48)
    convert_linears(linear)
    x = torch.randn(5, 144, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
        assert torch.equal(y, fp8_linear(x, linear.weight, linear.bias))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert {t.grad.dtype for t in (x, *linear.parameters())} == {torch.float32}


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(clone):
    model = Model()
    del model.normed  # PyTorch pickles no parametrised module.
    convert_linears(model, recipe="rowwise")
    tokens = torch.arange(10)
    expected = model(tokens)
    other = clone(model)
    assert converted_names(other) == CONVERTED
    assert other.layers["0"].wq.weight is not model.layers["0"].wq.weight
    assert torch.equal(other(tokens), expected)


def test_a_checkpoint_goes_both_ways():
    plain, fp8 = Model(), Model()
    convert_linears(fp8)
    tokens = torch.arange(10)
    for source, target in ((plain, fp8), (fp8, plain)):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.add_(0.01)
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        missing = target.load_state_dict(torch.load(file, weights_only=True), strict=True)
        assert not missing.missing_keys and not missing.unexpected_keys
        assert all(map(torch.equal, source.parameters(), target.parameters()))
    assert converted_names(fp8) == CONVERTED and not converted_names(plain)
    assert not torch.equal(fp8(tokens), plain(tokens))


def test_a_bf16_checkpoint_into_an_fp8_model():
    plain, fp8 = Block().bfloat16(), Block().bfloat16()
    convert_linears(fp8)
    fp8.load_state_dict(plain.state_dict())
    x = torch.randn(7, 48, dtype=torch.bfloat16)
    y = fp8(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, plain(x), rtol=0.05, atol=0.05)


def test_moves_between_dtypes():
    linear = nn.Linear(48, 32)
    convert_linears(linear)
    linear.to(torch.bfloat16)
    assert linear(torch.randn(3, 48, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 144))
    convert_linears(model)
    assert converted_names(model) == ["0", "1"]
    y = model(torch.empty(2, 5, 48, device="meta", requires_grad=True))
    assert y.is_meta and y.shape == (2, 5, 144) and y.dtype == torch.float32
    y.sum().backward()
    assert model[0].weight.grad.is_meta and model[0].weight.grad.shape == (32, 48)
    model.to_empty(device="cpu")
    for linear in model:
        linear.reset_parameters()
    assert model(torch.randn(5, 48)).isfinite().all()


def test_training_reduces_the_loss():
    torch.manual_seed(0)
    model = Block()
    convert_linears(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x, target = torch.randn(64, 48), torch.randn(64, 48)
    losses = []
    for _ in range(20):
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_repr_says_the_recipe():
    linear = nn.Linear(48, 32)
    convert_linears(linear, recipe="rowwise")
    said = "in_features=48, out_features=32, bias=True, recipe=rowwise, emulate=False"
    assert repr(linear) == f"FP8Linear({said})"


# The package


def test_public_names():
    names = ["FP8Linear", "QuantizedWeight", "convert_experts", "convert_linears"]
    names += ["fp8_grouped_mm", "fp8_linear", "quantize_weight", "revert"]
    assert sorted(titan_fp8.__all__) == names
    assert all(callable(getattr(titan_fp8, name)) for name in names)


def test_every_name_of_a_shared_module_counts():
    model = nn.ModuleDict({"head": nn.Linear(32, 32), "body": nn.Linear(32, 32)})
    model["tied_output"] = model["head"]
    report = convert_linears(model, filter_fqns=["output"])
    assert report.converted == [("body", "32 x 32", "blockwise")]
    assert report.left == [("head", "32 x 32", 'filtered by "output"')]
    convert_linears(model, filter_fqns=["tied"])


def shaped_like(name: str) -> tuple[nn.Module, set[str]]:
    """A model, and the names of its output layer and routers."""
    import transformers as hf

    common = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, **common}
    if name == "BERT":
        return hf.BertModel(hf.BertConfig(**small)), set()
    if name == "BERT with logits":
        return hf.BertForMaskedLM(hf.BertConfig(**small)), {"cls.predictions.decoder"}
    if name == "GPT-2":
        config = hf.GPT2Config(n_embd=64, n_layer=1, n_head=2, **common)
        return hf.GPT2LMHeadModel(config), {"lm_head"}
    config = hf.LlamaConfig(num_key_value_heads=2, **small)
    model = hf.LlamaForCausalLM(config)
    return (model, {"lm_head"}) if name == "Llama" else (nn.Sequential(model), {"0.lm_head"})


@pytest.mark.parametrize("name", ["BERT", "BERT with logits", "GPT-2", "Llama", "wrapped Llama"])
def test_the_default_leaves_the_output_layer_of_hugging_face_and_nothing_else(name):
    model, outputs = shaped_like(name)
    linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    report = convert_linears(model)
    assert {n: reason for n, _, reason in report.left} == dict.fromkeys(outputs, "the output layer")
    assert set(converted_names(model)) == linears - outputs
    model, _ = shaped_like(name)
    convert_linears(model, filter_fqns=["output"])  # A pattern of one's own is part of any name.
    assert set(converted_names(model)) == {n for n in linears if "output" not in n}


def test_the_default_leaves_a_linear_that_is_tied_to_an_embedding():
    model = nn.ModuleDict({"embed": nn.Embedding(32, 48), "head": nn.Linear(48, 32, bias=False)})
    model["head"].weight = model["embed"].weight
    assert not convert_linears(model).converted
    convert_linears(model, filter_fqns=[])
    assert model["head"].weight is model["embed"].weight and type(model["head"]) is FP8Linear


def test_an_embedding_whose_weight_is_computed_is_tied_to_no_linear():
    model = nn.ModuleDict({"embed": nn.Embedding(32, 48), "head": nn.Linear(48, 32)})
    nn.utils.parametrizations.spectral_norm(model["embed"])
    assert [name for name, *_ in convert_linears(model).converted] == ["head"]


@pytest.mark.parametrize("compiled", [False, True])
def test_an_error_in_forward_names_the_module(compiled):
    model = nn.ModuleDict({"wq": nn.Linear(48, 32)})
    convert_linears(model)
    layer = torch.compile(model["wq"], backend="eager") if compiled else model["wq"]
    error = torch._dynamo.exc.TorchRuntimeError if compiled else ValueError
    with pytest.raises((ValueError, error), match=r"wq: x has shape \(3, 32\) and weight \(32, 4"):
        layer(torch.randn(3, 32))


def test_a_gathered_weight_is_not_cast():
    q, s = reference.quantize_128x128(torch.randn(32, 48))
    weight = GatheredWeight(q, s, s.mT, torch.float32)
    x = torch.randn(3, 48)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(NotImplementedError, match="mixed_p"):
        fp8_linear(x, weight)
    assert fp8_linear(x, weight).dtype == torch.float32


def test_a_gathered_weight_has_no_other_views():
    q, s = reference.quantize_128x128(torch.randn(32, 48))
    weight = GatheredWeight(q, s, s.mT, torch.float32)
    assert weight.as_strided((32, 48), (48, 1), 0).shape == weight.view(32, 48).shape
    for view in (((32, 48), (48, 1), 16), ((32, 48), (1, 32), 0)):
        with pytest.raises(NotImplementedError, match="cannot be viewed as"):
            weight.as_strided(*view)


def test_a_linear_of_ones_own_making():
    layer = titan_fp8.FP8Linear(32, 16)
    x = torch.randn(3, 32)
    assert torch.equal(layer(x), titan_fp8.fp8_linear(x, layer.weight, layer.bias))
    with pytest.raises(ValueError, match="^weight has shape"):
        titan_fp8.FP8Linear(17, 16)(torch.randn(3, 17))
