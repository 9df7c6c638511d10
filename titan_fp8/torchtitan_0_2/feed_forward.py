"""torchtitan's dense feed-forwards, fused: w1, w2 and w3 run as one `fp8_swiglu`.

The linears stay where they are, with their parameters and names; the feed-forward reads their
weights and does not call them. So whatever hangs on the call of one of them turns fusion off, in
each forward anew: tensor parallelism (weights that are DTensors, hooks that distribute the input),
hooks of any kind, a wrapper for checkpointing, FSDP or the compiler around a linear alone. Then
torchtitan's own forward runs, with FP8Linears as ever.
"""

import torch.nn.modules.module as nn_module
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.moe import moe
from torchtitan.models.qwen3.model import model as qwen3

from titan_fp8.linear import FP8Linear
from titan_fp8.swiglu import fp8_swiglu


class FP8FeedForward(nn.Module):
    """What `fuse_feed_forwards` puts before a class of torchtitan, whose forward is the next."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) to (..., K): w2(silu(w1 x) * w3 x)."""
        if any(_is_seen(linear) for linear in (self.w1, self.w2, self.w3)):
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


def _is_seen(linear: nn.Module) -> bool:
    """Whether anything but the feed-forward takes part in calling `linear`, or cuts its weight."""
    return (
        type(linear) is not FP8Linear
        or isinstance(linear.weight, DTensor)
        or linear._compiled_call_impl is not None
        or "forward" in vars(linear)
        # What nn.Module looks at to find out whether a call is more than its forward.
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
    """Fuses torchtitan's feed-forwards whose linears are blockwise FP8Linears; returns how many.

    In place, by another class, as the linears were converted before. Other recipes have no fused
    SwiGLU to gain from.
    """
    feed_forwards = [
        module
        for module in model.modules()
        if type(module) in _FUSED and _is_blockwise(module.w1, module.w2, module.w3)
    ]
    for module in feed_forwards:
        module.__class__ = _FUSED[type(module)]
    return len(feed_forwards)


def _is_blockwise(*linears: nn.Module) -> bool:
    """Whether these are blockwise FP8Linears without biases, all emulated or none."""
    if not all(type(linear) is FP8Linear and linear.bias is None for linear in linears):
        return False
    ways = {(linear.recipe, linear.emulate) for linear in linears}
    return len(ways) == 1 and ways < {("blockwise", True), ("blockwise", False)}
