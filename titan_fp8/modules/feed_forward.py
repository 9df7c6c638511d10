"""A dense gated feed-forward, fused: w1, w2 and w3 run as one `fp8_swiglu`.

The linears stay submodules, with their parameters and names. The fused forward reads their weights
and does not call them, so it would skip whatever acts on the call of a linear: hooks, tensor
parallelism (DTensor weights, hooks that distribute the input), or a wrapper around a single linear
for checkpointing, FSDP or the compiler. It has no biases and one recipe for all three linears. All
this may change after the conversion, so each forward checks for it. If the fused forward would
compute something else, torchtitan's own forward runs, which calls the linears.
"""

from typing import Any

import torch.nn.modules.module as nn_module
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_fp8.functional.swiglu import fp8_swiglu
from titan_fp8.modules.linear import FP8Linear
from titan_fp8.recipe import get_recipe


class FP8FeedForward(nn.Module):
    """A mixin before a FeedForward class of torchtitan, whose forward is the fallback."""

    w1: FP8Linear
    w2: FP8Linear
    w3: FP8Linear

    linear_class: type[FP8Linear] = FP8Linear
    """The exact class of w1, w2 and w3; a subclass may compute something else."""

    def forward(self, x: Tensor) -> Tensor:
        """y (..., K) = w2(silu(w1 x) * w3 x) for x (..., K)."""
        if not self.runs_fused():
            return super().forward(x)
        weights = (self.w1.weight, self.w2.weight, self.w3.weight)
        try:
            return fp8_swiglu(x, *weights, recipe=self.w1.recipe, emulate=self.w1.emulate)
        except ValueError as error:
            name = self.w1.fqn.rpartition(".")[0]
            raise ValueError(f"{name}: {error}" if name else str(error)) from None

    def runs_fused(self) -> bool:
        """Whether the fused forward computes what calling w1, w2 and w3 would."""
        linears = (self.w1, self.w2, self.w3)
        return can_fuse(self, self.linear_class) and not any(map(self.must_be_called, linears))

    def must_be_called(self, linear: Any) -> bool:
        """Whether calling `linear` does more than FP8Linear.forward, or its weight is a DTensor."""
        return (
            isinstance(linear.weight, DTensor)
            or vars(linear).get("forward") is not linear.wrapper
            or linear._compiled_call_impl is not None
            or has_hooks(linear)
        )


def can_fuse(feed_forward: Any, linear_class: type) -> bool:
    """Whether w1, w2 and w3 have this class, no bias and the same recipe, one with the ops for it.

    All of them are modules, or all are their configs.
    """
    linears = (feed_forward.w1, feed_forward.w2, feed_forward.w3)
    return (
        all(type(each) is linear_class for each in linears)
        and all(each.bias is None or each.bias is False for each in linears)
        and len({(each.recipe, each.emulate) for each in linears}) == 1
        and get_recipe(linears[0].recipe).feed_forward is not None
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether there are hooks on the call of `module`: what nn.Module.__call__ checks for."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or nn_module._has_any_global_hook()
    )
