"""Rows that have been quantized before they were sent to their experts, as GEMMs read them.

fprop and dgrad read copies of these rows, in the order of the experts. wgrad contracts the tokens
and needs blocks of 128x1. A program has 128 rows in that order by 128 channels. It copies q,
multiplies it by its scales, in FP32, and quantizes the products, as `quantize_128x1_t` does with a
tensor.

The tile stays in shared memory as FP8, four channels to a word. `quantize_tile.py` explains how a
thread gets 16 tokens of a channel without moving any data.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.hopper.quantize_blockwise import scales_1x128
from titan_fp8.kernels.hopper.quantize_cast import SCALE_FMTS, amax_words, cast_columns, scale_of
from titan_fp8.kernels.hopper.quantize_tile import (
    SHARED,
    TileLayouts,
    column_layouts,
    store_columns,
    tile_layout,
    tokens_of,
    transpose,
)
from titan_fp8.kernels.launch import kernel
from titan_fp8.layouts import BLOCK, cdiv
from titan_fp8.reference import scale_of as reference_scale_of

WARPS = 4
ONCE = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS], [0]))
"""Layout of the rows of a tile: one for each thread."""
LAYOUTS = TileLayouts(
    SHARED, tile_layout((1, 4), (4, 8), (WARPS, 1), (8, 1)), None, *column_layouts(WARPS)
)


@functools.cache
def zero_scale(fmt: str) -> int:
    """The bits of the scale of a block of zeros."""
    zero = torch.zeros(1, dtype=torch.float32, device="cpu")
    return int(reference_scale_of(zero, fmt).view(torch.int32))


@kernel(do_not_specialize=["R", "S_ROW", "S_BLOCK", "E", "tiles", "zero_scale"])
def gather_1x128_128x1_t_kernel(
    x, s, index, offs, weight, q, s_rows, q_t, s_t,
    R, K, KW, S_ROW, S_BLOCK, E, tiles, zero_scale,
    TOP: gl.constexpr, SCALE_FMT: gl.constexpr, LAYOUTS: gl.constexpr,
):  # fmt: skip
    """A tile of 128 rows by 128 channels: its rows, with their scales, and its columns.

    KW: the words of a row. S_ROW, S_BLOCK: the strides of s. tiles: those of 128 rows; counting in
    these tells the compiler that columns start at multiples of 16 bytes. Tiles past the last of the
    E groups are left alone.
    """
    C = tiles * 128
    row = gl.program_id(0) % tiles * 128
    block = gl.program_id(0) // tiles
    if row < gl.load(offs + E - 1):
        LOAD: gl.constexpr = LAYOUTS.load
        TRANSPOSED: gl.constexpr = LAYOUTS.transposed
        word = block * 32
        i = row + tokens_of(0, LOAD)
        source = _source(index, i, R, TOP)
        j = word + gl.arange(0, 32, gl.SliceLayout(0, LOAD))
        inside = (source >= 0)[:, None] & (j < KW)[None, :]
        words = gl.load(x + (source.to(gl.int64)[:, None] * KW + j[None, :]), mask=inside, other=0)

        # One thread loads the scale of a row, and shared memory brings it to the others.
        t = row + gl.arange(0, 128, ONCE)
        source = _source(index, t, R, TOP)
        from_s = s + (source.to(gl.int64) * S_ROW + block.to(gl.int64) * S_BLOCK)
        scale = gl.load(from_s, mask=source >= 0, other=0)
        if weight is not None:
            scale *= gl.load(weight + t, mask=source >= 0, other=0)
        scale = gl.where(source >= 0, scale, zero_scale.to(gl.float32, bitcast=True))
        gl.store(s_rows + block.to(gl.int64) * C + t, scale)
        scale = gl.convert_layout(scale, gl.SliceLayout(0, TRANSPOSED))
        gl.store(q + (i.to(gl.int64)[:, None] * KW + j[None, :]), words, mask=(j < KW)[None, :])
        shared = gl.allocate_shared_memory(gl.int32, LOAD.shape, LAYOUTS.shared, words)

        # A part of fewer words would cut through the swizzle of the shared tile.
        part = transpose(shared.load(LAYOUTS.columns), TRANSPOSED)
        mask = gl.full([1, 1], -1, gl.int8, TRANSPOSED)
        j = gl.arange(0, 32, gl.SliceLayout(1, TRANSPOSED))
        scales = s_t + (row // 128).to(gl.int64) * K + word * 4
        for c in gl.static_range(4):
            values = (part >> (8 * c)).to(gl.int8).to(gl.float8e4nv, bitcast=True)
            values = (values.to(gl.float32) * scale[None, :]).to(gl.int32, bitcast=True)
            s_column, r = scale_of(amax_words(values, 1, 1), SCALE_FMT)
            gl.store(scales + (j * 4 + c), s_column, mask=j < KW - word)
            values = cast_columns(values, r[:, None], mask, 0, 1)
            store_columns(q_t, values, row, 128, word * 4 + c, 4, K, C)


@gluon.jit
def _source(index, row, R, TOP: gl.constexpr):
    """The row of x for each row; -1 if there is none."""
    slot = gl.load(index + row)
    source = gl.where(slot < 0, -1, slot // TOP)
    return gl.where(source < R, source, -1)


def gather_1x128_128x1_t(
    q: Tensor,
    s: Tensor,
    index: Tensor,
    offs: Tensor,
    weight: Tensor | None = None,
    k: int = 1,
    *,
    scale_fmt: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.gather_1x128_128x1_t`. What is past the last end is not written."""
    (r, width), c = q.shape, len(index)
    blocks = cdiv(width, BLOCK)
    rows, q_t = (q.new_empty(shape) for shape in ((c, width), (width, c)))
    s_rows, s_t = scales_1x128(s, c, width), scales_1x128(s, width, c)
    if c:
        gather_1x128_128x1_t_kernel[(c // BLOCK * blocks,)](
            (q, torch.int32), s, index, offs, weight, (rows, torch.int32), s_rows,
            (q_t, torch.int8), s_t, r, width, width // 4, *s.stride(), len(offs), c // BLOCK,
            zero_scale(scale_fmt), k, SCALE_FMTS[scale_fmt], LAYOUTS, num_warps=WARPS,
        )  # fmt: skip
    return rows, s_rows, q_t, s_t
