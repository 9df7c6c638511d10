"""FSDP2's reduction of gradients over one rank, as a copy of each.

Where all ranks are expert-parallel, each is alone in the group over which FSDP2 reduces the
gradients of its experts. FSDP2 puts them behind each other in FP32 as it does for any group, by an
operation for which the CPU writes a table of all blocks to copy and sends it to the GPU: 100 ms
of a DeepSeekV3-16B step's CPU time on two GPUs. One rank has nothing to interleave.
"""

from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

_host_copy_in = _fsdp_collectives.foreach_reduce_scatter_copy_in


def copy_in(unsharded_grads: list[Tensor], out: Tensor, world_size: int) -> None:
    """Copies gradients behind each other into `out`, as FSDP2 does, and by it for several ranks."""
    if world_size > 1:
        return _host_copy_in(unsharded_grads, out, world_size)
    for to, grad in zip(out.split([g.numel() for g in unsharded_grads]), unsharded_grads):
        to.view_as(grad).copy_(grad)


def reduce_over_one_rank_by_copies() -> None:
    """Replaces what FSDP2 does with the gradients of a group of one rank; idempotent."""
    _fsdp_collectives.foreach_reduce_scatter_copy_in = copy_in
