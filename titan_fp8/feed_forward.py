"""A dense gated feed-forward, fused: w1, w2 and w3 run as one `fp8_swiglu`.

The linears stay submodules, with their parameters and names. The fused forward reads their weights
and does not call them, so it would skip whatever acts on the call of a linear: hooks, tensor
parallelism (DTensor weights, hooks that distribute the input), or a wrapper around a single linear
for checkpointing, FSDP or the compiler. Each forward checks for these. If it finds one, it runs
torchtitan's own forward, which calls the FP8Linears.
"""

from typing import Any

import torch.nn.modules.module as nn_module
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_fp8.linear import FP8Linear
from titan_fp8.swiglu import fp8_swiglu


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
        return fp8_swiglu(
            x,
            self.w1.weight,
            self.w2.weight,
            self.w3.weight,
            recipe=self.w1.recipe,
            emulate=self.w1.emulate,
        )

    def runs_fused(self) -> bool:
        """Whether forward runs fused, as nothing acts on the calls of the linears."""
        return not any(self.must_be_called(linear) for linear in (self.w1, self.w2, self.w3))

    def must_be_called(self, linear: nn.Module) -> bool:
        """Whether calling `linear` does more than FP8Linear.forward, or its weight is sharded."""
        return (
            type(linear) is not self.linear_class
            or "forward" in vars(linear)
            or call_does_more(linear)
        )


def call_does_more(linear: Any) -> bool:
    """Whether hooks or the compiler act on the call of `linear`, or its weight is a DTensor."""
    return (
        isinstance(linear.weight, DTensor)
        or linear._compiled_call_impl is not None
        or has_hooks(linear)
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether there are hooks on the call of `module`: what nn.Module.__call__ checks for."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or nn_module._global_forward_pre_hooks
        or nn_module._global_forward_hooks
        or nn_module._global_backward_pre_hooks
        or nn_module._global_backward_hooks
    )
