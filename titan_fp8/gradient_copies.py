"""How FSDP2 copies the gradients of a unit into the buffer that it reduce-scatters.

The buffer holds, for each rank, that rank's rows of every gradient, in the dtype of the reduction.
FSDP2 fills it by one kernel, `chunk_cat`. For this the CPU builds a table that grows with the rows
of a rank, so it is large where few ranks share large weights. `torch._foreach_copy_` writes the
same numbers without a table. Its CPU time grows with the number of copies instead, ranks times
gradients.

A block of Llama3-8B, bf16 to FP32, in us (CPU / GPU; one H200, torch 2.11):

    ranks                2             8           64
    chunk_cat      2,574 / 1,023   270 / 650     139 / 593
    foreach          232 /   412   378 / 413   1,947 / 414
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

MOST_COPIES = 64
"""With more copies than this, `chunk_cat` takes the CPU less time."""


def copy_by_foreach(copy_in: Callable) -> Callable:
    """Wraps FSDP2's `foreach_reduce_scatter_copy_in`: few copies are made by a foreach op."""

    @functools.wraps(copy_in)
    def copy(unsharded_grads: list[Tensor], reduce_scatter_input: Tensor, world_size: int) -> None:
        rows = [grad.shape[0] for grad in unsharded_grads]
        padded = any(n % world_size or not n for n in rows)
        if padded or world_size * len(rows) > MOST_COPIES:
            return copy_in(unsharded_grads, reduce_scatter_input, world_size)
        sizes = [grad.numel() // world_size for grad in unsharded_grads]
        chunks = [grad.reshape(world_size, -1).unbind() for grad in unsharded_grads]
        buffer = reduce_scatter_input.view(world_size, -1)
        torch._foreach_copy_(
            [slot for rank in buffer.unbind() for slot in rank.split(sizes)],
            [chunk for rank in zip(*chunks, strict=True) for chunk in rank],
        )

    return copy
