"""Op-level activation checkpointing: FP8 GEMMs count as the mm they replace.

torchtitan's policy saves the outputs of some ops, and of every second `aten.mm`. To it an FP8 GEMM
is an op that it has never heard of, to be recomputed each time. Here it is asked about `aten.mm` in
the GEMM's place, so that a job keeps the memory that it had in bf16. Saving all of them instead was
6 % faster on Llama3-8B and took as much memory as no checkpointing at all (docs/benchmarks.md).
Grouped GEMMs are recomputed, as torchtitan's own are.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.distributed import activation_checkpoint

_GEMMS = (torch.ops.titan_fp8.blockwise_mm.default, torch.ops.titan_fp8.rowwise_mm.default)


def checkpoint_gemms_as_mm() -> None:
    """Has the host's checkpointing ask for `aten.mm` in place of dense FP8 GEMMs; idempotent."""
    wrapper = activation_checkpoint.ptd_checkpoint_wrapper
    if not hasattr(wrapper, "counts_fp8_gemms"):
        activation_checkpoint.ptd_checkpoint_wrapper = _counting_fp8_gemms(wrapper)


def _counting_fp8_gemms(wrapper: Callable) -> Callable:
    @functools.wraps(wrapper)
    def wrap(module: torch.nn.Module, **options: Any) -> torch.nn.Module:
        if "context_fn" in options:
            options["context_fn"] = _asking_for_mm(options["context_fn"])
        return wrapper(module, **options)

    wrap.counts_fp8_gemms = True
    return wrap


def _asking_for_mm(context_fn: Callable) -> Callable:
    """`context_fn` with contexts whose policy is asked about `aten.mm` for FP8 GEMMs."""

    def make_contexts() -> tuple:
        contexts = context_fn()
        for context in contexts:
            if getattr(context, "policy_fn", None) is not None:
                context.policy_fn = _as_mm(context.policy_fn)
        return contexts

    return make_contexts


def _as_mm(policy: Callable) -> Callable:
    def ask(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if func in _GEMMS:
            # Arguments that are their defaults do not arrive.
            a, _, b, _, *rest = args
            if not rest or rest[0] is None:
                # The host reads the shape of the right operand; a real one would enter the graph.
                right = SimpleNamespace(shape=torch.Size(reversed(b.shape)))
                return policy(ctx, torch.ops.aten.mm.default, a, right)
        return policy(ctx, func, *args, **kwargs)

    return ask
