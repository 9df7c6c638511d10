"""The ranges that FSDP2 marks for the profiler, about twenty for each block and step.

Each is two ops. On the experts of a MoE block FSDP2's hooks run inside a checkpoint, whose dispatch
modes see both. All of them take about 3 % of the CPU time of a step of DeepSeekV3. Here FSDP2 marks
ranges only while the profiler runs.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

PROFILER_OPS = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}


def while_profiling(record_function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps torch's `record_function`: does nothing unless this process is being profiled."""
    nothing = contextlib.nullcontext()

    def mark(name: str, args: str | None = None) -> Any:
        return record_function(name, args) if torch.autograd._profiler_enabled() else nothing

    return mark


def without_profiler_ops(ignored: set) -> set:
    """PyTorch's set of ops that op-level checkpointing ignores, with those of the profiler."""
    return ignored | PROFILER_OPS
