"""Operands of tokens that other GPUs have sent in FP8.

They arrive once for a rank, in the order of their ranks: q, and scales of 1x128 blocks. fprop and
dgrad read copies of these rows in expert order. wgrad contracts the tokens and needs blocks of
128x1. A program has 128 places in expert order by 128 channels. It copies q, multiplies it by its
scales, in FP32, and quantizes the products, as `quantize_128x1_t` does with a tensor.

The tile stays in shared memory as FP8, four channels to a word. `quantize_tile.py` explains how a
thread gets 16 tokens of a channel without moving any data.
"""

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
from titan_fp8.layouts import BLOCK, E4M3, cdiv
from titan_fp8.reference import scale_of as reference_scale_of

WARPS = 4
ZERO_SCALE = int(reference_scale_of(torch.zeros(1)).view(torch.int32))
"""The bits of the scale of a block of zeros."""
LAYOUTS = TileLayouts(
    SHARED, tile_layout((1, 4), (4, 8), (WARPS, 1), (8, 1)), None, *column_layouts(WARPS)
)


@kernel(do_not_specialize=["rows", "C", "S", "E", "tiles", "sections", "ranks", "tokens"])
def requantize_128x1_t_kernel(
    x, s, weight, origin, offs, q, s_rows, q_t, s_t,
    rows, C, K, KW, S, E, tiles, sections, ranks, tokens, zero_scale,
    TOP: gl.constexpr, SCALE_FMT: gl.constexpr, LAYOUTS: gl.constexpr,
):  # fmt: skip
    """A tile of 128 places by 128 channels: its rows, with their scales, and its columns.

    KW: the words of a row. S: the stride between the blocks of s_rows. Tiles past the last of the E
    groups are left alone.
    """
    place = gl.program_id(0) % tiles * 128
    block = gl.program_id(0) // tiles
    if place < gl.load(offs + E - 1):
        LOAD: gl.constexpr = LAYOUTS.load
        TRANSPOSED: gl.constexpr = LAYOUTS.transposed
        word = block * 32
        i = place + tokens_of(0, LOAD)
        source = _source(origin, i, ranks, tokens, TOP)
        j = word + gl.arange(0, 32, gl.SliceLayout(0, LOAD))
        inside = ((source >= 0) & (source < rows))[:, None] & (j < KW)[None, :]
        words = gl.load(x + (source.to(gl.int64)[:, None] * KW + j[None, :]), mask=inside, other=0)
        gl.store(q + (i.to(gl.int64)[:, None] * KW + j[None, :]), words, mask=(j < KW)[None, :])
        shared = gl.allocate_shared_memory(gl.int32, LOAD.shape, LAYOUTS.shared, words)

        t = place + gl.arange(0, 128, gl.SliceLayout(0, TRANSPOSED))
        source = _source(origin, t, ranks, tokens, TOP)
        zero = zero_scale.to(gl.float32, bitcast=True)
        scale = gl.load(s + (source.to(gl.int64) * sections + block), mask=source >= 0, other=0)
        scale = gl.where(source >= 0, scale, zero)
        if weight is not None:
            scale *= gl.load(weight + t)
        gl.store(s_rows + block.to(gl.int64) * S + t, scale)

        # A part of fewer words would cut through the swizzle of the shared tile.
        part = transpose(shared.load(LAYOUTS.columns), TRANSPOSED)
        mask = gl.full([1, 1], -1, gl.int8, TRANSPOSED)
        j = gl.arange(0, 32, gl.SliceLayout(1, TRANSPOSED))
        scales = s_t + (place // 128).to(gl.int64) * K + word * 4
        for c in gl.static_range(4):
            values = (part >> (8 * c)).to(gl.int8).to(gl.float8e4nv, bitcast=True)
            values = (values.to(gl.float32) * scale[None, :]).to(gl.int32, bitcast=True)
            s_column, r = scale_of(amax_words(values, 1, 1), SCALE_FMT)
            gl.store(scales + (j * 4 + c), s_column, mask=j < KW - word)
            values = cast_columns(values, r[:, None], mask, 0, 1)
            store_columns(q_t, values, place, C - place, word * 4 + c, 4, K, C)


@gluon.jit
def _source(origin, place, ranks, tokens, TOP: gl.constexpr):
    """The row that has arrived for each place; -1 for padding."""
    source = gl.load(origin + place)
    return gl.where(source >= 0, source % ranks * tokens + source // ranks // TOP, -1)


def requantize_128x1_t(
    x: Tensor,
    s: Tensor,
    origin: Tensor,
    offs: Tensor,
    ranks: int,
    top: int,
    weight: Tensor | None = None,
    *,
    scale_fmt: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows and columns, in expert order, of rows in FP8 that an exchange has brought.

    x (ranks · tokens, K) as int8 and s (ranks · tokens, ⌈K/128⌉): what has arrived. origin (C,):
    `exchange_send_kernel` explains it. Groups end at multiples of 128, as C does. weight (C,) FP32
    multiplies the rows, or None.

    Returns:
        q (C, K); s times the weights, laid out as 1x128 scales; q (K, C) and s (K, C/128) of the
        columns. What belongs to no group is not written.
    """
    (rows, k), c = x.shape, len(origin)
    blocks = cdiv(k, BLOCK)
    q, q_t = (x.new_empty(shape, dtype=E4M3) for shape in ((c, k), (k, c)))
    s_rows, s_t = scales_1x128(s, c, k), scales_1x128(s, k, c)
    requantize_128x1_t_kernel[(c // BLOCK * blocks,)](
        (x, torch.int32), s, weight, origin, offs, (q, torch.int32), s_rows, (q_t, torch.int8), s_t,
        rows, c, k, k // 4, c, len(offs), c // BLOCK, blocks, ranks, rows // ranks, ZERO_SCALE,
        top, SCALE_FMTS[scale_fmt], LAYOUTS, num_warps=WARPS,
    )  # fmt: skip
    return q, s_rows, q_t, s_t
