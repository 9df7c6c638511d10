"""The two converters on torchtitan's models: what they convert, what they leave, what they log.

Models are built on the meta device, as torchtitan's trainer builds them.
"""

import importlib
import logging
import re
import sys
from unittest.mock import MagicMock

import pytest
import titan_0_3
import torch
import torch.distributed as dist
from titan_0_3 import of_type
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.components.lora import LoRAConverter
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common import token_dispatcher
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.protocols.module import Module

from titan_fp8.patches import FOR_HOST
from titan_fp8.torchtitan_0_3 import FP8GroupedExpertsConverter, FP8LinearConverter, patches
from titan_fp8.torchtitan_0_3.experts import FP8Experts, FP8GroupedExperts
from titan_fp8.torchtitan_0_3.linear import FP8Linear

FLAVORS = {
    "llama3": "llama3_configs",
    "qwen3": "qwen3_configs",
    "qwen3_5": "qwen3_5_configs",
    "deepseek_v3": "deepseekv3_configs",
    "gpt_oss": "gptoss_configs",
    "kimi_k2_7": "kimi_k2_5_configs",
    "muse_glimmer": "muse_glimmer_configs",
    "flux": "flux_configs",
}
"""The table of flavors in the module of each model."""

NOT_INSTALLED = {
    "flux": ("transformers",),
    "qwen3_5": (
        *("fla", "fla.modules", "fla.modules.conv", "fla.modules.conv.triton"),
        *("fla.modules.conv.triton.ops", "fla.ops", "fla.ops.gated_delta_rule"),
        *("fla.ops.gated_delta_rule.chunk", "fla.ops.gated_delta_rule.fused_recurrent"),
    ),
}
"""Packages that a model imports, and that conversion does not use."""


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO)


def on_meta(config: Module.Config) -> nn.Module:
    with torch.device("meta"):
        return config.build()


def registry(model: str, flavor: str = "debugmodel", converters: tuple = (), **options):
    """The config of a model's flavor after these converters."""
    module = importlib.import_module(f"torchtitan.models.{model}")
    return module.model_registry(flavor, converters=list(converters), **options).model


def report(log: str) -> dict[str, tuple[str, str]]:
    """The lines of the tables in a log: name to shape, and recipe or reason."""
    rows = (line.split("  ") for line in log.splitlines() if line.startswith("  "))
    rows = ([cell.strip() for cell in row if cell.strip()] for row in rows)
    table = {row[0]: (row[1], " ".join(row[2:])) for row in rows if len(row) > 2}
    table.pop("module", None)
    return table


@pytest.mark.parametrize("model", FLAVORS)
def test_every_model_converts_and_keeps_its_parameters(monkeypatch, caplog, model):
    for package in NOT_INSTALLED.get(model, ()):
        monkeypatch.setitem(sys.modules, package, MagicMock())
    flavors = getattr(importlib.import_module(f"torchtitan.models.{model}"), FLAVORS[model])
    debug = [flavor for flavor in flavors if "debug" in flavor]
    for flavor in {*debug, [*flavors][-1]}:
        caplog.clear()
        plain = registry(model, flavor)
        linears = {name: config for name, config, *_ in plain.traverse(Linear.Config)}
        experts = {name for name, *_ in plain.traverse(GroupedExperts.Config)}
        converters = [FP8LinearConverter.Config()]
        if experts:
            converters.append(FP8GroupedExpertsConverter.Config())
        converted = registry(model, flavor, converters)
        expected = {name for name, linear in linears.items() if converts_by_default(name, linear)}
        assert {name for name, *_ in converted.traverse(FP8Linear.Config)} == expected, flavor
        table = report(caplog.text)
        assert table.keys() == linears.keys() | experts, flavor
        shapes = {name: f"{x.out_features} x {x.in_features}" for name, x in linears.items()}
        assert all(table[name][0] == shape for name, shape in shapes.items())
        fp8 = {name for name, (_, outcome) in table.items() if outcome == "blockwise"}
        assert fp8 == expected | experts and expected, flavor
        if "debug" in flavor:
            built = on_meta(converted)
            built.verify_module_protocol()
            assert state(built) == state(on_meta(plain)), flavor
            assert len(of_type(built, FP8Experts)) == len(experts)


def converts_by_default(name: str, linear: Linear.Config) -> bool:
    multiples_of_16 = not linear.in_features % 16 and not linear.out_features % 16
    filtered = "lm_head" in name or "router.gate" in name
    return type(linear) is Linear.Config and multiples_of_16 and not filtered


def state(model: nn.Module) -> dict[str, tuple]:
    return {name: (t.shape, t.dtype) for name, t in model.state_dict().items()}


def test_llama3_converts_its_fused_projection():
    model = on_meta(titan_0_3.small("llama3", [FP8LinearConverter.Config()]).model_spec.model)
    names = {"attention.qkv_linear.wqkv", "attention.wo"}
    names |= {f"feed_forward.{name}" for name in ("w1", "w2", "w3")}
    assert of_type(model, FP8Linear).keys() == {f"layers.{i}.{n}" for i in (0, 1) for n in names}


def test_the_table_says_why_a_linear_was_left(caplog):
    config = registry("llama3")
    config.layers[0].feed_forward.w1.out_features = 40
    config.layers[0].feed_forward.w2.in_features = 40
    FP8LinearConverter.Config(filter_fqns=["wqkv"]).build().convert(config)
    table = report(caplog.text)
    assert table["layers.0.feed_forward.w1"] == ("40 x 256", "- N = 40 is not a multiple of 16")
    assert table["layers.0.feed_forward.w2"] == ("256 x 40", "- K = 40 is not a multiple of 16")
    assert table["layers.1.attention.qkv_linear.wqkv"] == ("768 x 256", '- filtered by "wqkv"')
    assert table["lm_head"] == ("2048 x 256", "blockwise")
    assert "converted 23 of 31 linears, blockwise" in caplog.text


@pytest.mark.parametrize(
    "model, options, name, kind",
    [
        ("gpt_oss", {}, "layers.0.attention.wo", "ScaledBiasRowwiseLinear"),
        ("llama3", {"tp_gemm_backend": "dist_gemm"}, "layers.0.attention.wo", "RowParallelLinear"),
        ("muse_glimmer", {}, "lm_head", "SoftCappedLinear"),
    ],
)
def test_linears_of_another_class_are_left(caplog, model, options, name, kind):
    built = on_meta(
        registry(model, converters=[FP8LinearConverter.Config(filter_fqns=[])], **options)
    )
    assert type(built.get_submodule(name)).__name__ == kind
    assert report(caplog.text)[name][1] == f"- its class is {kind}, not Linear"


def test_linears_whose_module_multiplies_itself_are_left(caplog):
    registry("llama3", converters=[FP8LinearConverter.Config()], tp_gemm_backend="dist_gemm")
    table = report(caplog.text)
    for name in ("attention.qkv_linear.wqkv", "feed_forward.w1"):
        assert "multiplies by the weight itself" in table[f"layers.0.{name}"][1]
    assert "FP8LinearConverter converted nothing in this model" in caplog.text


def test_biased_experts_convert_through_their_seam(caplog):
    model = on_meta(registry("gpt_oss", converters=[FP8GroupedExpertsConverter.Config()]))
    (experts,) = {type(m) for m in of_type(model, GroupedExperts).values()}
    assert experts.__name__ == "FP8GptOssGroupedExperts" and issubclass(experts, FP8Experts)
    assert "mlp1_bias_EG" in dict(
        model.layers["0"].moe.routed_experts.inner_experts.named_parameters()
    )
    assert {outcome for _, outcome in report(caplog.text).values()} == {"blockwise"}


def test_experts_with_products_of_their_own_are_left(caplog, monkeypatch):
    class Own(GroupedExperts):
        class Config(GroupedExperts.Config):
            __slots__ = ()

        def _grouped_mm(self, *, A, B_t, offs):
            return A

    config = registry("deepseek_v3")
    old = config.layers[2].moe.routed_experts.inner_experts
    config.layers[2].moe.routed_experts.inner_experts = Own.Config(
        dim=old.dim, hidden_dim=old.hidden_dim, num_experts=old.num_experts
    )
    config.layers[3].moe.routed_experts.inner_experts.hidden_dim = 40
    config.layers[4].moe.routed_experts.inner_experts.hidden_dim = 0
    FP8GroupedExpertsConverter.Config().build().convert(config)
    table = report(caplog.text)
    name = "layers.{}.moe.routed_experts.inner_experts"
    assert "Own has grouped products of its own" in table[name.format(2)][1]
    assert "w1_EFD: N = 40 is not a multiple of 16" in table[name.format(3)][1]
    assert "w1_EFD: N = 0 is not a positive multiple of 16" in table[name.format(4)][1]
    assert table[name.format(1)] == (", ".join(["8 x 256 x 256"] * 3), "blockwise")


def test_fqns_choose_among_the_experts(caplog):
    model = on_meta(
        registry(
            "deepseek_v3",
            converters=[FP8GroupedExpertsConverter.Config(fqns=["layers.1.", "layers.3."])],
        )
    )
    name = "layers.{}.moe.routed_experts.inner_experts"
    assert of_type(model, FP8GroupedExperts).keys() == {name.format(i) for i in (1, 3)}
    assert report(caplog.text)[name.format(2)][1] == "- no pattern of fqns matches"


@pytest.mark.parametrize("patterns", [["wq_typo"], ["lm_head", "output"]])
def test_a_filter_that_matches_nothing_is_an_error(patterns):
    with pytest.raises(ValueError) as caught:
        registry("llama3", converters=[FP8LinearConverter.Config(filter_fqns=patterns)])
    message = str(caught.value)
    assert message.startswith(f"FP8LinearConverter: filter_fqns = {patterns!r}: no module's name")
    assert repr(patterns[-1]) in message


@pytest.mark.parametrize("recipe", ["blockwise", "bf16"])
@pytest.mark.parametrize("patterns", [["expertz"], ["experts", "layers.99"], ["shared_experts"]])
def test_fqns_that_convert_nothing_are_an_error(patterns, recipe):
    with pytest.raises(ValueError) as caught:
        converter = FP8GroupedExpertsConverter.Config(fqns=patterns, recipe=recipe)
        registry("deepseek_v3", converters=[converter])
    message = str(caught.value)
    assert message.startswith(f"FP8GroupedExpertsConverter: fqns = {patterns!r}")
    assert f"{patterns[-1]!r} converts nothing" in message
    assert "layers.1.moe.routed_experts" in message


def test_a_model_without_experts_needs_no_converter_of_experts():
    with pytest.raises(
        ValueError, match="FP8GroupedExpertsConverter: fqns = .* no grouped experts: leav"
    ):
        registry("llama3", converters=[FP8GroupedExpertsConverter.Config()])


def dispatchers(config: Module.Config) -> list[token_dispatcher.LocalTokenDispatcher.Config]:
    return [routed.token_dispatcher for _, routed, *_ in config.traverse(RoutedExperts.Config)]


@pytest.mark.parametrize("backend", ["standard", "hybridep", "deepep"])
def test_dispatchers_stay(backend):
    converters = [FP8GroupedExpertsConverter.Config()]
    config = registry("deepseek_v3", converters=converters, moe_comm_backend=backend)
    assert dispatchers(config) == dispatchers(registry("deepseek_v3", moe_comm_backend=backend))


def test_bf16_leaves_every_config_and_patch_alone(caplog):
    targets = [target for patch in patches.ON_CONVERSION for target in patch.targets]
    before = [getattr(*target.locate()) for target in targets]
    config = registry("deepseek_v3", converters=titan_0_3.converters("deepseek_v3", recipe="bf16"))
    plain = registry("deepseek_v3")
    types = [
        [type(c) for _, c, *_ in tree.traverse(Module.Config, recurse=True)]
        for tree in (config, plain)
    ]
    assert types[0] == types[1]
    assert before == [getattr(*target.locate()) for target in targets]
    assert "emulated" not in caplog.text
    assert {outcome for _, outcome in report(caplog.text).values()} == {'- recipe = "bf16"'}


@pytest.mark.parametrize("recipe, speedups", [("bf16", True), ("rowwise", False)])
@pytest.mark.parametrize("model", titan_0_3.MODELS)
def test_the_key_decides_about_all_that_is_not_fp8(model, recipe, speedups):
    def replaced(group) -> bool:
        targets = [target for patch in group for target in patch.targets]
        return any(getattr(*target.locate()) != target.original() for target in targets)

    fields = {"recipe": recipe, "host_speedups": speedups}
    registry(model, converters=titan_0_3.converters(model, **fields))
    assert replaced(FOR_HOST) == speedups
    assert replaced(patches.FOR_FP8) == (recipe != "bf16")


def test_a_second_conversion_changes_nothing(caplog):
    for converter in (FP8LinearConverter, FP8GroupedExpertsConverter):
        registry("deepseek_v3", converters=[converter.Config()] * 2)
        again = report(caplog.text.rpartition("titan_fp8: converted 0 of ")[2])
        assert {row[1] for row in again.values() if "already" in row[1]} == {
            "- already converted, blockwise"
        }


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
@pytest.mark.parametrize("converter", [FP8LinearConverter, FP8GroupedExpertsConverter])
def test_a_second_conversion_to_another_recipe_is_an_error(converter, recipe):
    message = f"{converter.__name__}: recipe = '{recipe}': layers.* is already converted, 'block"
    with pytest.raises(ValueError, match=message):
        registry("deepseek_v3", converters=[converter.Config(), converter.Config(recipe=recipe)])


def test_lora_adapts_fp8_linears():
    converters = [FP8LinearConverter.Config(), LoRAConverter.Config(rank=8, target_modules=["wo"])]
    model = on_meta(registry("llama3", converters=converters))
    wo = model.layers["0"].attention.wo
    assert isinstance(wo, FP8Linear) and type(wo) is not FP8Linear and not wo.weight.requires_grad
    assert model.layers["0"].feed_forward.w1.recipe == "blockwise"


@pytest.fixture
def two_ranks():
    """A process group of which only this rank exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    backend = dist_utils.get_spmd_backend()
    yield
    dist_utils.set_spmd_backend(backend)
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["partial_dtensor", "spmd_types"])
@pytest.mark.parametrize("part", ["feed_forward", "experts"])
def test_a_shard_that_fp8_gemms_cannot_read_is_an_error(two_ranks, backend, part):
    tp = ("--parallelism.tensor_parallel_degree", 2, "--parallelism.spmd_backend", backend)
    config = titan_0_3.parse("deepseek_v3_plain", *tp, "--training.disable_cuda_graphs")
    model = config.model_spec.model
    first, name = model.layers[0].feed_forward, "layers.0.feed_forward.w3.weight"
    shape = (48, 256)
    if part == "feed_forward":
        first.w1.out_features = first.w3.out_features = first.w2.in_features = 48
    else:
        model.layers[1].moe.routed_experts.inner_experts.hidden_dim = 48
        name, shape = "layers.1.moe.routed_experts.inner_experts.w1_EFD", (8, 48, 256)
    for converter in titan_0_3.converters("deepseek_v3"):
        converter.build().convert(model)
    dims = ParallelDims.from_config(config.parallelism, 2)
    dist_utils.set_spmd_backend(backend)
    model.update_from_config(config=config)
    message = re.escape(f"{name}: dimension {len(shape) - 2} of {shape}") + r".*\[24\]"
    built = on_meta(model)
    with pytest.raises(ValueError, match=message):
        built.parallelize(dims)


@pytest.mark.parametrize("plan", ["tensor_parallel", "data_parallel_shard"])
def test_fp8_gathers_without_fsdp_are_warned_of(two_ranks, caplog, plan):
    flags = [f"--parallelism.{plan}_degree", 2, "--parallelism.spmd_backend", "partial_dtensor"]
    config = titan_0_3.parse("llama3_plain", *flags, "--training.disable_cuda_graphs")
    dist_utils.set_spmd_backend("partial_dtensor")
    model = config.model_spec.model
    FP8LinearConverter.Config(fsdp_all_gather=True).build().convert(model)
    model.update_from_config(config=config)
    on_meta(model).parallelize(ParallelDims.from_config(config.parallelism, 2))
    warned = caplog.text.count("fsdp_all_gather = True changes nothing: the plan has no FSDP")
    assert warned == (plan == "tensor_parallel")


@pytest.mark.parametrize("emulate", [False, True])
def test_a_gpu_without_kernels_is_an_error_unless_emulated(monkeypatch, caplog, emulate):
    def kernels_for(device):
        raise RuntimeError(f"no FP8 kernels for {device}")

    monkeypatch.setattr("torchtitan.tools.utils.device_type", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr("titan_fp8.modules.conversion.kernels_for", kernels_for)
    config = registry("llama3")
    if emulate:
        FP8LinearConverter.Config(emulate=True).build().convert(config)
        assert "FP8 is emulated" in caplog.text
    else:
        with pytest.raises(RuntimeError, match="no FP8 kernels for cuda:3"):
            FP8LinearConverter.Config().build().convert(config)
        FP8LinearConverter.Config(recipe="bf16").build().convert(config)
        assert not any(config.traverse(FP8Linear.Config))
