"""The columns of a matrix of which only the rows in FP8 are known, for wgrad.

Tokens that other GPUs send in FP8 arrive as rows: q, and scales of 1x128 blocks. wgrad contracts
the tokens and needs blocks of 128x1. A program has 128 tokens by 128 channels: it multiplies q by
its scales, in FP32, and quantizes the products, as `quantize_128x1_t` does with a tensor.

The tile stays in shared memory as FP8, four channels to a word. `quantize_tile.py` explains how a
thread gets 16 tokens of a channel without moving any data.
"""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.hopper.quantize_blockwise import scales_1x128
from titan_fp8.kernels.hopper.quantize_cast import SCALE_FMTS, amax_words, cast_columns, scale_of
from titan_fp8.kernels.hopper.quantize_tile import (
    SHARED,
    TileLayouts,
    column_layouts,
    start_load,
    store_columns,
    tile_layout,
    transpose,
    wait_for_loads,
)
from titan_fp8.kernels.launch import kernel
from titan_fp8.layouts import BLOCK, E4M3, cdiv, round_up

WARPS = 4
LAYOUTS = TileLayouts(
    SHARED, tile_layout((1, 4), (4, 8), (WARPS, 1), (8, 1)), None, *column_layouts(WARPS)
)


@kernel(do_not_specialize=["M", "S", "E", "tiles", "sections"])
def requantize_128x1_t_kernel(
    q, s, weight, offs, s_rows, q_t, s_t, M, K, KW, MT, S, E, tiles, sections,
    SCALE_FMT: gl.constexpr, LAYOUTS: gl.constexpr,
):  # fmt: skip
    """The columns of a tile, and its scales times `weight` in the layout that GEMMs read.

    KW: the words of a row of q. S: the stride between the blocks of s_rows. Tiles past the last of
    the E groups are left alone.
    """
    row = gl.program_id(0) % tiles * 128
    block = gl.program_id(0) // tiles
    if row < gl.load(offs + E - 1):
        LOAD: gl.constexpr = LAYOUTS.load
        TRANSPOSED: gl.constexpr = LAYOUTS.transposed
        word = block * 32
        words = gl.allocate_shared_memory(gl.int32, LOAD.shape, LAYOUTS.shared)
        start_load(words, q, 0, row, M - row, word, KW, LOAD)
        t = row + gl.arange(0, 128, gl.SliceLayout(0, TRANSPOSED))
        scale = gl.load(s + (t.to(gl.int64) * sections + block), mask=t < M, other=0)
        if weight is not None:
            scale *= gl.load(weight + t, mask=t < M, other=0)
        gl.store(s_rows + block.to(gl.int64) * S + t, scale, mask=t < M)
        wait_for_loads()
        part = transpose(words.load(LAYOUTS.columns), TRANSPOSED)
        mask = gl.full([1, 1], -1, gl.int8, TRANSPOSED)
        j = gl.arange(0, 32, gl.SliceLayout(1, TRANSPOSED))
        scales = s_t + (row // 128).to(gl.int64) * K + word * 4
        for i in gl.static_range(4):
            values = (part >> (8 * i)).to(gl.int8).to(gl.float8e4nv, bitcast=True)
            values = (values.to(gl.float32) * scale[None, :]).to(gl.int32, bitcast=True)
            s_column, r = scale_of(amax_words(values, 1, 1), SCALE_FMT)
            gl.store(scales + (j * 4 + i), s_column, mask=j < KW - word)
            values = cast_columns(values, r[:, None], mask, 0, 1)
            store_columns(q_t, values, row, MT - row, word * 4 + i, 4, K, MT)


def requantize_128x1_t(
    q: Tensor,
    s: Tensor,
    offs: Tensor,
    weight: Tensor | None = None,
    *,
    scale_fmt: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and columns of x (M, K), given as q (M, K) and s (M, ⌈K/128⌉), row by row in memory.

    Groups end at multiples of 128. weight (M,) FP32 multiplies the rows, or None.

    Returns:
        s times the weights, laid out as 1x128 scales; q (K, Mt) and s (K, Mt/128) of the columns.
        What belongs to no group is not written.
    """
    m, k = q.shape
    blocks, width = cdiv(k, BLOCK), round_up(m, BLOCK)
    q_t, s_t = q.new_empty(k, width, dtype=E4M3), scales_1x128(s, k, width)
    s_rows = scales_1x128(s, m, k)
    if m:
        requantize_128x1_t_kernel[(width // BLOCK * blocks,)](
            (q, torch.int32), s, weight, offs, s_rows, (q_t, torch.int8), s_t,
            m, k, k // 4, width, round_up(m, 4), len(offs), width // BLOCK, blocks,
            SCALE_FMTS[scale_fmt], LAYOUTS, num_warps=WARPS,
        )  # fmt: skip
    return s_rows, q_t, s_t
