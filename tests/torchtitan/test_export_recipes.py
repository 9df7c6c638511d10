"""The export reads the recipes of linears and of experts, and warns of what it does not keep."""

from pathlib import Path

import pytest
import titan
from exports import MODELS, fp8_weights

from titan_fp8.export.run import Run

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")

NO_BLOCKS = (
    'the run has recipe "{}" for {}, whose GEMMs did not read weights quantized in 128x128 blocks '
    "with {} scales, as they are exported: compare the exported model's loss with the run's"
)


def run_of(
    folder: Path, text: Path, model: str, linear: str, experts: str | None, *flags: object
) -> Run:
    """A run with both converters; `linear` and `experts` are their recipes."""
    name, flavor = MODELS[model]
    flags = ("--quantize.linear.titan_fp8.recipe", linear, *flags)
    if experts is not None:
        flags += ("--quantize.grouped_mm.titan_fp8.recipe", experts)
    job = titan.toml(name, titan.BOTH, flavor)
    return Run(titan.parse(folder, job, *titan.training(text, folder), *flags))


@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize(
    "linear, experts, scale_fmt, warnings",
    [
        ("blockwise", None, "fp32", []),
        ("blockwise_pow2", None, "ue8m0", []),
        ("rowwise", None, "fp32", [("rowwise", "linears and experts")]),
        ("bf16", None, "fp32", [("bf16", "linears and experts")]),
        ("blockwise", "rowwise", "fp32", [("rowwise", "experts")]),
        ("blockwise", "bf16", "fp32", [("bf16", "experts")]),
        ("blockwise_pow2", "bf16", "ue8m0", [("bf16", "experts")]),
        ("rowwise", "blockwise", "fp32", [("rowwise", "linears")]),
        ("bf16", "blockwise_pow2", "ue8m0", [("bf16", "linears")]),
        (
            *("rowwise", "bf16", "fp32"),
            [("rowwise", "linears"), ("bf16", "experts")],
        ),
        ("blockwise", "blockwise_pow2", "fp32", [("blockwise_pow2", "experts")]),
        ("blockwise_pow2", "blockwise", "fp32", [("blockwise_pow2", "linears")]),
    ],
)
def test_recipes_of_linears_and_experts(
    tmp_path, text, model, linear, experts, scale_fmt, warnings
):
    run = run_of(tmp_path, text, model, linear, experts)
    assert run.scale_fmt == scale_fmt
    assert run.warnings == [NO_BLOCKS.format(*each, scale_fmt) for each in warnings]
    assert run.quantized == fp8_weights(run)


@pytest.mark.parametrize("experts", [None, "rowwise", "blockwise_pow2"])
def test_the_recipe_of_experts_is_ignored_without_experts(tmp_path, text, experts):
    run = run_of(tmp_path, text, "qwen3", "blockwise", experts)
    assert run.scale_fmt == "fp32" and not run.warnings


def test_the_recipe_of_linears_is_ignored_if_none_is_quantized(tmp_path, text):
    left = ("--quantize.linear.titan_fp8.filter_fqns", "attention,gate,output")
    run = run_of(tmp_path, text, "qwen3_moe", "rowwise", "blockwise_pow2", *left)
    assert {run.state[name].dim() for name in run.quantized} == {3}
    assert run.scale_fmt == "ue8m0" and not run.warnings


@pytest.mark.parametrize(
    "converters, others",
    [((titan.LINEAR,), "experts"), ((titan.GROUPED_MM,), "linears"), ((), "linears and experts")],
)
def test_modules_without_a_converter(tmp_path, text, converters, others):
    name, flavor = MODELS["deepseek_v3"]
    job = titan.toml(name, converters, flavor)
    run = Run(titan.parse(tmp_path, job, *titan.training(text, tmp_path)))
    what = 'recipe "bf16" for linears', f"no converter of titan_fp8 for {others}"
    assert run.warnings == [NO_BLOCKS.format("bf16", "linears", "fp32").replace(*what)]
    assert run.quantized == fp8_weights(run)
