"""Modules of torchtitan 0.3 in which several FP8Linears read the same input.

`FeedForward` runs its three linears as one `fp8_swiglu` (`titan_fp8/feed_forward.py`). Attention
quantizes the input that its projections share only once; the gain is memory in eager mode, since
torch.compile merges the equal quantizations by itself. Models with a fused wqkv have nothing to
share.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torchtitan.config.override import derive
from torchtitan.models.common.attention import AttentionMasksType, QKVLinear
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.deepseek_v3.model import Attention
from torchtitan.protocols.module import Module

from titan_fp8 import feed_forward
from titan_fp8.linear import shared_input
from titan_fp8.torchtitan_0_3.linear import FP8Linear, replace

_FORWARD = FP8Linear.forward


class FP8FeedForward(feed_forward.FP8FeedForward, FeedForward):
    """The feed-forward of dense blocks and of shared experts."""

    linear_class = FP8Linear

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def must_be_called(self, linear: nn.Module) -> bool:
        """Whether calling `linear` does more than FP8Linear.forward."""
        return (
            type(linear) is not self.linear_class
            or FP8Linear.forward is not _FORWARD
            # Without tensor parallelism torchtitan's wrapper has nothing to redistribute.
            or linear.tensor_parallel
            or vars(linear).get("forward") is not linear.wrapper
            or feed_forward.call_does_more(linear)
            or spmd.is_type_checking()
        )


class FP8SigmoidGatedFeedForward(SigmoidGatedFeedForward, FP8FeedForward):
    """The feed-forward with a gate, which multiplies the output."""

    @dataclass(kw_only=True, slots=True)
    class Config(SigmoidGatedFeedForward.Config):
        pass


def sharing(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """`shared_input(x)`, but in compiled code nothing, since the compiler shares by itself."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else shared_input(x)


class SharedInputQKVLinear(QKVLinear):
    """wq, wk and wv, which share their input."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        pass

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As torchtitan's."""
        with sharing(x):
            return super().forward(x)


class SharedInputAttention(Attention):
    """DeepSeek-V3's attention: wkv_a shares its input with wq or wq_a."""

    @dataclass(kw_only=True, slots=True)
    class Config(Attention.Config):
        pass

    def forward(
        self,
        x: Tensor,
        attention_masks: AttentionMasksType,
        positions: Tensor | None = None,
    ) -> Tensor:
        """As torchtitan's."""
        with sharing(x):
            return super().forward(x, attention_masks, positions)


_FUSED: dict[type, Any] = {
    FeedForward.Config: FP8FeedForward.Config,
    SigmoidGatedFeedForward.Config: FP8SigmoidGatedFeedForward.Config,
}
_SHARING: dict[type, Any] = {
    QKVLinear.Config: SharedInputQKVLinear.Config,
    Attention.Config: SharedInputAttention.Config,
}


def fuse_feed_forwards(model: Module.Config) -> int:
    """Fuses the feed-forwards of a model's config, in place, and returns how many."""
    return _convert(model, FeedForward.Config, _FUSED, _can_fuse)


def share_attention_inputs(model: Module.Config) -> int:
    """Converts the attention configs with FP8 linears, in place, and returns how many."""
    return sum(_convert(model, cls, _SHARING, _has_fp8_linears) for cls in _SHARING)


def _convert(model: Module.Config, cls: type, classes: dict[type, Any], suits: Any) -> int:
    """Replaces the configs of `cls` that suit by the class that `classes` has for theirs."""
    found = [each for each in model.traverse(cls) if type(each[1]) in classes and suits(each[1])]
    for _, config, parent, attribute in found:
        replace(parent, attribute, derive(config, classes[type(config)]))
    return len(found)


def _can_fuse(config: FeedForward.Config) -> bool:
    """Whether the linears are FP8Linears without bias, of equal settings and a fused recipe."""
    linears = (config.w1, config.w2, config.w3)
    return all(type(x) is FP8Linear.Config for x in linears) and feed_forward.can_fuse(*linears)


def _has_fp8_linears(config: Module.Config) -> bool:
    return any(config.traverse(FP8Linear.Config))
