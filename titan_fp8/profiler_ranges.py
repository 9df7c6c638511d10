"""The ranges that FSDP2 marks for the profiler, about twenty for each block and step.

Each range is two ops. FSDP2's hooks on experts run inside the checkpoint of their block, whose
dispatch modes see these ops, too. The ranges take about 3 % of the CPU time of a step of
DeepSeekV3. Here FSDP2 marks most of them only while the profiler runs.
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
    """Wraps torch's `record_function`: does nothing unless the profiler runs in this thread."""
    nothing = contextlib.nullcontext()

    def mark(name: str, args: str | None = None) -> Any:
        return record_function(name, args) if torch.autograd._profiler_enabled() else nothing

    return mark


def without_profiler_ops(ignored: set) -> set:
    """PyTorch's set of ops that op-level checkpointing ignores, with those of the profiler."""
    return ignored | PROFILER_OPS
