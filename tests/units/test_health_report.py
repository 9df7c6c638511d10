"""What a report on the health of FP8 says of given statistics, and which ops it is about."""

import pytest
import torch

from titan_fp8.health import Report, watch
from titan_fp8.health.observer import OPERANDS
from titan_fp8.health.statistics import Stat
from titan_fp8.ops import registry


def report(**layers: dict[str, dict[Stat, float]]) -> Report:
    """A report of layers whose operands have these statistics, and 1000 elements and blocks."""
    names = [name.replace("__", ".") for name in layers]
    table = torch.zeros(len(names), len(OPERANDS), len(Stat), dtype=torch.float64)
    table[..., Stat.NONZERO] = table[..., Stat.BLOCKS] = 1000
    table[..., Stat.SQUARES] = 1
    for row, operands in enumerate(layers.values()):
        for operand, statistics in operands.items():
            for stat, value in statistics.items():
                table[row, OPERANDS.index(operand), stat] = value
    return Report.of_ranks(names, table, [[] for _ in names], table.device)


def test_warnings_name_layers_and_operands():
    found = report(
        layers__0__wq={"g dgrad": {Stat.UNDERFLOW: 80}, "x fprop": {Stat.UNDERFLOW: 60}},
        layers__1__wq={"w fprop": {Stat.UNDERFLOW: 40}},
        layers__1__wo={"x fprop": {Stat.NON_FINITE: 2}, "x wgrad": {Stat.NON_FINITE: 1}},
    )
    underflow, non_finite = found.warnings(7)
    assert "step 7: more than 5% of non-zero elements became zero" in underflow
    assert "layers.0.wq (8.0% of g dgrad)" in underflow and "layers.1.wq" not in underflow
    assert "step 7" in non_finite and "layers.1.wo (x fprop, x wgrad)" in non_finite
    assert report(layers__0__wq={}).warnings(1) == []
    many = report(**{f"layers__{i}__wq": {"x fprop": {Stat.UNDERFLOW: 100 + i}} for i in range(9)})
    (warning,) = many.warnings(1)
    assert "layers.8.wq (10.8%" in warning and "and 4 more layers" in warning


def test_metrics_are_of_kinds_and_of_layers():
    spreads = {Stat.LOG2_MAX: 3, Stat.LOG2_MIN: 1}, {Stat.LOG2_MAX: -5, Stat.LOG2_MIN: 7}
    found = report(
        layers__0__wq={"g dgrad": {Stat.UNDERFLOW: 80, Stat.ERROR: 4e-4}, "x fprop": spreads[0]},
        layers__1__wq={"g dgrad": {Stat.UNDERFLOW: 20, Stat.NON_FINITE: 5}, "x fprop": spreads[1]},
    )
    metrics = found.metrics()
    assert metrics["health_underflow/wq/g_dgrad"] == pytest.approx(0.05)
    assert metrics["health_non_finite/wq/g_dgrad"] == pytest.approx(0.0025)
    assert metrics["health_layer_underflow/layers.0.wq"] == pytest.approx(0.08)
    assert metrics["health_layer_error/layers.0.wq"] == pytest.approx(0.02)
    assert metrics["health_layer_scale_spread/layers.0.wq"] == 4
    assert metrics["health_layer_scale_spread/layers.1.wq"] == 2
    assert metrics["health_scale_spread/wq"] == 4  # within a tensor, not over both
    lines = str(found).splitlines()
    assert lines[1].split()[:4] == ["wq", "5.00%", "g", "dgrad"]
    assert lines[2] == "worst layers" and lines[3].startswith("layers.0.wq   8.00% g dgrad")


def test_tokens_per_expert_are_of_all_experts():
    names = ["moe.experts.w1", "moe.experts.w2", "wq"]
    table = torch.zeros(3, len(OPERANDS), len(Stat), dtype=torch.float64)
    sizes = [[torch.tensor([0, 128]), torch.tensor([256, 128])]] * 2 + [[]]
    found = Report.of_ranks(names, table, sizes, table.device)
    assert found.tokens == {"moe.experts": (128, 256, 0)}
    metrics = found.metrics()
    assert metrics["health_tokens_per_expert/moe.experts/max"] == 256
    assert "moe.experts: 0 to 256 tokens per expert, 128 on average" in str(found)
    assert not [tag for tag in metrics if "wq" in tag and "spread" not in tag]  # nothing was seen


def test_every_quantizer_and_fp8_product_is_watched():
    fp8 = {name for name, op in registry.OPS.items() if op.is_fp8}
    in_products = {"blockwise_mm", "blockwise_mm_pair", "rowwise_mm", "transpose_fp8"}
    unseen = in_products | {"bf16_wgrad", "swiglu_dscores"}
    assert fp8 - unseen == watch.WATCHED.keys()
