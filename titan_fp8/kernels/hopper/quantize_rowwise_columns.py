"""Rowwise quantizers of columns, written transposed: one scale per column, or per group and column.

A scale covers all tokens of a group, far more than a program can hold. So two kernels read x, one
after the other:

1. quantize_column_amax_kernel takes the maxima of some tokens in registers and combines them with
   those of the group by `atomic_max`. If the rows are to be quantized as well, its programs hold
   whole rows and quantize them, too.
2. quantize_column_cast_kernel casts and transposes tiles (`quantize_tile.py`), the last tiles
   first, because these are still in the L2 cache. It also writes the scales.
"""

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.hopper.group_ends import group_lanes, locate, tiles_of
from titan_fp8.kernels.hopper.quantize_cast import (
    FP8_WORDS,
    amax_words,
    as_words,
    cast_columns,
    cast_rows,
    channel_bits,
    magnitudes,
    max_magnitudes,
    row_amax,
    scale_of,
)
from titan_fp8.kernels.hopper.quantize_rowwise import quantize_row, row_layout
from titan_fp8.kernels.hopper.quantize_tile import (
    MAXNREG,
    PART_WORDS,
    TILES,
    load_words,
    start_load,
    store_columns,
    store_rows,
    tile_layout,
    transpose,
    wait_for_loads,
)
from titan_fp8.kernels.launch import kernel
from titan_fp8.layouts import E4M3, ROW_ALIGNMENT, cdiv, transposed_width

AMAX_TOKENS = 256
"""Tokens per program that takes the maxima of some columns."""
AMAX_LAYOUT = tile_layout((1, 4), (1, 32), (4, 1), (8, 1))
"""The layout of 32 of them, which a program holds at a time."""
AMAX_WARPS = 4
ROW_AMAX_TOKENS = 32
"""Tokens per program that takes the maxima of all columns and also quantizes the rows."""
ROW_AMAX_WORDS = 8192
"""The words of its longest rows: registers hold a row, the next one and the maxima."""


@gluon.jit
def publish_amax(amax, most, word, K, publishes, PACK: gl.constexpr):
    """If `publishes`, combines `most`, words of maxima from `word` on, into amax (K,).

    The maxima are the bits of magnitudes, so `atomic_max` on integers combines them, with the same
    result in any order. Before that, neighboring lanes get neighboring channels, so that one
    transaction serves the eight maxima of a 32-byte sector (eight times as fast).
    """
    WORDS: gl.constexpr = most.shape[0]
    if PACK == 2:
        most = gl.join(channel_bits(most, 0, PACK), channel_bits(most, 1, PACK))
        most = gl.reshape(most, [PACK * WORDS])
    coalesced: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    j = gl.arange(0, PACK * WORDS, coalesced)
    most = gl.convert_layout(most, coalesced)
    inside = (j < K - word * PACK) & publishes
    gl.atomic_max(amax + (word * PACK + j), most, mask=inside, sem="relaxed")


@gluon.jit
def load_amax(amax, word, KW, valid, PACK: gl.constexpr, TRANSPOSED: gl.constexpr):
    """The maxima of the first and of the last channel of each word, as bits; zeros unless `valid`.

    Read from the L2 cache, because the L1 cache may hold values that other programs have changed.
    """
    j = gl.arange(0, TRANSPOSED.shape[0], gl.SliceLayout(1, TRANSPOSED))
    channel = amax + (word + j) * PACK
    inside = (j < KW - word) & valid
    first = gl.load(channel, mask=inside, other=0, cache_modifier=".cg")
    return first, gl.load(channel + (PACK - 1), mask=inside, other=0, cache_modifier=".cg")


@gluon.jit
def store_scales(amax, s_t, word, KW, PACK: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Writes the scales of the channels of words, given their maxima from `load_amax`."""
    j = gl.arange(0, TRANSPOSED.shape[0], gl.SliceLayout(1, TRANSPOSED))
    for i in gl.static_range(PACK):
        scale, _ = scale_of(amax[i])
        gl.store(s_t + ((word + j) * PACK + i), scale, mask=j < KW - word)


@gluon.jit
def cast_part(
    part, amax, q_t, tokens, column, columns, word, K, MT,
    PACK: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Casts a part, 128 places by the channels of its words, from `word` on, into q_t (K, MT).

    `amax` is from `load_amax`. Writes the first `columns` columns from `column` on: the first
    `tokens` tokens, then zeros.
    """
    words = transpose(part, TRANSPOSED)
    t = gl.arange(0, TRANSPOSED.shape[1], gl.SliceLayout(0, TRANSPOSED))
    mask = gl.where(t < tokens, -1, 0).to(gl.int8)[None, :]
    for i in gl.static_range(PACK):
        _, r = scale_of(amax[i])
        values = cast_columns(words, r[:, None], mask, i, PACK)
        store_columns(q_t, values, column, columns, word * PACK + i, PACK, K, MT)


@kernel(do_not_specialize=["M", "E", "tiles"])
def quantize_column_amax_kernel(
    x, amax, K, KW, q, s, offs, M, MT, E, tiles,
    PACK: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, GROUPS: gl.constexpr,
    WORDS: gl.constexpr,
):  # fmt: skip
    """Column maxima of TOKENS tokens; with ROWS, q and s of the rows, which a program has whole."""
    pid = gl.program_id(0)
    word = pid // tiles * WORDS.shape[1]
    row, _, rows, _, group = locate(pid % tiles, offs, M, MT, E, TOKENS, GROUPS, False)
    if not ROWS:  # Tokens of no group have rows but no columns.
        rows = gl.where(group < E, rows, 0)
    rows = gl.minimum(rows, TOKENS)
    x += gl.program_id(1).to(gl.int64) * M * KW
    amax += (gl.program_id(1) + group).to(gl.int64) * K
    most = gl.full(WORDS.shape, 0, gl.int32, WORDS)
    # The next words are loaded before the current ones are used, which hides their latency.
    ahead = load_words(x, row, rows, word, KW, WORDS)
    for i in range(0, rows, WORDS.shape[0]):
        words = ahead
        after = i + WORDS.shape[0]
        ahead = load_words(x, row + after, rows - after, word, KW, WORDS)
        if ROWS:
            scale, r = scale_of(row_amax(words, PACK))
            values = cast_rows(words, r[:, None], PACK)
            store_rows(q, values, None, row + i, rows - i, word, KW)
            k = gl.arange(0, WORDS.shape[0], gl.SliceLayout(1, WORDS))
            gl.store(s + (row + i) + k, scale, mask=k < rows - i)
        most = max_magnitudes(most, magnitudes(words, PACK), PACK)
    publish_amax(amax, amax_words(most, 0, PACK), word, K, (group < E) & (rows > 0), PACK)


@kernel(do_not_specialize=["M", "E", "tiles"])
def quantize_column_cast_kernel(
    x, amax, q_t, s_t, K, KW, offs, M, MT, E, tiles,
    PACK: gl.constexpr, GROUPS: gl.constexpr, LAYOUTS: gl.constexpr,
):  # fmt: skip
    """Casts a tile by the column maxima of its group; tile e also writes the scales of group e."""
    # The first kernel has read the last tiles last, so they come first here.
    pid = gl.num_programs(0) - 1 - gl.program_id(0)
    LOAD: gl.constexpr = LAYOUTS.load
    TRANSPOSED: gl.constexpr = LAYOUTS.transposed
    WIDTH: gl.constexpr = LOAD.shape[1]
    tile = pid % tiles
    word = pid // tiles * WIDTH
    expert = gl.program_id(1).to(gl.int64)
    q_t += expert * K * MT
    amax += expert * K
    s_t += expert * K
    row, column, rows, columns, group = locate(tile, offs, M, MT, E, 128, GROUPS, False)
    tokens = gl.where(group < E, rows, 0)
    words = gl.allocate_shared_memory(gl.int32, LOAD.shape, LAYOUTS.shared)
    start_load(words, x + expert * M * KW, 0, row, tokens, word, KW, LOAD)
    # While the tile is loaded, tile e computes and writes the scales of group e.
    if tile < E:
        of_group = tile.to(gl.int64) * K
        for w in gl.static_range(0, WIDTH, PART_WORDS):
            maxima = load_amax(amax + of_group, word + w, KW, True, PACK, TRANSPOSED)
            store_scales(maxima, s_t + of_group, word + w, KW, PACK, TRANSPOSED)
    amax += group.to(gl.int64) * K
    wait_for_loads()
    for w in gl.static_range(0, WIDTH, PART_WORDS):
        maxima = load_amax(amax, word + w, KW, group < E, PACK, TRANSPOSED)
        cast_part(
            words.slice(w, PART_WORDS, 1).load(LAYOUTS.columns), maxima, q_t, tokens, column,
            columns, word + w, K, MT, PACK, TRANSPOSED,
        )  # fmt: skip


def _quantize_columns(
    x: Tensor, offs: Tensor | None, aligned: bool, rows: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """q (..., K, Mt) and s of the columns of x (..., M, K).

    `rows`: q and s of its rows, which are written if given.
    """
    *lead, m, k = x.shape
    width = transposed_width(m, offs, aligned, ROW_ALIGNMENT)
    groups, of_group = (0, ()) if offs is None else (offs.shape[0], offs.shape)
    scales = 1 if offs is None else groups  # of each column
    q_t = x.new_empty(*lead, k, width, dtype=E4M3)
    s_t = x.new_empty(*lead, *of_group, k, dtype=torch.float32)
    amax = torch.zeros_like(s_t, dtype=torch.int32)
    words, pack = as_words(x), 4 // x.itemsize
    matrices, lanes = math.prod(lead), group_lanes(groups)
    if rows is None:
        layout, warps, tile_tokens = AMAX_LAYOUT, AMAX_WARPS, AMAX_TOKENS
        q, s = words, amax  # Placeholders, which are not written.
    else:
        (layout, warps), tile_tokens = row_layout(k // pack), ROW_AMAX_TOKENS
        q, s = (rows[0], FP8_WORDS[pack]), rows[1]
    if m:
        tiles = tiles_of(width, groups, tile_tokens)
        quantize_column_amax_kernel[(tiles * cdiv(k // pack, layout.shape[1]), matrices)](
            words, amax, k, k // pack, q, s, offs, m, width, scales, tiles,
            pack, rows is not None, tile_tokens, lanes, layout, num_warps=warps,
        )  # fmt: skip
    layouts, warps = TILES[pack]
    # Tile e writes the scales of group e, so each group needs a tile, even one without tokens.
    tiles = max(scales, tiles_of(width, groups, 128))
    quantize_column_cast_kernel[(tiles * cdiv(k // pack, layouts.load.shape[1]), matrices)](
        words, amax, (q_t, torch.int8), s_t, k, k // pack, offs, m, width, scales, tiles,
        pack, lanes, layouts, maxnreg=MAXNREG, num_warps=warps,
    )  # fmt: skip
    return q_t, s_t


def quantize_col_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantizes x (M, K) with one scale per column and group, transposed.

    q (K, Mt); s (K,), with groups (E, K). A group without tokens has the scale of zero columns.
    """
    return _quantize_columns(x, offs, aligned)


def quantize_weight_col_t(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes w (..., N, K) with one scale per column, transposed: q (..., K, N), s (..., K)."""
    return quantize_col_t(w)


def quantize_row_col_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows and columns of x (M, K): q (M, K), s (M,), q (K, Mt), s (K,) or (E, K)."""
    if x.shape[1] * x.element_size() > 4 * ROW_AMAX_WORDS:
        # The first kernel could not hold a whole row.
        return (*quantize_row(x), *quantize_col_t(x, offs, aligned))
    q, s = torch.empty_like(x, dtype=E4M3), x.new_empty(x.shape[0], dtype=torch.float32)
    return q, s, *_quantize_columns(x, offs, aligned, (q, s))
