"""The ranges that FSDP2 marks for the profiler, about twenty for each block and step.

Each range is two ops, and they take about 3 % of the CPU time of a step of DeepSeekV3. Here FSDP2
marks most of them only while the profiler runs.

FSDP2's hooks on experts run inside the checkpoint of their block. torch 2.13 demands that the
recomputation calls every op as often as forward did, but FSDP2 marks other ranges there, and takes
the experts for a root. So checkpoints see neither the ops of a range nor what FSDP2 does for a
root.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_NOTHING = contextlib.nullcontext()


def while_profiling(record_function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps torch's `record_function`: does nothing unless the profiler runs in this thread."""

    def mark(name: str, args: str | None = None) -> Any:
        if not torch.autograd._profiler_enabled():
            return _NOTHING
        return _below_modes(record_function(name, args))

    return mark


def below_modes(root_pre_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `FSDPState._root_pre_forward`: no dispatch mode sees its ops."""

    @functools.wraps(root_pre_forward)
    def prepare(self: Any, *args: Any) -> Any:
        with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else _NOTHING:
            return root_pre_forward(self, *args)

    return prepare


@contextlib.contextmanager
def _below_modes(marked: Any) -> Iterator[None]:
    """Enters and leaves the range `marked` without dispatch modes."""
    with _disable_current_modes():
        marked.__enter__()
    try:
        yield
    finally:
        with _disable_current_modes():
            marked.__exit__(None, None, None)
