"""FP8 under torchtitan's parallel plans, one forward and backward each, on gloo ranks.

Every plan starts from one seed checkpoint and gets the same global batch. Its logits and gradients
are compared with the oracle of `plan_oracle`, which quantizes the slices that the ranks hold, and
with the unsharded FP8 model, whose quantization blocks are others.
"""

import statistics
from pathlib import Path

import pytest
import torch
from gloo import spawn
from plans import PLANS, RECIPES, Plan

if torch.cuda.is_available():
    pytest.skip("ranks on gloo, for machines without a GPU", allow_module_level=True)

import plan_ranks
from plan_ranks import Result

SAME = 1e-6
"""Error relative to a tensor's norm, for another order of FP32 sums; measured 3e-7."""
ROUNDED_OTHERWISE = 2e-3
"""The same if a last bit has changed how a value is rounded to e4m3; measured 4e-4. Other blocks
cause 2e-2 and more."""
OF_FP8 = 1.5
"""Two FP8 models with independent errors differ by √2 times the distance of each to FP32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of seed checkpoints and results, with those of the unsharded models."""
    folder = tmp_path_factory.mktemp("plans")
    spawn(plan_ranks.run_unsharded, len(plan_ranks.SHAPES), folder)
    return folder


def read(path: Path):
    return torch.load(path, weights_only=False)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """The norm of a - b, relative to that of b."""
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


def errors(a: Result, b: Result) -> dict[str, float]:
    assert a.grads.keys() == b.grads.keys()
    assert all(g.isfinite().all() for g in a.grads.values())
    return {name: error(a.grads[name], grad) for name, grad in b.grads.items()}


def gather(plan: Plan, ranks: list[Result]) -> Result:
    """The logits of the whole batch and all gradients, from the results of the ranks."""
    if plan.pp > 1:
        return Result(ranks[-1].output, ranks[0].grads | ranks[-1].grads)
    return Result(torch.cat([r.output for r in ranks[:: plan.tp]]), ranks[0].grads)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_a_plan_quantizes_what_each_rank_holds(plan, folder, capsys):
    spawn(plan_ranks.run_plan, plan.ranks, plan, folder)
    learned = plan_ranks.has_whole_router_gradient(plan)
    ranks = [read(folder / f"{plan.name}-{rank}.pt") for rank in range(plan.ranks)]
    unsharded = read(folder / f"{plan.model}-{learned}-{plan.sequences}.pt")
    sharded = {recipe: gather(plan, [rank[recipe] for rank in ranks]) for recipe in ranks[0]}
    for recipe in RECIPES:
        result, whole = sharded[recipe], unsharded[recipe]
        oracle = read(folder / f"{plan.name}-{recipe}.pt")
        assert error(result.output, oracle.output) <= SAME
        by_name = errors(result, oracle)
        assert max(by_name.values()) <= ROUNDED_OTHERWISE, by_name
        assert statistics.median(by_name.values()) <= SAME, by_name
        assert max(errors(whole, oracle).values()) > 5 * ROUNDED_OTHERWISE, "nothing was sliced"

        of_plan, of_fp8 = difference(result, whole), difference(whole, unsharded["bf16"])
        with capsys.disabled():
            print(
                f"\n  {plan.name}, {recipe}: off the oracle by {max(by_name.values()):.0e}; off the"
                f" unsharded FP8 by {of_plan[0]:.1e} (logits) and {of_plan[1]:.1e} (gradients), FP8"
                f" off FP32 by {of_fp8[0]:.1e} and {of_fp8[1]:.1e}",
                end="",
            )
        assert of_plan[0] <= OF_FP8 * of_fp8[0]
        assert of_plan[1] <= OF_FP8 * of_fp8[1]


def difference(a: Result, b: Result) -> tuple[float, float]:
    """The error of the logits and the median of the gradients' errors."""
    return error(a.output, b.output), statistics.median(errors(a, b).values())
