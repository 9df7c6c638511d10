"""FP8 ops under op-level selective activation checkpointing (SAC).

With `activation_checkpoint.mode = "selective"` and `selective_ac_option = "op"` torchtitan wraps
each transformer block in `checkpoint_wrapper(block, context_fn=...)`. `context_fn` returns two
dispatch modes of torch.utils.checkpoint: `_CachingTorchDispatchMode` around forward, and
`_CachedTorchDispatchMode` around the recomputation in backward. For each op that is dispatched, the
first calls `policy_fn(ctx, op, *args)` and saves the op's output if the answer is MUST_SAVE.
torchtitan's policy saves every second `aten.mm` and recomputes ops that it does not know, FP8 GEMMs
among them.

`with_fp8_policy` makes that policy see a dense FP8 GEMM as the `aten.mm` that it replaces. So every
second one is saved, and a block saves as many bytes as in bf16. Saving all of them was 6 % faster
on Llama3-8B and took more memory than no checkpointing at all (docs/history/log_2026-11-20.md).
Grouped GEMMs are recomputed, as torchtitan's are.

GEMMs in blocks that are compiled in parts are recomputed, too. Dense blocks are compiled as a
whole: Dynamo traces the checkpoint with the block, asks the policy while it traces, and the
partitioner acts on the answers. MoE blocks are compiled in parts, inside the checkpoint, so the
dispatch modes would see the custom ops that Inductor's code calls at run time. Inductor reuses
buffers in place, so a saved output may be overwritten before backward reads it, and no version
counter shows it. So no output of an FP8 op is saved in these blocks, and FP8 ops that are not part
of compiled code skip the modes there (`modes_that_ignore_ops`). In bf16 no output of a GEMM is
saved there either, because Inductor calls GEMMs without dispatch.

An op that a mode sees takes the CPU about 20 us longer. `outside_checkpoint` takes the mode of such
a block away while code runs that calls many ops of which few are saved; it calls those in
`inside_checkpoint`. The recomputation does the same, so it finds what forward has saved.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _pop_mode,
    _pop_mode_temporarily,
    _push_mode,
)
from torch.utils.checkpoint import CheckpointPolicy

from titan_fp8.ops.registry import mode_ignores_ops, modes_that_ignore_ops
from titan_fp8.recipe import RECIPES

_FPROPS = {recipe.fprop.overload for recipe in RECIPES.values()}


def with_fp8_policy(checkpoint_wrapper: Callable) -> Callable:
    """Wraps torch's `checkpoint_wrapper`, so that the SAC policy of each block knows FP8 ops."""

    @functools.wraps(checkpoint_wrapper)
    def wrap(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
        if "context_fn" in options:
            options["context_fn"] = _with_fp8_contexts(options["context_fn"], module)
        return checkpoint_wrapper(module, *args, **options)

    return wrap


def _with_fp8_contexts(context_fn: Callable, block: nn.Module) -> Callable:
    """Wraps the `context_fn` of the checkpoint around `block`, whose modes get our policy."""

    @functools.cache
    def is_compiled_in_parts() -> bool:
        # Evaluated at the first forward: torchtitan compiles after it wraps, if it compiles.
        return any(
            isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
            for module in block.modules()
        )

    def make_contexts() -> tuple[Any, ...]:
        contexts: tuple[Any, ...] = context_fn()
        for context in contexts:
            if is_compiled_in_parts():
                modes_that_ignore_ops.add(context)
            # In torch 2.13 the second mode has no policy_fn.
            if getattr(context, "policy_fn", None) is not None:
                context.policy_fn = _fp8_policy(context.policy_fn, is_compiled_in_parts())
        return contexts

    return make_contexts


def _fp8_policy(policy: Callable, compiled_in_parts: bool) -> Callable:
    """torchtitan's `policy`, asked about `aten.mm` in place of a dense FP8 GEMM."""

    def decide(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func in _FPROPS and not (compiled_in_parts and _is_running(args)):
            # Dispatch drops trailing arguments that equal their defaults.
            x, _, w, *rest = args
            offs = rest[0] if rest else None
            if offs is None:
                # The policy reads only the shape of mm's right operand. Transposing the weight
                # itself would add an op to the trace.
                right = SimpleNamespace(shape=torch.Size(reversed(w.shape)))
                return policy(ctx, torch.ops.aten.mm.default, x, right)
        return policy(ctx, func, *args, **kwargs)

    return decide


def _is_running(args: tuple) -> bool:
    """True if an op with these arguments executes on real tensors, not while tracing."""
    return type(args[0]) is Tensor


class _Left(threading.local):
    """The mode that `outside_checkpoint` has taken away in this thread, until it is back."""

    mode: TorchDispatchMode | None = None


_left = _Left()


@contextlib.contextmanager
def outside_checkpoint() -> Iterator[None]:
    """Takes the dispatch mode of a checkpoint away if it is the only one and ignores FP8 ops.

    Ops of which the checkpoint may save the output must be called in `inside_checkpoint`.
    """
    if not mode_ignores_ops():
        yield
        return
    with _pop_mode_temporarily() as _left.mode:
        try:
            yield
        finally:
            _left.mode = None


@contextlib.contextmanager
def inside_checkpoint() -> Iterator[None]:
    """In `outside_checkpoint`, brings the mode back; elsewhere it changes nothing."""
    mode = _left.mode
    if mode is None:
        yield
        return
    _left.mode = None
    _push_mode(mode)
    try:
        yield
    finally:
        _pop_mode()
        _left.mode = mode
