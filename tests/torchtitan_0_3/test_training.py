"""The debug models train in FP8 under FSDP2, HSDP, TP and EP, as in bf16.

The FP8 runs of llama3 and deepseek_v3 also report the health of FP8.
"""

import json
import math

import pytest
import titan_0_3
from gloo import spawn
from health_runs import assert_complete, layers_in

TP, EP = "--parallelism.tensor_parallel_degree", "--parallelism.expert_parallel_degree"
HSDP = ("--parallelism.data_parallel_replicate_degree", 2)
PLANS = {
    "llama3, HSDP": ("llama3", "blockwise_pow2", HSDP),
    "deepseek_v3, FSDP2, EP": ("deepseek_v3", "blockwise", (EP, 2)),
    "deepseek_v3, TP": ("deepseek_v3", "rowwise", (TP, 2)),
}
WEIGHTS = {"llama3": 2 * 5, "deepseek_v3": 2 * 4 + 3 + 3 + 3}


@pytest.mark.parametrize("model, recipe, plan", PLANS.values(), ids=PLANS)
def test_the_loss_follows_that_of_bf16(model, recipe, plan, text, tmp_path):
    runs = {
        name: (f"{model}_{config}", titan_0_3.flags(text, tmp_path / name, *plan))
        for name, config in (("bf16", "bf16"), ("fp8", f"{recipe}_observed"))
    }
    spawn(titan_0_3.write_metrics, 2, tmp_path, runs)

    def read(name: str, rank: int = 0) -> dict:
        return json.loads((tmp_path / f"{name}.{rank}.json").read_text())

    bf16, fp8 = (read(name)["losses"] for name in runs)
    assert len(fp8) == len(bf16) == titan_0_3.STEPS and all(map(math.isfinite, fp8))
    assert fp8[-1] < fp8[0] - 1
    assert fp8 != bf16
    gap = abs(sum(fp8[-5:]) / sum(bf16[-5:]) - 1)
    assert gap < 0.01
    health = read("fp8")["health"]
    assert health.keys() == {"2", "4"} and health == read("fp8", 1)["health"]
    for metrics in health.values():
        assert len(layers_in(metrics)) == WEIGHTS[model]
        if TP in plan:
            # In bf16, too, torchtitan's experts get no gradient of their input, so no dgrad.
            metrics = {tag: value for tag, value in metrics.items() if "inner_experts" not in tag}
        assert_complete(metrics)


def test_experts_with_biases_train_under_expert_parallelism(text, tmp_path):
    """The biases of gpt_oss have a row for each expert, and a rank may have any number of them."""
    settings = titan_0_3.flags(text, tmp_path / "run", "--training.steps", 2, EP, 2)
    runs = {name: (f"gpt_oss_{name}", settings) for name in ("bf16", "blockwise")}
    spawn(titan_0_3.write_metrics, 2, tmp_path, runs)
    bf16, fp8 = (json.loads((tmp_path / f"{name}.0.json").read_text())["losses"] for name in runs)
    assert len(fp8) == 2 and fp8 != bf16
    assert fp8 == pytest.approx(bf16, rel=0.01)
