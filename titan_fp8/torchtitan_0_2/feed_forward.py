"""torchtitan's dense feed-forwards, fused (`titan_fp8/modules/feed_forward.py`)."""

from torch import nn
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.moe import moe
from torchtitan.models.qwen3.model import model as qwen3

from titan_fp8.modules.feed_forward import FP8FeedForward, can_fuse
from titan_fp8.modules.linear import FP8Linear


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


def fuse_feed_forwards(model: nn.Module) -> int:
    """Fuses torchtitan's feed-forwards, in place by their class, and returns how many.

    All three linears must be FP8Linears of a recipe that has the ops for it.
    """
    feed_forwards = [m for m in model.modules() if type(m) in _FUSED and can_fuse(m, FP8Linear)]
    for module in feed_forwards:
        module.__class__ = _FUSED[type(module)]
    return len(feed_forwards)
