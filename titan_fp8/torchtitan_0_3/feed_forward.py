"""torchtitan 0.3's feed-forwards, fused (`titan_fp8/modules/feed_forward.py`)."""

from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
from torchtitan.config.override import derive
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.protocols.module import Module

from titan_fp8.modules import feed_forward
from titan_fp8.torchtitan_0_3.linear import FP8Linear, replace


class FP8FeedForward(feed_forward.FP8FeedForward, FeedForward):
    """The feed-forward of dense blocks and of shared experts."""

    linear_class = FP8Linear

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def must_be_called(self, linear: Any) -> bool:
        """Also under tensor parallelism, where torchtitan's wrapper redistributes tensors."""
        sharded = linear.tensor_parallel or spmd.is_type_checking()
        return sharded or super().must_be_called(linear)


def fuse_feed_forwards(model: Module.Config) -> int:
    """Fuses the feed-forwards of a model's config, in place, and returns how many."""
    found = [
        each
        for each in model.traverse(FeedForward.Config)
        if type(each[1]) is FeedForward.Config and feed_forward.can_fuse(each[1], FP8Linear.Config)
    ]
    for _, config, parent, attribute in found:
        replace(parent, attribute, derive(config, FP8FeedForward.Config))
    return len(found)
