"""FP8 models in torchtitan's trainer, in this process and on two ranks.

Activation checkpointing, torch.compile, gradient accumulation, autocast, validation, checkpoints:
each test runs torchtitan's own trainer with and without one of them.
"""

import copy
import logging
import math
import re
from pathlib import Path

import gloo
import pytest
import torch
from titan import (
    AC,
    BOTH,
    CHECKPOINTING,
    COMPILE,
    CONVERTERS,
    LINEAR,
    ONE_BLOCK,
    batch,
    converted,
    loss_and_gradients,
    one_process,
    parse,
    toml,
    trainer,
    training,
)
from torch import Tensor, nn
from torchtitan.distributed import activation_checkpoint
from torchtitan.models.moe.moe import GroupedExperts

import titan_fp8
from titan_fp8 import reference

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")

# A rounding error that sends a token to another expert changes more than the error itself.
SAME_ROUTING = ("--debug.moe_force_load_balance",)
CLOSE = 0.75
"""Two FP8 runs must differ by less than this share of the distance between bf16 and FP8."""


def bf16(*flags: object) -> tuple[object, ...]:
    return (f"--{LINEAR}.recipe", "bf16", *flags)


@pytest.fixture
def job(text, tmp_path):
    """Makes the config of a tiny training job; the caller's flags override those of `training`."""
    with one_process():
        yield lambda model, *flags: parse(
            tmp_path, toml(model, CONVERTERS[model]), *training(text, tmp_path), *flags
        )


def run(config) -> dict[str, torch.Tensor]:
    with trainer(config) as t:
        return loss_and_gradients(t)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of any layer's gradient, relative to b's."""
    names = [name for name in b if name.startswith("layers") and b[name].norm()]
    return max((torch.norm(a[name] - b[name]) / b[name].norm()).item() for name in names)


@pytest.mark.parametrize(
    "model, flavor, converters",
    [
        ("llama3", "tiny", (LINEAR,)),
        ("deepseek_v3", "tiny", BOTH),
        ("qwen3", "tiny", (LINEAR,)),
        ("qwen3", "tiny_moe", BOTH),
        ("llama4", "tiny", BOTH),
    ],
)
def test_gradients_are_near_those_of_bf16(text, tmp_path, model, flavor, converters):
    head = toml(model, converters, flavor)
    with one_process():
        common = (*training(text, tmp_path), *SAME_ROUTING)
        fp8, high = (run(parse(tmp_path, head, *common, *flags)) for flags in ((), bf16()))
    # With two operands in e4m3 (four bits) a product is off by 5 %, several in a row by more.
    assert 0.02 < distance(fp8, high) < 0.2
    assert abs(fp8["loss"] - high["loss"]) < 1e-3


def test_checkpointing_is_bitwise_in_eager(job):
    """Of a model with experts the last test of this file."""
    expected = run(job("llama3", "--debug.deterministic"))
    for flags in CHECKPOINTING.values():
        same(run(job("llama3", "--debug.deterministic", *flags)), expected)


@pytest.fixture
def products(monkeypatch):
    """The products of matrices that have run, but for those of wgrad."""
    calls = []

    def counted(product):
        return lambda *args: calls.append(product) or product(*args)

    # All GEMMs of fprop and dgrad end here.
    monkeypatch.setattr(reference, "blockwise_mm", counted(reference.blockwise_mm))
    return calls


LAYERS, LINEARS = 2, 2 * 7
GEMMS = {
    (): 2 * LINEARS,
    CHECKPOINTING["op"]: 2 * LINEARS + 3 * LAYERS,
    CHECKPOINTING["full"]: 3 * LINEARS,
}
"""The products of a step of llama3. Op-level checkpointing recomputes every second in forward."""


@pytest.mark.parametrize("flags", GEMMS)
def test_op_level_checkpointing_recomputes_every_second_fp8_gemm(job, products, flags):
    run(job("llama3", *flags))
    assert len(products) == GEMMS[flags]


class Part(nn.Module):
    """A part of a block; Inductor writes `between` into the buffer of the first output."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(256, 256, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        between = 2 * self.first(x) + 1
        return self.second(between)


def test_op_level_checkpointing_saves_no_buffer_that_compiled_code_reuses(tmp_path):
    """In a block that is compiled in parts, as torchtitan compiles MoE blocks."""
    config = parse(tmp_path, toml("llama3", (LINEAR,)), "--compile.enable", *CHECKPOINTING["op"])
    converted(config)  # applies the patches
    block = nn.Sequential(Part(), nn.Tanh()).bfloat16()
    titan_fp8.convert_linears(block, filter_fqns=())
    checkpointed = activation_checkpoint._apply_ac_to_transformer_block(
        copy.deepcopy(block),
        config.activation_checkpoint,
        op_sac_save_list={torch.ops.aten.mm.default},
    )
    for each in (block, checkpointed._checkpoint_wrapped_module):
        each[0] = torch.compile(each[0], fullgraph=True)
    x = torch.randn(256, 256, dtype=torch.bfloat16, requires_grad=True)
    gradients = [
        torch.autograd.grad(model(x).float().sum(), (x, *model.parameters()))
        for model in (block, checkpointed)
    ]
    assert all(map(torch.equal, *gradients))


COMPILED_CHECKPOINTING = {
    "llama3": CHECKPOINTING["op"],
    "deepseek_v3": (f"{AC}.mode", "memory_budget"),
}


@pytest.mark.parametrize("model", CONVERTERS)
def test_compiled_is_close_to_eager_and_compiles_once(job, products, model):
    eager = run(job(model, *SAME_ROUTING))
    fp8_error = distance(run(job(model, *bf16(*SAME_ROUTING))), eager)
    flags = COMPILED_CHECKPOINTING[model]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    products.clear()
    with trainer(job(model, *COMPILE, *flags, *SAME_ROUTING)) as t:
        compiled = loss_and_gradients(t)
        if model == "llama3":
            assert len(products) == GEMMS[flags]
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with torch._dynamo.config.patch(error_on_recompile=True):
            loss_and_gradients(t, seed=1)
            loss_and_gradients(t, seed=2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert not torch._dynamo.utils.counters["graph_break"]
    assert distance(compiled, eager) < CLOSE * fp8_error
    # One for all dense blocks, one for the loss, and one for blocks with experts.
    assert graphs == {"llama3": 2, "deepseek_v3": 3}[model]


def test_compiled_experts_take_any_routing_without_compiling_again():
    model = nn.Sequential(GroupedExperts(64, 96, 4, use_grouped_mm=True))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    fused = copy.deepcopy(model)
    titan_fp8.convert_experts(fused, fqns=("0",), compile_backend="aot_eager")
    assert fused[0].compile_backend is None  # Its ops leave nothing to fuse.
    titan_fp8.convert_experts(model, recipe="rowwise", fqns=("0",), compile_backend="aot_eager")
    experts, eager = model[0], copy.deepcopy(model[0])
    eager.compile_backend = None
    torch._dynamo.utils.counters.clear()
    for i, sizes in enumerate([(8, 8, 8, 8), (5, 0, 130, 17), (0, 0, 0, 300), (1, 2, 0, 0)]):
        x = torch.randn(sum(sizes) + i, 64, requires_grad=True)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            y = experts(x, torch.tensor(sizes))
            y.sum().backward()
        torch.testing.assert_close(y, eager(x, torch.tensor(sizes)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    outer = torch.compile(lambda *args: 2 * experts(*args), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(outer(x, torch.tensor(sizes)), 2 * eager(x, torch.tensor(sizes)))


def test_gradients_accumulate_over_micro_batches(job):
    with trainer(job("llama3", "--training.global_batch_size", 4)) as t:
        micro_batches = [batch(t, seed) for seed in (0, 1)]
        tokens = sum(labels.numel() for _, labels in micro_batches)
        expected = [loss_and_gradients(t, seed, tokens) for seed in (0, 1)]
        t.metrics_processor.data_loading_times.append(0.0)
        t.job_config.training.max_norm = math.inf
        t.train_step(iter(micro_batches))
        for name, parameter in t.model_parts[0].named_parameters():
            assert torch.equal(parameter.grad, expected[0][name] + expected[1][name]), name


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_single_process_autocast_gives_the_dtypes_of_bf16(job, precision):
    precision = ("--training.mixed_precision_param", precision)

    def dtypes(*flags):
        seen = {}

        def note(module, inputs, y):
            seen[names[module]] = (inputs[0].dtype, y.dtype)

        with trainer(job("deepseek_v3", *precision, *flags)) as t:
            names = {m: name for name, m in t.model_parts[0].named_modules()}
            for module in names:
                if isinstance(module, nn.Linear):
                    module.register_forward_hook(note)
            gradients = loss_and_gradients(t)
        return seen, {name: gradient.dtype for name, gradient in gradients.items()}

    assert dtypes() == dtypes(*bf16())


def test_validation_runs_in_fp8_and_leaves_training_alone(job, text, caplog):
    caplog.set_level(logging.INFO)
    validation = [
        *("--validation.enable", "--validation.freq", 1, "--validation.steps", 1),
        *("--validation.dataset", "c4_test", "--validation.dataset_path", text / "corpus"),
        *("--validation.local_batch_size", 2, "--validation.seq_len", 96),
    ]
    weights = []
    for flags in ((), validation):
        with trainer(job("llama3", "--training.steps", 2, *flags)) as t:
            t.train()
        weights.append(dict(t.model_parts[0].named_parameters()))
    same(*weights)
    log = re.sub("\x1b.*?m", "", caplog.text)
    losses = re.findall(r"validate step: *\d+ *loss: *([\d.]+)", log)
    assert len(losses) == 2 and all(0 < float(loss) < 10 for loss in losses)
    assert "0" not in re.findall(r"tps: *([\d,]+)", log)  # emulated runs report their own speed


@pytest.mark.parametrize("model", CONVERTERS)
def test_state_and_initial_weights_are_those_of_the_bf16_model(job, model):
    states = []
    for flags in ((), bf16()):
        with trainer(job(model, *flags)) as t:
            states.append(t.checkpointer.states)
            same_type = {type(p) for p in t.model_parts[0].parameters()}
            assert same_type == {nn.Parameter}
    fp8, high = ({**s["model"].state_dict()} for s in states)
    assert {n: (p.shape, p.dtype) for n, p in fp8.items()} == {
        n: (p.shape, p.dtype) for n, p in high.items()
    }
    same(fp8, high)


def test_a_bf16_checkpoint_loads_into_an_fp8_model_and_back(job):
    checkpoint = ("--checkpoint.enable", "--checkpoint.interval", 1)
    weights = {}
    for step, flags in enumerate((bf16(), (), bf16())):
        with trainer(job("deepseek_v3", *checkpoint, *flags)) as t:
            loaded = t.checkpointer.load()
            assert loaded == (step > 0) and t.step == step
            if loaded:
                same(dict(t.model_parts[0].named_parameters()), weights)
            t.step += 1
            t.train_step(t.batch_generator(t.dataloader))
            t.checkpointer.save(t.step)
            weights = dict(t.model_parts[0].named_parameters())


def compare_checkpointing(rank: int, folder: Path, text: Path) -> None:
    """On one of two ranks: FSDP2 and expert parallelism."""
    folder = folder / str(rank)
    folder.mkdir()
    common = [*training(text, folder), "--debug.deterministic", *ONE_BLOCK]
    common += ["--parallelism.expert_parallel_degree", 2]

    def gradients(*flags):
        return run(parse(folder, toml("deepseek_v3"), *common, *flags))

    expected = gradients()
    for name in ("op", "full"):
        same(gradients(*CHECKPOINTING[name]), expected)


def test_checkpointing_is_bitwise_on_two_ranks(tmp_path, text):
    gloo.spawn(compare_checkpointing, 2, tmp_path, text)
