"""Keeps FSDP2 from moving shards that nobody has replaced.

Where ranks have shards of different sizes, FSDP2 pads the smaller ones. `reset_sharded_param` does
that again before the first forward and after each load_state_dict, in case the shard has been
replaced. If it has not, FSDP2 must not move it. A state dict made before, such as the one that
torchtitan's checkpointer keeps, would no longer follow training. A moved shard also loses its FP8
copy, so this rank would quantize it again and call collectives that the other ranks do not.

FSDP2 recognizes its own memory only if its view of it is a plain tensor. `compare_memory_of` makes
the view plain.
"""

import functools
from collections.abc import Callable

from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils._mode_utils import no_dispatch


def compare_memory_of(kind: type[Tensor]) -> Callable[[Callable], Callable]:
    """Makes the wrapper of FSDP2's `reset_sharded_param` that compares shards of a class, too."""

    def wrap(reset: Callable) -> Callable:
        @functools.wraps(reset)
        def reset_sharded_param(self: FSDPParam) -> None:
            if isinstance(self._sharded_param_data, kind):
                with no_dispatch():
                    self._sharded_param_data = self._sharded_param_data.detach()
            reset(self)

        return reset_sharded_param

    return wrap
