"""The kernel that sums gradients which ranks have sent each other; for any CUDA GPU."""

from torch import Tensor
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.launch import kernel
from titan_fp8.layouts import cdiv

WARPS = 4
ELEMENTS = 8
"""Elements that a thread reads at once: 16 bytes of bf16."""
LOADS = 4
"""Such reads per thread."""
TILE = ELEMENTS * LOADS * 32 * WARPS
LAYOUT = gl.BlockedLayout([ELEMENTS], [32], [WARPS], [0])


@kernel()
def sum_gradients_kernel(
    out,
    own,
    received,
    size,
    rank,
    others,
    SCALE: gl.constexpr,
    TILE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Adds the parts of all ranks in FP32, in the order of the ranks, each multiplied by SCALE."""
    i = gl.program_id(0) * TILE + gl.arange(0, TILE, LAYOUT)
    mask = i < size
    # -0.0, so that zeros keep their sign. gl.full(-0.0) is +0.0.
    total = gl.full([TILE], -(2**31), gl.int32, LAYOUT).to(gl.float32, bitcast=True)
    other = received
    for _ in range(rank):
        total += gl.load(other + i, mask=mask).to(gl.float32) * SCALE
        other += size
    total += gl.load(own + i, mask=mask).to(gl.float32) * SCALE
    for _ in range(rank, others):
        total += gl.load(other + i, mask=mask).to(gl.float32) * SCALE
        other += size
    gl.store(out + i, total, mask=mask)


def sum_gradients(
    out: Tensor, own: Tensor, received: Tensor, rank: int, ranks: int, scale: float
) -> None:
    """Sums this rank's part of the gradients of all ranks.

    Args:
        out: (n,), FP32 or bf16, contiguous, as all others; 0 < n < PART_LIMIT
            (`gradient_reduction.py`). A sum is rounded once.
        own: (n,), bf16, what this rank has computed.
        received: ((ranks - 1) n,), bf16, what the other ranks have, in their order.
        rank, ranks: of this rank, and how many there are.
        scale: each gradient is multiplied by it, in FP32, before they are added.
    """
    size = own.numel()
    grid = (cdiv(size, TILE),)
    sum_gradients_kernel[grid](
        out, own, received, size, rank, ranks - 1, scale, TILE, LAYOUT, num_warps=WARPS
    )
