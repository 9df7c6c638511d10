"""converge_plugin.py: the configs of the convergence experiment, its evaluation and its control."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import gloo
import pytest
import torch
import torch.distributed as dist
from converge_arms import ARMS
from converge_experiment import DEGREES, ranks_of
from parsing import parse_args
from stochastic_adamw import StochasticAdamW
from titan import GROUPED_MM, LINEAR, build, convert, of_type, one_process, trainer, training
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import cross_entropy
from torchtitan.config import JobConfig
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols import model_converter, train_spec

from titan_fp8 import FP8Linear, fp8_linear
from titan_fp8.torchtitan_0_2.experts import FP8GroupedExperts

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs/convergence").glob("*.toml"))
BF16 = ("--quantize.linear.titan_fp8.recipe", "bf16")
# Parameters in millions, linears of all blocks, and modules of grouped experts.
EXPECTED = {
    "llama3_tiny": (2.0, 2 * 7, 0),
    "llama3_1b": (985, 14 * 7, 0),
    "llama3_8b": (8030, 32 * 7, 0),
    "deepseek_v3_tiny": (2.9, 3 * 4 + 3 * 3, 2),
    "deepseek_v3_2b": (2340, 10 * 4 + 10 * 3, 9),
    "deepseek_v3_16b": (15706, 27 * 4 + 27 * 3, 26),
}


@pytest.fixture(autouse=True)
def plugin(monkeypatch, fresh_torchtitan):
    """The plugin in this test only: it changes what torchtitan knows of llama3 and deepseek_v3."""
    monkeypatch.setattr(train_spec, "_extra_train_specs", {})
    registry = dict(model_converter._registry_model_converter_cls)
    monkeypatch.setattr(model_converter, "_registry_model_converter_cls", registry)
    monkeypatch.delitem(sys.modules, "converge_plugin", raising=False)
    return importlib.import_module("converge_plugin")


def parse(name: str, *flags: object) -> JobConfig:
    file = ROOT / f"configs/convergence/{name}.toml"
    return parse_args(["--job.config_file", file, *flags])


def count(model: torch.nn.Module, kind: type) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def test_every_config_is_expected():
    assert {path.stem for path in CONFIGS} == set(EXPECTED)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_a_convergence_run(path):
    config = parse(path.stem)
    training, validation = config.training, config.validation
    assert config.lr_scheduler.warmup_steps == training.steps // 10
    assert training.steps % validation.freq == 0 and validation.enable
    assert (
        sum(step > training.steps / 2 for step in range(0, training.steps + 1, validation.freq)) > 4
    )
    assert validation.dataset_path == training.dataset_path.replace("train", "validation")
    assert config.debug.seed == 42 and config.checkpoint.keep_latest_k == 2
    plan = {degree: getattr(config.parallelism, degree) for degree in DEGREES}
    assert ranks_of({"parallelism": plan}) in (1, 2)
    millions, linears, experts = EXPECTED[path.stem]
    model = build(config)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.03)
    convert(config, model)
    assert (count(model, FP8Linear), count(model, FP8GroupedExperts)) == (linears, experts)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]


def small(text: Path, folder: Path) -> list[object]:
    flags = [*training(text, folder), "--validation.dataset_path", text / "corpus"]
    flags += ["--validation.local_batch_size", 2, "--validation.seq_len", 32]
    return [*flags, "--validation.steps", 3, "--checkpoint.no_enable"]


@pytest.mark.parametrize("name", ["llama3_tiny", "deepseek_v3_tiny"])
def test_every_evaluation_reads_the_same_tokens(text, tmp_path, name):
    with one_process(), trainer(parse(name, *small(text, tmp_path), *BF16)) as t:
        (model,) = t.model_parts
        layers = [module for module in model.modules() if hasattr(module, "tokens_per_expert")]
        for layer in layers:
            layer.tokens_per_expert.fill_(7)
        t.validator.validate(t.model_parts, 1)
        t.validator.validate(t.model_parts, 2)
        assert model.training and all((layer.tokens_per_expert == 7).all() for layer in layers)
        batches = t.validator.batches
        with torch.no_grad(), t.maybe_enable_amp:
            logits = torch.cat([model(inputs["input"]).flatten(0, 1) for inputs, _ in batches])
        labels = torch.cat([labels.flatten() for _, labels in batches])
    first, second = lines(tmp_path)
    assert first | {"step": 2} == second
    assert first["tokens"] == labels.numel() == 3 * 2 * 32
    assert first["loss"] == pytest.approx(cross_entropy(logits.float(), labels).item(), rel=1e-5)
    assert first["accuracy"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())
    assert [sum(counts) for counts in first["experts"]] == [2 * labels.numel()] * len(layers)


@pytest.mark.parametrize(
    "steps, message", [(-1, "validation.steps = -1"), (10_000, "the held-out text has only [1-9]")]
)
def test_evaluation_refuses_what_it_cannot_do(text, tmp_path, steps, message):
    config = parse("llama3_tiny", *small(text, tmp_path), "--validation.steps", steps)
    with one_process(), pytest.raises(ValueError, match=message):
        trainer(config).__enter__()


FOUR_BITS = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
SIX_BITS = (0, 0.0625, 0.125, 0.1875) + tuple(
    significand * 2.0**exponent for exponent in range(-2, 5) for significand in (1, 1.25, 1.5, 1.75)
)


@pytest.mark.parametrize(("target", "values"), [("E2M1", FOUR_BITS), ("E3M2", SIX_BITS)])
def test_the_controls_round_gradients_to_the_nearest_value(plugin, target, values):
    target, values = getattr(plugin, target), torch.tensor(values)
    # Between any two values, nearer to one of them, and the values themselves.
    between = torch.cat([values[:-1].lerp(values[1:], part) for part in (0.0, 0.2, 0.4, 0.6, 0.8)])
    g = torch.cat([between, -between, values[-1:]])
    x = torch.zeros_like(g, requires_grad=True)
    plugin._CoarseGradient.apply(x, target).backward(g / 1024)
    nearest = values[(g.abs()[:, None] - values).abs().argmin(1)] * g.sign()
    assert torch.equal(x.grad, nearest / 1024)
    empty = torch.zeros(0, 4, requires_grad=True)
    plugin._CoarseGradient.apply(empty, target).sum().backward()
    assert empty.grad.shape == (0, 4)


def test_random_errors_are_as_large_as_those_of_fp8(plugin):
    torch.manual_seed(0)
    # Rows of very different sizes, and one of zeros.
    x = torch.randn(64, 4096) * 10.0 ** torch.arange(-32, 32)[:, None].div(8)
    x[5] = 0
    leaf, g = x.clone().requires_grad_(), torch.randn_like(x)
    y = plugin._RandomErrors.apply(leaf)
    y.backward(g)
    assert torch.equal(y[5], x[5])
    rows = torch.arange(64) != 5
    errors = ((y - x) / x.norm(dim=1, keepdim=True))[rows].detach()
    of_gradients = (leaf.grad - g) / g.norm(dim=1, keepdim=True)
    expected = torch.tensor(plugin.PRODUCT_ERROR)
    for each in (errors, of_gradients):
        assert torch.allclose(each.norm(dim=1), expected, rtol=0.1)
        assert each.mean().abs() < 1e-5
    q, w = torch.randn(512, 4096), torch.randn(32, 4096)
    product = q @ w.t()
    error = fp8_linear(q, w, recipe="blockwise", emulate=True) - product
    assert error.norm() / product.norm() == pytest.approx(plugin.PRODUCT_ERROR, rel=0.05)


def test_the_control_changes_gradients_and_nothing_else(text, tmp_path):
    name = "deepseek_v3_tiny"

    def first_step(*flags: object) -> tuple[float, dict[str, torch.Tensor]]:
        config = parse(name, *small(text, tmp_path), *BF16, *flags)
        with trainer(config) as t:
            hooked = [
                key for key, module in t.model_parts[0].named_modules() if module._forward_hooks
            ]
            batch, labels = next(t.batch_generator(t.dataloader))
            loss = t.forward_backward_step(
                input_dict=batch, labels=labels, global_valid_tokens=torch.tensor(192.0)
            )
            named = t.model_parts[0].named_parameters()
            return loss.item(), {key: p.grad.clone() for key, p in named}, hooked

    converters = parse(name).model.converters
    with one_process():
        loss, expected, none = first_step()
        (same_loss, found, hooked), (_, milder, hooked_too) = (
            first_step("--model.converters", ",".join([*converters, ARMS[arm].converter]))
            for arm in ("control", "control_6_bits")
        )
    assert loss == same_loss and not none and hooked == hooked_too
    model = build(parse(name))
    kinds = {key: type(module) for key, module in model.named_modules()}
    assert {kinds[key] for key in hooked} <= {torch.nn.Linear, GroupedExperts}
    kept = [key for key in hooked if "output" in key or "router" in key]
    assert hooked and not kept
    changed = {key for key in expected if not torch.equal(expected[key], found[key])}
    linears = {f"{key}.weight" for key in hooked if kinds[key] is torch.nn.Linear}
    assert linears <= changed
    assert "output.weight" not in changed

    def error(gradients: dict[str, torch.Tensor], key: str) -> float:
        return (gradients[key] - expected[key]).norm().item()

    assert all(0 < error(milder, key) < error(found, key) for key in linears)


PATTERNS = (f"--{LINEAR}.filter_fqns", "wq,layers.1,output")


@pytest.mark.parametrize(
    ("name", "flags", "left"),
    [
        *((path.stem, (), "output") for path in CONFIGS),
        ("llama3_tiny", PATTERNS, "layers.0.attention.wq"),
        ("deepseek_v3_tiny", PATTERNS, "layers.1.moe.shared_experts.w1"),
        ("deepseek_v3_tiny", (f"--{GROUPED_MM}.fqns", "layers.2"), "layers.1.moe.experts"),
        ("deepseek_v3_tiny", (f"--{GROUPED_MM}.recipe", "bf16"), "layers.1.moe.experts"),
        ("deepseek_v3_tiny", ("--model.converters", LINEAR), "layers.1.moe.experts"),
        ("deepseek_v3_tiny", ("--model.flavor", "ragged"), "layers.0.attention.wkv_b"),
    ],
)
def test_the_controls_change_the_layers_that_fp8_converts(monkeypatch, name, flags, left):
    flavors = train_spec.get_train_spec("deepseek_v3").model_args
    # 16 does not divide the rows of wkv_a and the columns of wkv_b.
    monkeypatch.setitem(flavors, "ragged", dataclasses.replace(flavors["tiny"], kv_lora_rank=136))
    config = parse(name, *flags)
    fp8 = convert(config, build(config))
    converted = {*of_type(fp8, FP8Linear), *of_type(fp8, FP8GroupedExperts)}
    assert converted and left not in converted and left in dict(fp8.named_modules())
    for arm in ("control", "bf16_errors"):
        converters = ",".join([*config.model.converters, ARMS[arm].converter])
        bf16 = parse(name, *flags, *BF16, "--model.converters", converters)
        model = convert(bf16, build(bf16))
        assert {key for key, module in model.named_modules() if module._forward_hooks} == converted
        assert not of_type(model, FP8Linear) and not of_type(model, FP8GroupedExperts)


def test_bf16_parameters_are_rounded_stochastically(text, tmp_path):
    flags = [*small(text, tmp_path), *BF16, "--optimizer.rounding_seed", 5]
    bf16 = ["--training.dtype", "bfloat16"]
    with one_process():
        with trainer(parse("deepseek_v3_tiny", *flags, *bf16)) as t:
            (optimizer,) = t.optimizers.optimizers
            assert isinstance(optimizer, StochasticAdamW) and optimizer.rounding_seed == 5
            assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
            parameter = next(t.model_parts[0].parameters())
            before = parameter.detach().clone()
            t.train_step(t.batch_generator(t.dataloader))
            assert not torch.equal(parameter, before)
        with trainer(parse("llama3_tiny", *small(text, tmp_path), *BF16)) as t:
            assert type(t.optimizers.optimizers[0]) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("dtype", "flags", "message"),
    [
        ("float32", ["rounding_seed", 5], "rounding_seed = 5: parameters of float32 are not"),
        ("bfloat16", ["rounding_seed", 128], "rounding_seed = 128: allowed are 0 to 127"),
        ("bfloat16", ["name", "Adam"], "optimizer.name = 'Adam'"),
        ("bfloat16", ["early_step_in_backward"], "early_step_in_backward = True"),
    ],
)
def test_bad_options_of_the_optimizer_are_refused(text, tmp_path, dtype, flags, message):
    flags = [f"--optimizer.{flags[0]}", *flags[1:]]
    flags = [*small(text, tmp_path), "--training.dtype", dtype, *flags]
    with one_process(), pytest.raises(ValueError, match=message):
        trainer(parse("llama3_tiny", *flags)).__enter__()


@pytest.mark.parametrize(
    ("dtype", "integers"), [("float32", torch.int32), ("bfloat16", torch.int16)]
)
def test_perturbed_weights_are_one_ulp_off(text, tmp_path, dtype, integers):
    def weights(*flags: object) -> dict[str, torch.Tensor]:
        flags = *small(text, tmp_path), *BF16, "--training.dtype", dtype, *flags
        with trainer(parse("llama3_tiny", *flags)) as t:
            return {k: p.detach().clone() for k, p in t.model_parts[0].named_parameters()}

    with one_process():
        before, same = weights(), weights("--optimizer.perturbation_seed", 0)
        after, other = (weights("--optimizer.perturbation_seed", seed) for seed in (1, 2))
    assert all(torch.equal(before[name], same[name]) for name in before)
    for name, x in before.items():
        ulps = after[name].view(integers).int() - x.view(integers).int()
        assert set(ulps.unique().tolist()) <= {-1, 1}
        assert 0.3 < (ulps > 0).float().mean() < 0.7
        assert not torch.equal(after[name], other[name])


def test_perturbation_leaves_zeros(plugin):
    model = torch.nn.Linear(64, 8)
    with torch.no_grad():
        model.bias.zero_()
    weight = model.weight.detach().clone()
    plugin.perturb(model, 1)
    assert not model.bias.any() and not torch.equal(model.weight, weight)


def perturb_replicas_and_shards(rank: int) -> None:
    plugin = importlib.import_module("converge_plugin")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 5)
    before = [p.detach().clone() for p in (model.weight, model.bias)]
    for name, placement in (("weight", Replicate()), ("bias", Shard(0))):
        parameter = distribute_tensor(getattr(model, name).detach(), mesh, [placement])
        setattr(model, name, torch.nn.Parameter(parameter))
    plugin.perturb(model, 1)
    copies = [torch.empty(5, 64) for _ in range(2)]
    dist.all_gather(copies, model.weight.detach().to_local())
    assert torch.equal(*copies)
    for old, new in zip(before, (model.weight, model.bias)):
        ulps = new.detach().full_tensor().view(torch.int32) - old.view(torch.int32)
        assert (ulps.abs() == 1).all()


def test_replicas_are_perturbed_alike():
    gloo.spawn(perturb_replicas_and_shards, 2)
