"""The blockwise GEMMs on Hopper: entry points, and how their kernels work.

    blockwise_mm        fprop, dgrad   c[m] = a[m] b[e]ᵀ         1x128 by 128x128, M-grouped
    blockwise_mm_pair                  the sum of two such
    blockwise_wgrad     wgrad          c[e] = a[:, e] b[:, e]ᵀ   1x128 by 1x128, K-grouped

e is the group of token m, or all tokens of group e; a dense layer has one group. Every operand is
K-major: the contracted dimension is last and contiguous, as Hopper's FP8 WGMMA requires. The
kernels are in gemm_blockwise_fprop_dgrad.py and gemm_blockwise_wgrad.py, what they share in
gemm_schedule.py. gemm_rowwise_grouped.py uses the same structure.

Promotion. Hopper's tensor cores accumulate FP8 products with about 14 bits, and each 128 of the
contraction has its own scales. So the accumulator of a WGMMA never runs longer than 128: its
result is then promoted, that is, multiplied by the scales and added in FP32 on the CUDA cores. That
takes about as many instruction slots as the WGMMA leaves free, so the design overlaps the two.

    tiles       128 x 256 (M-grouped) or 256 x 128 (K-grouped). Per result, a tile of this size
                reads 3/4 of the bytes that a 128 x 128 tile reads from the L2 cache.
    waves       A tile is two waves of 128 x 128, one after the other. A thread then needs 128
                registers for FP32 sums and only 64 for the WGMMA in flight.
    consumers   Two warpgroups of 4 warps, each with 64 rows of a wave: one promotes while the
                tensor cores work for the other. M-grouped consumers take turns: a WGMMA starts
                after the other consumer's has started. K-grouped promotion takes twice as long,
                and its consumers run independently.
    ring        One producer warp loads A, B and their scales by TMA, block by block, into a ring of
                3 or 4 stages in shared memory. It runs ahead across the ends of tiles, so the ring
                is full when the consumers come back from an epilogue.
    tile queue  The producer is also the tile scheduler: it alone reads the group ends
                (group_ends.py) and passes tiles to the consumers through a queue in shared memory.
                K-grouped tiles differ in length, so programs draw tickets from a counter. If the
                last round of tiles would occupy at most half of the programs, its tiles are split
                into waves.
    epilogue    Results leave through shared memory by TMA, while the next tile is computed.

K-grouped promotion has a scale per column, too, 32 of them per thread. Consumers read these from
shared memory, whose bandwidth the WGMMAs nearly use up. So the two waves are halves of the rows,
and share the column scales. M-grouped waves are halves of the columns, because groups end at
multiples of 128 rows.

Edges. TMA fills elements outside a tensor with zeros, so short last blocks add nothing. A tile at
the end of a group also reads rows, columns and scales of the next group; no sum mixes rows or
columns, and the epilogue stores only what belongs to the group, by TMA where the tile is full and
with a mask elsewhere. Rows of no group are tiles without blocks, so they are zero, and so is the dW
of an empty group.

One configuration serves all shapes. At the dense shapes measured cuBLAS was never faster by more
than the noise (docs/log.md).
"""

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.hopper.gemm_blockwise_fprop_dgrad import blockwise_fprop_dgrad_kernel
from titan_fp8.kernels.hopper.gemm_blockwise_wgrad import blockwise_wgrad_kernel
from titan_fp8.kernels.hopper.gemm_schedule import VECTOR
from titan_fp8.kernels.hopper.quantize_blockwise import scales_1x128
from titan_fp8.kernels.launch import Box, multiprocessors
from titan_fp8.reference import BLOCK, E4M3, round_up

OPTIONS = {"num_warps": 4, "maxnreg": 168}
"""A program has 12 warps: two consumers of 4, the producer, and 3 that complete its warpgroup and
are idle. All start with 168 registers per thread; then consumers have 240 and the others 24."""
BAND = 8
"""Rows of tiles in a band of the rasterisation (`in_bands`)."""

Launch = tuple[Any, tuple, dict]
"""A kernel with the arguments and options of one launch."""


def blockwise_mm(
    a_MK: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """fprop and dgrad: a (M, K) by b (N, K), or each group's rows by its own b of (E, N, K).

    sa is 1x128 and sb 128x128; slow accumulation (FP32 every 128). Returns (M, N); rows of no group
    are zero. Groups may start at any row, so `aligned` makes no difference.
    """
    c = a_MK.new_empty(a_MK.shape[0], b.shape[-2], dtype=out_dtype)
    if c.numel():
        run(mm_launch(a_MK, sa, b, sb, c, offs))
    return c


def blockwise_mm_pair(
    a_MK: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    a2_MK: Tensor,
    sa2: Tensor,
    b2: Tensor,
    sb2: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The sum of two `blockwise_mm` of the same shapes, rounded once."""
    c = a_MK.new_empty(a_MK.shape[0], b.shape[-2], dtype=out_dtype)
    if c.numel():
        run(mm_launch(a_MK, sa, b, sb, c, offs, (a2_MK, sa2, b2, sb2)))
    return c


def blockwise_wgrad(
    a_NM: Tensor,
    sa: Tensor,
    b_KM: Tensor,
    sb: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """wgrad: the transposed copies a (N, Mt) by b (K, Mt), over all tokens or those of each group.

    Both scales are 1x128 along the tokens; slow accumulation (FP32 every 128). Returns (N, K), or
    (E, N, K) with zeros for empty groups. Groups start at multiples of 128 columns, `aligned` or
    not.
    """
    lead = () if offs is None else (offs.shape[0],)
    c = a_NM.new_empty(*lead, a_NM.shape[0], b_KM.shape[0], dtype=out_dtype)
    if a_NM.shape[1] == 0:
        return c.zero_()
    run(wgrad_launch(a_NM, sa, b_KM, sb, c, offs))
    return c


def mm_launch(
    a_MK: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    c_MN: Tensor,
    offs: Tensor | None,
    second: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> Launch:
    """The launch that writes `blockwise_mm` to `c_MN`, or its sum with the product of `second`."""
    (m, k), n = a_MK.shape, b.shape[-2]
    groups = 1 if offs is None else offs.shape[0]

    def boxes(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor) -> tuple[Box, ...]:
        assert a.shape == (m, k) and a.is_contiguous() and b.is_contiguous()
        assert b.shape[-2:] == (n, k) and b.numel() == groups * n * k
        assert a.dtype == b.dtype == E4M3 and n % 16 == 0 and k % 16 == 0
        box = (128, 128)
        return (
            matrix(a, box),
            _scale_vector(_column_major(sa), 128),
            matrix(b, box),
            _scale_matrix(sb),
        )

    args = (
        *boxes(a_MK, sa, b, sb),
        *((None,) * 4 if second is None else boxes(*second)),
        matrix(c_MN, (64, 128)),
        c_MN,
        offs,
        *(m, n, k, groups, round_up(m, 4)),
    )
    # FP32 results need an epilogue buffer twice as large, in place of one stage.
    return (
        blockwise_fprop_dgrad_kernel,
        args,
        {"STAGES": 5 - c_MN.itemsize // 2, "BAND": BAND, **OPTIONS},
    )


def wgrad_launch(
    a_NM: Tensor, sa: Tensor, b_KM: Tensor, sb: Tensor, c: Tensor, offs: Tensor | None
) -> Launch:
    """The launch that writes `blockwise_wgrad` to `c`, (N, K) or (E, N, K)."""
    (n, width), k = a_NM.shape, b_KM.shape[0]
    groups = 1 if offs is None else offs.shape[0]
    assert b_KM.shape[1] == width and width % 128 == 0 and n % 16 == 0 and k % 16 == 0
    assert a_NM.dtype == b_KM.dtype == E4M3 and a_NM.is_contiguous() and b_KM.is_contiguous()
    sa, sb = _column_major(sa), _column_major(sb)
    args = (
        matrix(a_NM, (128, 128)),
        _scale_vector(sa, 256),
        matrix(b_KM, (128, 128)),
        _scale_vector(sb, 128),
        matrix(c, (64, 128)),
        c,
        offs,
        None if offs is None else torch.zeros(1, dtype=torch.int32, device=c.device),
        *(width, n, k, groups, sa.stride(1), sb.stride(1)),
    )
    buffers = 4 // c.itemsize
    return blockwise_wgrad_kernel, args, {"STAGES": 3, "BUFFERS": buffers, "BAND": BAND, **OPTIONS}


def run(launch: Launch) -> None:
    kernel, args, options = launch
    kernel[(multiprocessors(args[0].base.device),)](*args, **options)


def matrix(x: Tensor, box: tuple[int, int]) -> Box:
    """TMA's view of x (..., K), contiguous, as one matrix, in boxes.

    A row of a box is 128 bytes, swizzled.
    """
    k = x.shape[-1]
    return Box(x, (x.numel() // k, k), (k, 1), box, _shared_layout(128, x.itemsize * 8))


@functools.cache
def _shared_layout(swizzle: int, bits: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)


def _column_major(s: Tensor) -> Tensor:
    """A 1x128 scale (rows, blocks) in the layout of the quantisers, stride 1 along the rows.

    A copy if its layout differs: hooks for saved tensors may return a contiguous one.
    """
    rows, blocks = s.shape
    if s.stride() == (1, round_up(rows, 4)):
        return s
    return scales_1x128(s, rows, blocks * BLOCK).copy_(s)


def _scale_vector(s: Tensor, box: int) -> Box:
    """TMA's view of a column-major 1x128 scale (rows, blocks) as a vector: column after column."""
    rows, blocks = s.shape
    stride = s.stride(1)
    assert s.dtype == torch.float32 and s.stride(0) == 1 and stride % 4 == 0
    return Box(s, ((blocks - 1) * stride + rows,), (1,), (box,), VECTOR.value)


def _scale_matrix(s: Tensor) -> Box:
    """TMA's view of a 128x128 scale (..., row blocks, column blocks) as a matrix of all rows."""
    *lead, rows, blocks = s.shape
    stride = s.stride(-2)
    assert s.dtype == torch.float32 and s.stride(-1) == 1 and stride % 4 == 0
    assert not lead or s.shape[0] == 1 or s.stride(0) == rows * stride
    shape = s.numel() // blocks, blocks
    return Box(s, shape, (stride, 1), (2, 16), _shared_layout(0, 32))
