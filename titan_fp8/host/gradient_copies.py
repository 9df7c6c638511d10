"""How FSDP2 copies the gradients of a unit into the buffer that it reduce-scatters.

The buffer holds, for each rank, that rank's rows of every gradient, in the dtype of the reduction.
FSDP2 fills it with one kernel, `chunk_cat`, which needs a table on the GPU. The table grows with
the rows of a rank. Between few ranks it is so large that the CPU waits for its copy, and so for all
earlier work of the stream. Here one launch per gradient writes the same numbers, without a table.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PART_LIMIT = 2**31 - 2**13
"""A rank's part of a gradient must have fewer elements: the kernels count them in 32 bits, those
beyond the end of the last tile, too."""


def copy_by_kernel(copy_in: Callable) -> Callable:
    """Wraps FSDP2's `foreach_reduce_scatter_copy_in`: on GPUs, our kernel makes the copies."""

    @functools.wraps(copy_in)
    def copy(unsharded_grads: list[Tensor], reduce_scatter_input: Tensor, world_size: int) -> None:
        if not fits_kernel(unsharded_grads, reduce_scatter_input, world_size):
            return copy_in(unsharded_grads, reduce_scatter_input, world_size)
        _kernel()(reduce_scatter_input, world_size, *unsharded_grads)

    return copy


def has_kernels(device: torch.device) -> bool:
    """Whether the kernels of `kernels/gradients.py` run there."""
    return device.type == "cuda" and torch.version.hip is None


def fits_kernel(gradients: Sequence[Tensor], buffer: Tensor, ranks: int) -> bool:
    """Whether the kernel can copy them: plain contiguous tensors whose rows divide evenly."""
    return has_kernels(buffer.device) and all(
        type(g) is Tensor
        and g.is_contiguous()
        and g.shape[0]
        and g.shape[0] % ranks == 0
        and g.numel() // ranks < PART_LIMIT
        for g in gradients
    )


@functools.cache
def _kernel() -> Callable[..., tuple[()]]:
    from titan_fp8.kernels.gradients import copy_gradients

    return copy_gradients
