import torch
from count import CountKernels

from titan_fp8.host.profiler_ranges import while_profiling


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


def test_checkpoints_do_not_see_the_ops_of_a_range():
    """They would have to see as many in the recomputation as in forward."""
    mark = while_profiling(torch.profiler.record_function)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities), CountKernels() as mode, mark("range"):
        torch.ones(2) + 1
    assert {str(op) for op in mode.calls} == {"aten.ones.default", "aten.add.Tensor"}
