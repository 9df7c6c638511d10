"""The debug models train in FP8 under FSDP2, tensor and expert parallelism, as in bf16."""

import json
import math

import pytest
import titan_0_3
from gloo import spawn

TP, EP = "--parallelism.tensor_parallel_degree", "--parallelism.expert_parallel_degree"
PLANS = {
    "llama3, FSDP2": ("llama3", "blockwise", ()),
    "llama3, TP": ("llama3", "rowwise", (TP, 2)),
    "deepseek_v3, FSDP2, EP": ("deepseek_v3", "blockwise", (EP, 2)),
    "deepseek_v3, TP": ("deepseek_v3", "rowwise", (TP, 2)),
}


@pytest.mark.parametrize("model, recipe, plan", PLANS.values(), ids=PLANS)
def test_the_loss_follows_that_of_bf16(model, recipe, plan, text, tmp_path):
    runs = {
        name: (f"{model}_{name}", titan_0_3.flags(text, tmp_path / name, *plan))
        for name in ("bf16", recipe)
    }
    spawn(titan_0_3.write_losses, 2, tmp_path, runs)
    bf16, fp8 = (json.loads((tmp_path / f"{name}.json").read_text()) for name in runs)
    assert len(fp8) == len(bf16) == 20 and all(map(math.isfinite, fp8))
    assert fp8[-1] < fp8[0] - 1
    assert fp8 != bf16
    gap = abs(sum(fp8[-5:]) / sum(bf16[-5:]) - 1)
    assert gap < 0.01
