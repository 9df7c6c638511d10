"""The FP8 GEMMs on Hopper: entry points, and how their kernels work.

    blockwise_mm        fprop, dgrad   c[m] = a[m] b[e]ᵀ         M-grouped, 1x128 by 128x128
    blockwise_mm_pair                  the sum of two such products
    blockwise_wgrad     wgrad          c[e] = a[:, e] b[:, e]ᵀ   K-grouped, 1x128 by 1x128
    rowwise_mm          fprop, dgrad   c[m] = a[m] b[e]ᵀ         M-grouped, a scale per row
    rowwise_wgrad       wgrad          c[e] = a[:, e] b[:, e]ᵀ   K-grouped, one per group and row

b[e] is the weight of the group of token m; a[:, e] are the columns of the tokens of group e. A
dense layer has one group. Every operand is K-major: the contracted dimension is last and
contiguous, as Hopper's FP8 WGMMA requires. The kernels are in gemm_fprop_dgrad.py and
gemm_wgrad.py, what they share in gemm_schedule.py.

Promotion, of blockwise products. Hopper's tensor cores accumulate FP8 products with about 14 bits,
and each 128 of the contraction has its own scales. So no accumulator of a WGMMA runs longer than
128. Its result is then promoted: multiplied by the scales and added to FP32 sums on the CUDA cores.
That takes about as many instruction slots as the WGMMA leaves free, so the design overlaps the two.

    tiles       128 x 256 (M-grouped) or 256 x 128 (K-grouped). Per result, a tile of this size
                reads 3/4 of the bytes that a 128 x 128 tile reads from the L2 cache.
    waves       A tile is two waves of 128 x 128, one after the other. A thread then needs 128
                registers for FP32 sums and only 64 for the WGMMA in flight.
    consumers   Two warpgroups of 4 warps, each with 64 rows of a wave. One promotes while the
                tensor cores work for the other. M-grouped consumers take turns: each issues a WGMMA
                after the other has issued its own. K-grouped promotion takes twice as long, and
                its consumers run independently.
    ring        One producer warp loads A, B and their scales by TMA, block by block, into a ring of
                3 or 4 stages in shared memory. It runs ahead across the ends of tiles, so the ring
                is full when the consumers come back from an epilogue.
    tile queue  The producer is also the tile scheduler: it alone reads the group ends
                (group_ends.py) and passes tiles to the consumers through a queue in shared memory.
                K-grouped tiles differ in length, so programs draw tickets from a counter. If the
                last round of tiles would occupy at most half of the programs, its tiles are split
                into waves.
    epilogue    Results go to shared memory and from there by TMA to C, while the next tile is
                computed.

K-grouped promotion has a scale per column, too, 32 of them per thread. Consumers read these from
shared memory, whose bandwidth the WGMMAs nearly use up. So the two waves are the halves of a tile's
rows, and share the column scales. M-grouped waves are the halves of its columns, because torchtitan
pads groups to multiples of 128 rows.

Edges. TMA fills elements outside a tensor with zeros, so short last blocks add nothing. A tile at
the end of a group also reads rows, columns and scales of the next group. They affect only rows and
columns of the result that do not belong to the group, and the epilogue does not store these: it
stores by TMA where the tile is full and with a mask elsewhere. Rows of no group are tiles without
blocks, so they are zero, and so is the dW of an empty group.

Rowwise products share producers, ring, tile queue and epilogue. A consumer reads the scales of a
tile, one per row and one per column, when the tile begins, and multiplies by them in the epilogue.
fprop and dgrad use fast accumulation: the sums of both waves stay in the tensor cores, and the
consumers take no turns. One WGMMA is in flight while the next is issued. wgrad sums over all tokens
of a batch, and its error goes into every later step, so it promotes to FP32 every 128 tokens (slow
accumulation). Both equal `torch._scaled_mm` bit for bit, with and without `use_fast_accum`.
torchtitan pads the groups of rowwise products to multiples of 16 rows, not of 128, so tiles differ
in work. A consumer without rows in a group's last tile skips it, wgrad skips the half of a group's
last block that has no tokens, and M-grouped programs draw tickets, too. A dense product is one
group whose tiles are known in advance.

One configuration serves all shapes. At the dense shapes measured cuBLAS was never faster by more
than the noise (docs/kernels.md).
"""

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.hopper.gemm_fprop_dgrad import fprop_dgrad_kernel
from titan_fp8.kernels.hopper.gemm_schedule import VECTOR
from titan_fp8.kernels.hopper.gemm_wgrad import wgrad_kernel
from titan_fp8.kernels.hopper.quantize_blockwise import scales_1x128
from titan_fp8.kernels.launch import CACHED_SHAPES, TensorMap, multiprocessors
from titan_fp8.layouts import BLOCK, E4M3, cdiv, round_up

OPTIONS = {"num_warps": 4, "maxnreg": 168}
"""A program has 12 warps: two consumers of 4, the producer, and 3 that complete its warpgroup and
are idle. All start with 168 registers per thread; then consumers have 240 and the others 24."""
BAND = 8
"""Rows of tiles in a band, which is the order of tiles (`in_bands`)."""
# FP32 results need an epilogue buffer twice as large, in place of one stage.
MM_OPTIONS = {size: {"STAGES": 5 - size // 2, "BAND": BAND, **OPTIONS} for size in (2, 4)}
WGRAD_OPTIONS = {
    size: {"STAGES": 3, "BUFFERS": 4 // size, "BAND": BAND, **OPTIONS} for size in (2, 4)
}
"""MM_OPTIONS, WGRAD_OPTIONS: the bytes of an element of C -> the options of a launch."""


def _mm(
    a_MK: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    **kind: Any,
) -> Tensor:
    """fprop and dgrad: a (M, K) by b (N, K), or each group's rows by its own b of (E, N, K).

    Blockwise, sa is 1x128 and sb 128x128. Rowwise, they have one scale per row: sa (M,), sb (N,) or
    (E, N). Returns (M, N); rows of no group are zero. Groups may start at any row, so `aligned`
    makes no difference. `kind`: the last arguments of `mm_launch`.
    """
    c = a_MK.new_empty(a_MK.shape[0], b.shape[-2], dtype=out_dtype)
    if c.numel():
        _run(mm_launch(a_MK, sa, b, sb, c, offs, **kind))
    return c


blockwise_mm = _mm
rowwise_mm = functools.partial(_mm, rowwise=True)


def blockwise_mm_pair(
    a_MK: Tensor, sa: Tensor, b: Tensor, sb: Tensor,
    a2_MK: Tensor, sa2: Tensor, b2: Tensor, sb2: Tensor, *layout: Any, **options: Any,
) -> Tensor:  # fmt: skip
    """The sum of two `blockwise_mm` of the same shapes, rounded once: (M, N)."""
    return _mm(a_MK, sa, b, sb, *layout, second=(a2_MK, sa2, b2, sb2), **options)


def _wgrad(
    a_NM: Tensor,
    sa: Tensor,
    b_KM: Tensor,
    sb: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    rowwise: bool = False,
) -> Tensor:
    """wgrad: the transposed copies a (N, Mt) by b (K, Mt), over all tokens or those of each group.

    Blockwise, both scales are 1x128 along the tokens, and groups start at multiples of 128 columns,
    `aligned` or not. Rowwise, there is one per row and group: sa (N,) or (E, N), sb (K,) or (E, K).
    Returns (N, K), or (E, N, K) with zeros for empty groups.
    """
    lead = () if offs is None else offs.shape
    c = a_NM.new_empty(*lead, a_NM.shape[0], b_KM.shape[0], dtype=out_dtype)
    if not a_NM.shape[1]:
        return c.zero_()
    _run(wgrad_launch(a_NM, sa, b_KM, sb, c, offs, rowwise))
    return c


blockwise_wgrad = _wgrad
rowwise_wgrad = functools.partial(_wgrad, rowwise=True)

Launch = tuple[Any, tuple, dict]
"""A kernel with the arguments and options of one launch."""


def mm_launch(
    a_MK: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    c_MN: Tensor,
    offs: Tensor | None,
    second: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    rowwise: bool = False,
) -> Launch:
    """The launch that writes a product to `c_MN`, or its sum with the blockwise one of `second`."""
    (m, k), n = a_MK.shape, b.shape[-2]
    groups = 1 if offs is None else offs.shape[0]
    assert n % 16 == 0 and k % 16 == 0
    products: tuple[Any, ...]
    ticket, lda = None, None
    if rowwise:
        assert b.shape[-1] == k and b.numel() == groups * n * k
        assert sa.shape == (m,) and sb.shape == b.shape[:-1]
        products = *_rowwise(a_MK, sa, b, sb), None, None, None, None
        if offs is not None:
            ticket = _ticket_counter(c_MN)
    else:
        products = _blockwise(a_MK, sa, b, sb, groups)
        if second is None:
            products += (None, None, None, None)
        else:
            assert second[0].shape == a_MK.shape and second[2].shape == b.shape
            products += _blockwise(*second, groups)
        lda = round_up(m, 4)
    args = (*products, _mapped(c_MN), c_MN, offs, ticket, m, n, k, groups, lda)
    return fprop_dgrad_kernel, args, MM_OPTIONS[c_MN.itemsize]


def _blockwise(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, groups: int) -> tuple:
    """The arguments for A (M, K) and B (N, K) or (E, N, K) of a blockwise product."""
    (m, k), n = a.shape, b.shape[-2]
    assert b.shape[-1] == k and b.numel() == groups * n * k
    assert a.dtype == b.dtype == E4M3 and a.is_contiguous() and b.is_contiguous()
    assert sa.dtype == sb.dtype == torch.float32
    sa_map = _scale_vector(m, k, 128)
    sb_map = _scale_matrix(groups * cdiv(n, BLOCK), cdiv(k, BLOCK))
    return _mapped(a), (_column_major(sa), sa_map), _mapped(b), (_row_major(sb), sb_map)


def _rowwise(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor) -> tuple:
    """The arguments for A and B of a rowwise product."""
    assert a.dtype == b.dtype == E4M3 and sa.dtype == sb.dtype == torch.float32
    assert all(t.is_contiguous() for t in (a, sa, b, sb))
    return _mapped(a), sa, _mapped(b), sb


def wgrad_launch(
    a_NM: Tensor,
    sa: Tensor,
    b_KM: Tensor,
    sb: Tensor,
    c: Tensor,
    offs: Tensor | None,
    rowwise: bool = False,
) -> Launch:
    """The launch that writes a wgrad to `c`, (N, K) or (E, N, K)."""
    (n, width), k = a_NM.shape, b_KM.shape[0]
    groups = 1 if offs is None else offs.shape[0]
    assert b_KM.shape[1] == width and n % 16 == 0 and k % 16 == 0
    assert width % (16 if rowwise and offs is None else 128) == 0
    strides: tuple[int | None, int | None] = n, k  # between blocks of scales: no padding is needed
    operands: tuple[Any, ...]
    if rowwise:
        assert sa.numel() == groups * n and sb.numel() == groups * k
        operands, strides = _rowwise(a_NM, sa, b_KM, sb), (None, None)
    else:
        assert sa.dtype == sb.dtype == torch.float32
        assert a_NM.dtype == b_KM.dtype == E4M3 and a_NM.is_contiguous() and b_KM.is_contiguous()
        operands = (
            *(_mapped(a_NM), (_column_major(sa), _scale_vector(n, width, 256))),
            *(_mapped(b_KM), (_column_major(sb), _scale_vector(k, width, 128))),
        )
    ticket = None if offs is None else _ticket_counter(c)
    args = (*operands, _mapped(c), c, offs, ticket, width, n, k, groups, *strides)
    return wgrad_kernel, args, WGRAD_OPTIONS[c.itemsize]


def _ticket_counter(c: Tensor) -> Tensor:
    """A counter at 0, on the device of c, from which programs draw their tiles."""
    return torch.zeros(1, dtype=torch.int32, device=c.device)


def _run(launch: Launch) -> None:
    """Launches a persistent kernel: one program per SM."""
    kernel, args, options = launch
    kernel[(multiprocessors(args[0][0].device),)](*args, **options)


def _mapped(x: Tensor) -> tuple[Tensor, TensorMap]:
    """x (..., R, C), contiguous, as a matrix that TMA accesses."""
    return x, _matrix(x.shape, x.dtype)


# Making a map takes more CPU time than a launch.
@functools.lru_cache(CACHED_SHAPES)
def _matrix(shape: torch.Size, dtype: torch.dtype) -> TensorMap:
    """A contiguous matrix: FP8 in boxes of 128 x 128, results in boxes of 64 x 128.

    Rows of a box are swizzled in shared memory, as WGMMA reads them.
    """
    rows, columns = shape[:-1].numel(), shape[-1]
    box = (128 if dtype == E4M3 else 64, 128)
    return TensorMap((rows, columns), (columns, 1), box, _shared_layout(128, dtype.itemsize * 8))


@functools.cache
def _shared_layout(swizzle: int, bits: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)


@functools.lru_cache(CACHED_SHAPES)
def _scale_vector(rows: int, columns: int, box: int) -> TensorMap:
    """The 1x128 scales of an operand (rows, columns) as a vector, block column by block column."""
    blocks = cdiv(columns, BLOCK)
    return TensorMap(((blocks - 1) * round_up(rows, 4) + rows,), (1,), (box,), VECTOR.value)


@functools.lru_cache(CACHED_SHAPES)
def _scale_matrix(rows: int, columns: int) -> TensorMap:
    """128x128 scales as a matrix with padded rows; those of groups are stacked."""
    strides = (round_up(columns, 4), 1)
    return TensorMap((rows, columns), strides, (2, 16), _shared_layout(0, 32))


def _column_major(s: Tensor) -> Tensor:
    """A 1x128 scale (rows, blocks) in the layout of the quantizers, stride 1 along the rows.

    A copy if its layout differs: hooks for saved tensors may return a contiguous one.
    """
    rows, blocks = s.shape
    if s.stride() == (1, round_up(rows, 4)) and s.data_ptr() % 16 == 0:
        return s
    return scales_1x128(s, rows, blocks * BLOCK).copy_(s)


def _row_major(s: Tensor) -> Tensor:
    """128x128 scales (..., n, k) in the layout of the quantizers; a copy if theirs differs.

    TMA also needs them to start at a multiple of 16 bytes.
    """
    *lead, n, k = s.shape
    pitch = round_up(k, 4)
    strides = (n * pitch, pitch, 1) if lead else (pitch, 1)
    if s.stride() == strides and s.data_ptr() % 16 == 0:
        return s
    return s.new_empty(*lead, n, pitch)[..., :k].copy_(s)
