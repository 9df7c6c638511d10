"""The health of FP8 under parallel plans: one report of all ranks, and of every operand.

torchtitan's trainer runs two steps on two gloo ranks and reports the second.
"""

from pathlib import Path

import gloo
import pytest
import torch
import torch.distributed as dist
from health_runs import assert_complete, layers_in, run
from plans import CONVERTERS, Plan
from titan import parse, toml, training

if torch.cuda.is_available():
    pytest.skip("ranks on gloo, for machines without a GPU", allow_module_level=True)

PLANS = (
    Plan("llama3", tp=2),
    Plan("llama3", pp=2),
    Plan("deepseek_v3", fsdp=2, ep=2),
)
LAYERS = {"llama3": 2 * 7, "deepseek_v3": 2 * 4 + 3 + 3 + 3}


def health(folder: Path, text: Path, plan: Plan, *flags: object) -> dict[str, float]:
    """The metrics of step 2, which every rank must find alike."""
    folder.mkdir(exist_ok=True)
    freqs = [flag for name in CONVERTERS[plan.model] for flag in (f"--{name}.health_freq", 2)]
    config = parse(
        folder,
        toml(plan.model, CONVERTERS[plan.model]),
        *training(text, folder),
        *plan.flags("blockwise"),
        *("--training.steps", 2, "--debug.moe_force_load_balance"),
        *freqs,
        *flags,
    )
    found = run(config).health()
    assert found.keys() == {2}
    of_ranks: list[dict[str, float]] = [{} for _ in range(2)]
    dist.all_gather_object(of_ranks, found[2])
    assert of_ranks[0] == of_ranks[1]
    return found[2]


def check_plans(rank: int, folder: Path, text: Path) -> None:
    for plan in PLANS:
        metrics = health(folder / str(rank), text, plan)
        assert len(layers_in(metrics)) == LAYERS[plan.model], plan.name
        assert_complete(metrics)


def test_every_plan_reports_every_operand(tmp_path, text):
    gloo.spawn(check_plans, 2, tmp_path, text)
