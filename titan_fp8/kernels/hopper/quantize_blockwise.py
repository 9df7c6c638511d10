"""Blockwise quantisers: 1x128, 128x1, both out of one read, 128x128 in either layout.

A program takes one tile of 128 tokens by 128 channels: each scale's block lies within it, so that x
is read once whatever is written. How a tile is held and transposed is told in `tile.py`, how it is
scaled and cast in `cast.py`.

Order. Programs that write the transposed copy alone follow each other along the tokens, that is
along its rows in memory (3 to 5 %); with both layouts along the channels (up to 2 %).

Measured on an H200 (2026-11-23, torch 2.11.0+cu130, Triton 3.6.0), (32768, 7168), us and share of
the copy bandwidth, 4180 GB/s; docs/log.md tells what else was tried.

    op                     bf16 us    %    FP32 us    %
    1x128                      170   99        278  101
    128x1_t                    175   97        277  101
    1x128 and 128x1_t          252   89        348   97
    128x128                    167  101        271  104
    128x128_t                  172   98        276  102
"""

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.hopper.quantize_cast import (
    SCALE_FMTS,
    cast_columns,
    cast_rows,
    channel_bits,
    larger,
    largest,
    largest_bits,
    magnitudes,
    scale_of,
    words_of,
)
from titan_fp8.kernels.hopper.quantize_tile import (
    MAXNREG,
    PART_WORDS,
    TILED,
    fetch,
    fetched,
    flip,
    group_lanes,
    layout,
    load_words,
    locate,
    store_columns,
    store_rows,
    tiles_of,
    tokens_of,
)
from titan_fp8.kernels.launch import Typed, kernel
from titan_fp8.reference import BLOCK, E4M3, cdiv, round_up, transposed_width

# Channels of a word (2: bf16, 1: FP32) -> layout of a tile, its warps.
ROWS = {
    2: (layout((4, 4), (2, 16), (4, 1)), 4),
    1: (layout((8, 4), (1, 32), (4, 1)), 4),
}
ROWS_MAXNREG = 128
"""With the rows of bf16: four programs, which take 1 to 2 % less than six of 80 registers."""
SQUARE = {
    2: (layout((4, 4), (2, 16), (16, 1)), 16),
    1: (layout((16, 4), (1, 32), (8, 1)), 8),
}


@gluon.jit
def quantize_rows(
    words, PLACES: gl.constexpr, q, s, row, rows, block, KW, S,
    PACK: gl.constexpr, SCALE_FMT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Scales and casts rows of a tile of 128 channels, number `block` of them.

    PLACES: as in `tokens_of`. SHARED: scales pass through shared memory, so that each is the
    business of one thread and not of all that hold a part of its row.
    """
    WORDS: gl.constexpr = words.type.layout
    tokens: gl.constexpr = gl.SliceLayout(1, WORDS)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0]) if SHARED else tokens
    scale, r = scale_of(gl.convert_layout(largest_bits(words, PACK), one), SCALE_FMT)
    i = gl.convert_layout(tokens_of(PLACES, WORDS), one)
    gl.store(s + (block.to(gl.int64) * S + row) + i, scale, mask=i < rows)
    r = gl.convert_layout(r, tokens)
    values = cast_rows(words, r[:, None], PACK)
    store_rows(q, values, PLACES, row, rows, block * WORDS.shape[1], KW)


@gluon.jit
def quantize_columns(
    part, q_t, s_t, column, owned, tokens, columns, word, K, KW, MT,
    PACK: gl.constexpr, SCALE_FMT: gl.constexpr, STRANGERS: gl.constexpr, FLIPPED: gl.constexpr,
):  # fmt: skip
    """Scales, casts and transposes the first `tokens` tokens of 128, by their places, and some
    words, into the first `columns` columns.

    STRANGERS: there may be tokens of no group, which are not `owned`; `tokens` is 0 then.
    """
    words = flip(part, FLIPPED)
    amax = largest(words, 1, PACK)
    if STRANGERS:
        amax = gl.where(owned, amax, 0)
    t = gl.arange(0, FLIPPED.shape[1], gl.SliceLayout(0, FLIPPED))
    keep = gl.where(t < tokens, -1, 0).to(gl.int8)[None, :]
    j = gl.arange(0, FLIPPED.shape[0], gl.SliceLayout(1, FLIPPED))
    scales = s_t + (column // 128).to(gl.int64) * K + word * PACK
    for i in gl.static_range(PACK):
        scale, r = scale_of(channel_bits(amax, i, PACK), SCALE_FMT)
        gl.store(scales + (j * PACK + i), scale, mask=(j < KW - word) & (columns > 0))
        values = cast_columns(words, r[:, None], keep, i, PACK)
        store_columns(q_t, values, column, columns, word * PACK + i, PACK, K, MT)


@kernel(do_not_specialize=["M", "S", "blocks"])
def _rows_kernel(
    x, q, s, M, KW, S, blocks,
    PACK: gl.constexpr, SCALE_FMT: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    block = gl.program_id(0) % blocks
    row = gl.program_id(0) // blocks * WORDS.shape[0]
    words = load_words(x, row, M - row, block * WORDS.shape[1], KW, WORDS)
    quantize_rows(words, None, q, s, row, M - row, block, KW, S, PACK, SCALE_FMT, True)


@kernel(do_not_specialize=["M", "S", "E", "tiles", "blocks"])
def _tokens_kernel(
    x, q, s, q_t, s_t, offs, M, K, KW, MT, S, E, tiles, blocks,
    PACK: gl.constexpr, SCALE_FMT: gl.constexpr, WITH_ROWS: gl.constexpr,
    GROUPS: gl.constexpr, ALIGNED: gl.constexpr, TILE: gl.constexpr, FETCH: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, FLIPPED: gl.constexpr,
):  # fmt: skip
    if WITH_ROWS:
        tile = gl.program_id(0) // blocks
        block = gl.program_id(0) % blocks
    else:
        tile = gl.program_id(0) % tiles
        block = gl.program_id(0) // tiles
    row, column, rows, columns, group = locate(tile, offs, M, MT, E, 128, GROUPS, ALIGNED)
    tokens = rows if GROUPS == 0 else gl.where(group < E, rows, 0)
    WIDTH: gl.constexpr = FETCH.shape[1]
    HEIGHT: gl.constexpr = ROWS.shape[0]
    word = block * WIDTH
    words = gl.allocate_shared_memory(gl.int32, FETCH.shape, TILE)
    fetch(words, x, 0, row, rows if WITH_ROWS else tokens, word, KW, FETCH)
    fetched()
    for w in gl.static_range(0, WIDTH, PART_WORDS):
        quantize_columns(
            words.slice(w, PART_WORDS, 1).load(COLUMNS), q_t, s_t, column, group < E, tokens,
            columns, word + w, K, KW, MT, PACK, SCALE_FMT, WITH_ROWS and GROUPS > 0, FLIPPED,
        )  # fmt: skip
    if WITH_ROWS:
        for place in gl.static_range(0, 128, HEIGHT):
            part = words.slice(place, HEIGHT).load(ROWS)
            quantize_rows(part, place, q, s, row, rows, block, KW, S, PACK, SCALE_FMT, False)


@kernel(do_not_specialize=["S"])
def _square_kernel(
    w, q, s, N, KW, S, PACK: gl.constexpr, SCALE_FMT: gl.constexpr, WORDS: gl.constexpr
):
    block = gl.program_id(0)
    row = gl.program_id(1) * 128
    expert = gl.program_id(2).to(gl.int64)
    word = block * WORDS.shape[1]
    words = load_words(w + expert * N * KW, row, N - row, word, KW, WORDS)
    scale, r = scale_of(gl.max(largest_bits(words, PACK), 0), SCALE_FMT)
    gl.store(s + (expert * gl.num_programs(1) + gl.program_id(1)) * S + block, scale)
    values = cast_rows(words, gl.full([1, 1], 0.0, gl.float32, WORDS) + r, PACK)
    store_rows(q + expert * N * KW, values, None, row, N - row, word, KW)


@kernel(do_not_specialize=["S"])
def _square_t_kernel(
    w, q_t, s_t, N, K, KW, S,
    PACK: gl.constexpr, SCALE_FMT: gl.constexpr, TILE: gl.constexpr, FETCH: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, FLIPPED: gl.constexpr,
):  # fmt: skip
    row = gl.program_id(0) * 128
    block = gl.program_id(1)
    expert = gl.program_id(2).to(gl.int64)
    WIDTH: gl.constexpr = FETCH.shape[1]
    HEIGHT: gl.constexpr = ROWS.shape[0]
    word = block * WIDTH
    words = gl.allocate_shared_memory(gl.int32, FETCH.shape, TILE)
    fetch(words, w + expert * N * KW, 0, row, N - row, word, KW, FETCH)
    fetched()
    most = magnitudes(words.slice(0, HEIGHT).load(ROWS), PACK)
    for place in gl.static_range(HEIGHT, 128, HEIGHT):
        most = larger(most, magnitudes(words.slice(place, HEIGHT).load(ROWS), PACK), PACK)
    scale, r = scale_of(gl.max(largest_bits(most, PACK), 0), SCALE_FMT)
    gl.store(s_t + (expert * gl.num_programs(1) + block) * S + gl.program_id(0), scale)
    r = gl.full([1, 1], 0.0, gl.float32, FLIPPED) + r
    keep = gl.full([1, 1], -1, gl.int8, FLIPPED)
    q_t += expert * K * N
    for v in gl.static_range(0, WIDTH, PART_WORDS):
        part = flip(words.slice(v, PART_WORDS, 1).load(COLUMNS), FLIPPED)
        for i in gl.static_range(PACK):
            values = cast_columns(part, r, keep, i, PACK)
            store_columns(q_t, values, row, N - row, (word + v) * PACK + i, PACK, K, N)


def _padded_scales(x: Tensor, *shape: int) -> Tensor:
    """Room for scales, the last dim at multiples of 4 in memory; what lies between is not read."""
    return x.new_empty(*shape[:-1], round_up(shape[-1], 4), dtype=torch.float32)


def scales_1x128(x: Tensor, rows: int, columns: int) -> Tensor:
    """Room for the scales (rows, blocks) of 1x128, one block behind the other in memory."""
    blocks = cdiv(columns, BLOCK)
    if rows % 4:
        return _padded_scales(x, blocks, rows)[:, :rows].t()
    return _blocks_behind_each_other(x, rows, blocks)


def scales_128x1_t(x: Tensor, channels: int, width: int) -> Tensor:
    """Room for the scales (channels, blocks) of 128x1; channels are a multiple of 4."""
    return _blocks_behind_each_other(x, channels, width // BLOCK)


def _blocks_behind_each_other(x: Tensor, rows: int, blocks: int) -> Tensor:
    strides = (1, max(rows, 1))
    return torch.empty_strided((rows, blocks), strides, dtype=torch.float32, device=x.device)


def quantize_1x128(x: Tensor, *, scale_fmt: str = "fp32") -> tuple[Tensor, Tensor]:
    """Quantises x (M, K) in blocks of 1x128: q (M, K), s (M, ⌈K/128⌉). The last may be short."""
    m, k = x.shape
    q, s = torch.empty_like(x, dtype=E4M3), scales_1x128(x, m, k)
    blocks = s.shape[1]
    words, out, pack = words_of(x, q)
    tile, warps = ROWS[pack]
    if m:
        _rows_kernel[(cdiv(m, tile.shape[0]) * blocks,)](
            words, out, s, m, k // pack, s.stride(1), blocks,
            pack, SCALE_FMTS[scale_fmt], tile, num_warps=warps,
        )  # fmt: skip
    return q, s


def _quantize_tokens(
    x: Tensor, rows: bool, offs: Tensor | None, aligned: bool, scale_fmt: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The transposed copy and its scales, before them those of the rows, empty unless asked for."""
    m, k = x.shape
    width = transposed_width(m, offs, aligned, BLOCK)
    blocks = cdiv(k, BLOCK)
    q = x.new_empty((m, k) if rows else 0, dtype=E4M3)
    s = scales_1x128(x, m if rows else 0, k)
    q_t, s_t = x.new_empty(k, width, dtype=E4M3), scales_128x1_t(x, k, width)
    words, out, pack = words_of(x, q)
    groups = 0 if offs is None else offs.shape[0]
    # With rows the tokens of no group need their tiles, too: one more than columns are left for.
    tiles = tiles_of(width, groups if rows and not aligned else 0, BLOCK)
    if tiles:
        _tokens_kernel[(tiles * blocks,)](
            words, out, s, Typed(q_t, torch.int8), s_t, offs,
            m, k, k // pack, width, s.stride(1), groups, tiles, blocks,
            pack, SCALE_FMTS[scale_fmt], rows, group_lanes(groups), aligned,
            maxnreg=ROWS_MAXNREG if rows and pack == 2 else MAXNREG, **TILED[pack],
        )  # fmt: skip
    return q, s, q_t, s_t


def quantize_128x1_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False, *, scale_fmt: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """Quantises x (M, K) in blocks of 128x1, written transposed: q (K, Mt), s (K, Mt/128)."""
    return _quantize_tokens(x, False, offs, aligned, scale_fmt)[2:]


def quantize_1x128_128x1_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False, *, scale_fmt: str = "fp32"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both of the above out of one read: q (M, K), s (M, ⌈K/128⌉), q (K, Mt), s (K, Mt/128)."""
    return _quantize_tokens(x, True, offs, aligned, scale_fmt)


def quantize_128x128(w: Tensor, *, scale_fmt: str = "fp32") -> tuple[Tensor, Tensor]:
    """Quantises w (..., N, K) in tiles of 128x128: q (..., N, K), s (..., ⌈N/128⌉, ⌈K/128⌉)."""
    *lead, n, k = w.shape
    rows, blocks = cdiv(n, BLOCK), cdiv(k, BLOCK)
    q = torch.empty_like(w, dtype=E4M3)
    s = _padded_scales(w, *lead, rows, blocks)
    words, out, pack = words_of(w, q)
    tile, warps = SQUARE[pack]
    _square_kernel[(blocks, rows, math.prod(lead))](
        words, out, s, n, k // pack, s.shape[-1],
        pack, SCALE_FMTS[scale_fmt], tile, num_warps=warps,
    )  # fmt: skip
    return q, s[..., :blocks]


def quantize_128x128_t(w: Tensor, *, scale_fmt: str = "fp32") -> tuple[Tensor, Tensor]:
    """The same tiles, written transposed: q (..., K, N), s (..., ⌈K/128⌉, ⌈N/128⌉)."""
    *lead, n, k = w.shape
    rows, blocks = cdiv(n, BLOCK), cdiv(k, BLOCK)
    q_t = w.new_empty(*lead, k, n, dtype=E4M3)
    s_t = _padded_scales(w, *lead, blocks, rows)
    words, _, pack = words_of(w, q_t)
    _square_t_kernel[(rows, blocks, math.prod(lead))](
        words, Typed(q_t, torch.int8), s_t, n, k, k // pack, s_t.shape[-1],
        pack, SCALE_FMTS[scale_fmt], maxnreg=MAXNREG, **TILED[pack],
    )  # fmt: skip
    return q_t, s_t[..., :rows]
