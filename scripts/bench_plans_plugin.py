"""What a job of bench_plans.py loads: titan_fp8.plugin, short production models, and a profiler.

A flavor such as "8B-8-layers" has the layers of the whole model, but fewer of them, so that a plan
fits on few GPUs. The folder of this file must be on PYTHONPATH; bench_plans.py sets it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.profiler
from torch.profiler import ProfilerAction, ProfilerActivity
from torchtitan.protocols.train_spec import get_train_spec

from titan_fp8.plugin import JobConfig

__all__ = ["JobConfig"]

LAYERS = {
    "llama3": {"8B": 8, "70B": 6},
    "deepseek_v3": {"16B": 8},
}
"""Model -> flavor -> layers of the flavor that is added, such as "8B-8-layers"."""

BETWEEN = 8
"""Steps from the end of the earlier trace to that of the later one."""

RECORDED = 4
"""Steps of the later trace, which warms up in the step before them."""


class TwoTraces(torch.profiler.profile):
    """torchtitan's profiler, with another trace eight steps earlier.

    Only the earlier trace has the events of the CPU, by which NCCL's kernels tell how many elements
    they move. Recording them slows the CPU, and then the GPU waits for it. So the later trace has
    those of the GPU alone. It covers four steps, because ranks do not begin to record at the same
    time: in the first of them, kernels of NCCL wait for the other ranks.
    """

    def __init__(self, *, schedule: Callable[[int], ProfilerAction], **options: Any):
        none, last = ProfilerAction.NONE, ProfilerAction.RECORD_AND_SAVE

        def twice(step: int) -> ProfilerAction:
            earlier = schedule(step + BETWEEN)
            if schedule(step) is last:
                return last
            if earlier is not none:
                return earlier
            if last in (schedule(step + n) for n in range(1, RECORDED)):
                return ProfilerAction.RECORD
            return ProfilerAction.WARMUP if schedule(step + RECORDED) is last else none

        super().__init__(schedule=twice, **options)

    def prepare_trace(self) -> None:
        super().prepare_trace()
        self.activities, self.record_shapes = {ProfilerActivity.CUDA}, False  # of the next trace


if torch.cuda.is_available():
    torch.profiler.profile = TwoTraces  # type: ignore[misc]

for model, flavors in LAYERS.items():
    known = get_train_spec(model).model_args
    for flavor, layers in flavors.items():
        known[f"{flavor}-{layers}-layers"] = dataclasses.replace(known[flavor], n_layers=layers)
