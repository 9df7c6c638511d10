"""Op-level activation checkpointing: FP8 GEMMs count as the mm they replace.

torchtitan's policy saves the outputs of some ops, and of every second `aten.mm`. To it an FP8 GEMM
is an op that it has never heard of, to be recomputed each time. Here it is asked about `aten.mm` in
the GEMM's place, so that a block keeps the memory that it had in bf16. Saving all of them instead
was 5 % faster on Llama3-8B and took as much memory as no checkpointing at all (docs/benchmarks.md).
Grouped GEMMs are recomputed, as torchtitan's own are.

Blocks that are compiled as a whole tell the compiler what to keep: the policy is asked while they
are traced. MoE blocks are compiled in parts, and the checkpoint around them sees the ops of their
compiled code as they run, but not what that code does to their outputs: it writes the next thing
where it has read the last. A product kept from there is another one when it is needed. So nothing
is kept of them, as in bf16, whose GEMMs the policy does not recognise in compiled code. Nor is it
asked then: our ops go past the checkpoint's modes, in which the host spends as long as in an op.

The indices that sort a rank's tokens by expert are kept: they are small, follow from counts that
torchtitan keeps, and making them again would take the host longer than the GPU. Those by which
tokens go to their slots are not: they have to go together with the routing, which is recomputed.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from torchtitan.distributed import activation_checkpoint

from titan_fp8.ops import NAMES
from titan_fp8.recipe import RECIPES, op_of

_ops = torch.ops.titan_fp8
_GEMMS = {op_of(recipe.fprop.op) for recipe in RECIPES.values()}


def adapt_checkpointing() -> None:
    """Has torchtitan's op-level checkpointing treat our ops as the module says; idempotent."""
    wrapper = activation_checkpoint.ptd_checkpoint_wrapper
    activation_checkpoint.ptd_checkpoint_wrapper = _adapted(getattr(wrapper, "of_host", wrapper))


def _adapted(wrapper: Callable) -> Callable:
    @functools.wraps(wrapper)
    def wrap(module: nn.Module, **options: Any) -> nn.Module:
        if "context_fn" in options:
            options["context_fn"] = _with_our_ops(options["context_fn"], module)
        return wrapper(module, **options)

    wrap.of_host = wrapper
    return wrap


def _with_our_ops(context_fn: Callable, block: nn.Module) -> Callable:
    """`context_fn`, for the checkpoint around `block`, with contexts whose policy knows our ops."""

    @functools.cache
    def is_compiled_in_parts() -> bool:
        # Asked when it runs: torchtitan compiles after it has wrapped, and not every model.
        return any(
            isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
            for module in block.modules()
        )

    def make_contexts() -> tuple:
        contexts = context_fn()
        for context in contexts:
            if getattr(context, "policy_fn", None) is not None:
                context.policy_fn = _knowing_our_ops(context.policy_fn)
            if isinstance(context, TorchDispatchMode):
                context.of_compiled_parts = is_compiled_in_parts()
                _let_our_ops_pass(type(context))
        return contexts

    return make_contexts


@functools.cache
def _let_our_ops_pass(mode: type) -> None:
    """Has our ops ask `_pass` what to do under a mode of this class, once a process."""
    for name in (f"titan_fp8::{name}" for name in NAMES):
        torch.library.register_torch_dispatch(name, mode, _pass)


def _pass(mode: Any, func: Any, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
    """Runs an op, past the mode if it is one of a block in compiled parts that is not traced."""
    if getattr(mode, "of_compiled_parts", False) and type(args[0]) is torch.Tensor:
        return func(*args, **(kwargs or {}))
    return type(mode).__torch_dispatch__(mode, func, types, args, kwargs)


def _knowing_our_ops(policy: Callable) -> Callable:
    def ask(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if func is _ops.places_of_tokens.default:
            return CheckpointPolicy.MUST_SAVE
        if func in _GEMMS:
            # Arguments that are their defaults do not arrive.
            a, _, w, *rest = args
            if not rest or rest[0] is None:
                # torchtitan reads the shape of the right operand; a real one would enter the graph.
                right = SimpleNamespace(shape=torch.Size(reversed(w.shape)))
                return policy(ctx, torch.ops.aten.mm.default, a, right)
        return policy(ctx, func, *args, **kwargs)

    return ask
