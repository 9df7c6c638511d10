import torch
from count import CountKernels
from torch.utils.checkpoint import SAC_IGNORED_OPS

from titan_fp8.profiler_ranges import PROFILER_OPS, while_profiling, without_profiler_ops


def test_ranges_are_marked_while_the_profiler_runs():
    made = []

    def record_function(name, args=None):
        made.append(name)
        return torch.profiler.record_function(name, args)

    mark = while_profiling(record_function)
    with mark("before"), mark("before, inside"):
        pass
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, mark("during", None):
        pass
    with mark("after"):
        pass
    assert made == ["during"]
    assert "during" in {event.name for event in profile.events()}


def test_checkpoints_ignore_the_ops_of_a_range():
    with CountKernels() as mode, torch.profiler.record_function("range"):
        pass
    assert set(mode.calls) == PROFILER_OPS
    assert without_profiler_ops(SAC_IGNORED_OPS) == SAC_IGNORED_OPS | PROFILER_OPS
