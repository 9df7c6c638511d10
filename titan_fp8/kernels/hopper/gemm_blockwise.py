"""The blockwise GEMMs on Hopper.

Three products train a linear layer, y = x W^T, dx = g W and dW = g^T x, and two kernels compute
them, for one layer or for E experts whose tokens lie one group behind the other:

    M-grouped  `blockwise_mm`     fprop, dgrad   c[m] = a[m] b[e]^T          1x128 by 128x128
               `blockwise_mm_pair`               the sum of two such
    K-grouped  `blockwise_wgrad`  wgrad          c[e] = a[:, e] b[:, e]^T    1x128 by 1x128

where e is the group of token m, or all the tokens of group e. A dense layer is the case of one
group. Every operand is K-major (the contraction last and contiguous), the one form that Hopper's
FP8 tensor cores take; `reference.py` has the layouts.

Why a kernel of our own. The tensor cores add FP8 products in an accumulator of some 14 bits, and
each 128 of the contraction has its own scales. So no more than 128 may be summed there: then the
sum is *promoted*, multiplied by its scales and added in FP32, by the ordinary cores. That costs as
many instructions as the tensor cores leave time for. The design is about this overlap.

    tile     128 x 256 (M-grouped) or 256 x 128 (K-grouped) results: an SM reads 3 bytes where
             128 x 128 would read 4, and the way from the L2 cache is narrow
    waves    a tile is computed as two waves of 128 x 128, one behind the other, so that a thread
             needs 128 registers for sums and only 64 for what the tensor cores are at
    parts    each wave is halved between two consumers of 4 warps and 64 rows, so that one promotes
             while the tensor cores work for the other. M-grouped consumers take turns: a product
             starts once the other consumer's has. K-grouped ones, whose promotion takes twice as
             long, run free
    ring     one more warp loads, by TMA, A, B and both scales of block after block into a ring of
             3 or 4 places; it runs ahead over the ends of tiles, so that the ring is full when
             the consumers return from storing
    notes    the same warp works out which tile is next. It alone reads the group ends, on the
             device: nothing here waits for the host. K-grouped tiles differ in length with their
             groups, so there the programs draw tickets; and where the last round of tiles would
             occupy at most half of the programs, it is given out as single waves
    store    results go through shared memory and out by TMA, while the next tile is under way

K-grouped promotion has a scale per column as well, 32 a thread. The consumers read them from
shared memory, whose bandwidth the tensor cores all but use up; so there the two waves are two
halves of the rows, and both use the same 32. M-grouped waves are two halves of the columns
instead, for groups end at multiples of 128 rows.

Edges. TMA fills with zeros what lies outside the tensors, so short last blocks add nothing. A tile
at the end of a group reads rows, columns and scales of its neighbours, but no sum mixes rows or
columns, and what is not the group's is not stored: full tiles leave by TMA, others through a mask.
Rows of no group are tiles without blocks, hence zero, and so are the dW of empty groups.

`rowwise_gemm.py` computes grouped products with a scale a row on the same rings, notes and stores.

One configuration serves all shapes. cuBLAS knows these recipes too, for dense layers, but at none
of the shapes measured by more than the noise faster (`docs/log.md`), so nothing is sent there.
"""

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.hopper.gemm_blockwise_fprop_dgrad import m_grouped_kernel
from titan_fp8.kernels.hopper.gemm_blockwise_wgrad import k_grouped_kernel
from titan_fp8.kernels.hopper.gemm_schedule import VECTOR
from titan_fp8.kernels.hopper.quantize_blockwise import scales_1x128
from titan_fp8.kernels.launch import Box, multiprocessors
from titan_fp8.reference import BLOCK, E4M3, round_up

OPTIONS = {"num_warps": 4, "maxnreg": 168}
"""168 registers for each of 12 warps at the start; the consumers then take 240, the producer 24."""
BAND = 8
"""Rows of tiles that are in flight together."""

Launch = tuple[object, tuple, dict]
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

    sa is 1x128 and sb 128x128. Returns (M, N); rows of no group are zero. Groups may start at any
    row, so `aligned` is of no consequence here, except that unaligned groups have more tiles.
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

    Both scales are 1x128 along the tokens. Returns (N, K), or (E, N, K) with zeros for empty
    groups. The columns at which groups start follow from `offs`, `aligned` or not.
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
    """How to compute `blockwise_mm` into `c_MN`, or its sum with that of `second`."""
    (m, k), n = a_MK.shape, b.shape[-2]
    groups = 1 if offs is None else offs.shape[0]

    def described(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor) -> tuple[Box, ...]:
        assert a.shape == (m, k) and a.is_contiguous() and b.is_contiguous()
        assert b.shape[-2:] == (n, k) and b.numel() == groups * n * k
        assert a.dtype == b.dtype == E4M3 and n % 16 == 0 and k % 16 == 0
        box = (128, 128)
        return matrix(a, box), _vector(_by_columns(sa), 128), matrix(b, box), _rows_of(sb)

    args = (
        *described(a_MK, sa, b, sb),
        *((None,) * 4 if second is None else described(*second)),
        matrix(c_MN, (64, 128)),
        c_MN,
        offs,
        *(m, n, k, groups, round_up(m, 4)),
    )
    # An FP32 buffer of results takes the room of a place in the ring.
    return m_grouped_kernel, args, {"STAGES": 5 - c_MN.itemsize // 2, "BAND": BAND, **OPTIONS}


def wgrad_launch(
    a_NM: Tensor, sa: Tensor, b_KM: Tensor, sb: Tensor, c: Tensor, offs: Tensor | None
) -> Launch:
    """How to compute `blockwise_wgrad` into `c`, (N, K) or (E, N, K)."""
    (n, width), k = a_NM.shape, b_KM.shape[0]
    groups = 1 if offs is None else offs.shape[0]
    sa, sb = _by_columns(sa), _by_columns(sb)
    assert b_KM.shape[1] == width and width % 128 == 0 and n % 16 == 0 and k % 16 == 0
    assert a_NM.dtype == b_KM.dtype == E4M3 and a_NM.is_contiguous() and b_KM.is_contiguous()
    args = (
        matrix(a_NM, (128, 128)),
        _vector(sa, 256),
        matrix(b_KM, (128, 128)),
        _vector(sb, 128),
        matrix(c, (64, 128)),
        c,
        offs,
        None if offs is None else torch.zeros(1, dtype=torch.int32, device=c.device),
        *(width, n, k, groups, sa.stride(1), sb.stride(1)),
    )
    buffers = 4 // c.itemsize
    return k_grouped_kernel, args, {"STAGES": 3, "BUFFERS": buffers, "BAND": BAND, **OPTIONS}


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


def _by_columns(s: Tensor) -> Tensor:
    """A 1x128 scale (rows, blocks) as quantisers lay it out, a column's rows side by side.

    A copy where it is laid out otherwise: what autograd has saved, hooks may give back contiguous.
    """
    rows, blocks = s.shape
    if s.stride() == (1, round_up(rows, 4)):
        return s
    return scales_1x128(s, rows, blocks * BLOCK).copy_(s)


def _vector(s: Tensor, box: int) -> Box:
    """TMA's view of a 1x128 scale (rows, blocks), as the one vector it is in memory."""
    rows, blocks = s.shape
    stride = s.stride(1)
    assert s.dtype == torch.float32 and s.stride(0) == 1 and stride % 4 == 0
    return Box(s, ((blocks - 1) * stride + rows,), (1,), (box,), VECTOR.value)


def _rows_of(s: Tensor) -> Box:
    """TMA's view of a 128x128 scale (..., row blocks, column blocks) as a matrix of all rows."""
    *lead, rows, blocks = s.shape
    stride = s.stride(-2)
    assert s.dtype == torch.float32 and s.stride(-1) == 1 and stride % 4 == 0
    assert not lead or s.shape[0] == 1 or s.stride(0) == rows * stride
    shape = s.numel() // blocks, blocks
    return Box(s, shape, (stride, 1), (2, 16), _shared_layout(0, 32))
