"""torchtitan's dense feed-forwards, fused: w1, w2 and w3 run as one `fp8_swiglu`.

The linears stay submodules, with their parameters and names. The fused forward reads their weights
and does not call them, so anything that acts on the call of a linear would be skipped: hooks,
tensor parallelism (DTensor weights, hooks that distribute the input), or a wrapper around a single
linear for checkpointing, FSDP or the compiler. Each forward checks for these, and if it finds one,
runs torchtitan's own forward, which calls the FP8Linears.
"""

from typing import Any

import torch.nn.modules.module as nn_module
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.moe import moe
from torchtitan.models.qwen3.model import model as qwen3

from titan_fp8.linear import FP8Linear
from titan_fp8.recipe import get_recipe
from titan_fp8.swiglu import fp8_swiglu


class FP8FeedForward(nn.Module):
    """A mixin before one of torchtitan's FeedForward classes, whose forward is the fallback."""

    w1: FP8Linear
    w2: FP8Linear
    w3: FP8Linear

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) to (..., K): w2(silu(w1 x) * w3 x)."""
        if any(_must_be_called(linear) for linear in (self.w1, self.w2, self.w3)):
            return super().forward(x)
        return fp8_swiglu(
            x,
            *(self.w1.weight, self.w2.weight, self.w3.weight),
            recipe=self.w1.recipe,
            emulate=self.w1.emulate,
        )


class Llama3FeedForward(FP8FeedForward, llama3.FeedForward):
    """Llama3's."""


class Llama4FeedForward(FP8FeedForward, llama4.FeedForward):
    """Llama4's."""


class Qwen3FeedForward(FP8FeedForward, qwen3.FeedForward):
    """Qwen3's."""


class MoEFeedForward(FP8FeedForward, moe.FeedForward):
    """DeepSeek-V3's, and the shared experts of every MoE."""


_FUSED = {
    fused.__bases__[1]: fused
    for fused in (Llama3FeedForward, Llama4FeedForward, Qwen3FeedForward, MoEFeedForward)
}


def _must_be_called(linear: nn.Module) -> bool:
    """Whether calling `linear` does more than FP8Linear.forward, or its weight is sharded."""
    return (
        type(linear) is not FP8Linear
        or isinstance(linear.weight, DTensor)
        or linear._compiled_call_impl is not None
        or "forward" in vars(linear)
        # The hooks that nn.Module.__call__ checks before it calls forward directly.
        or bool(
            linear._forward_pre_hooks
            or linear._forward_hooks
            or linear._backward_pre_hooks
            or linear._backward_hooks
            or nn_module._global_forward_pre_hooks
            or nn_module._global_forward_hooks
            or nn_module._global_backward_pre_hooks
            or nn_module._global_backward_hooks
        )
    )


def fuse_feed_forwards(model: nn.Module) -> int:
    """Fuses torchtitan's feed-forwards, in place by their class, and returns how many.

    All three linears must be FP8Linears of a recipe that has the ops for it.
    """
    feed_forwards = [m for m in model.modules() if type(m) in _FUSED and _can_fuse(m)]
    for module in feed_forwards:
        module.__class__ = _FUSED[type(module)]
    return len(feed_forwards)


def _can_fuse(feed_forward: Any) -> bool:
    """Whether the linears are FP8Linears without bias, of equal settings and a fused recipe."""
    linears = (feed_forward.w1, feed_forward.w2, feed_forward.w3)
    if not all(type(linear) is FP8Linear and linear.bias is None for linear in linears):
        return False
    settings = {(linear.recipe, linear.emulate) for linear in linears}
    return len(settings) == 1 and get_recipe(linears[0].recipe).swiglu is not None
