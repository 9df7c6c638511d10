"""Blockwise quantizers: 1x128, 128x1, both from one read, and 128x128 in either layout.

A program has a tile of 128 tokens by 128 channels, which consists of whole blocks of every kind. So
x is read once, whichever layouts are written. `quantize_tile.py` explains how tiles are held and
transposed, `quantize_cast.py` how values are scaled and cast.

Programs that write only the transposed copy are numbered along the tokens, which are neighbors in
the rows of the copy (3 to 5 % faster). Those that write both layouts are numbered along the
channels (up to 2 % faster).

docs/kernels.md has the times, docs/history/log_2026-11_kernels.md what else was tried.
"""

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.hopper.group_ends import group_lanes, locate, tiles_of
from titan_fp8.kernels.hopper.quantize_cast import (
    SCALE_FMTS,
    amax_words,
    cast_columns,
    cast_rows,
    channel_bits,
    magnitudes,
    max_magnitudes,
    row_amax,
    scale_of,
    words_of,
)
from titan_fp8.kernels.hopper.quantize_tile import (
    MAXNREG,
    PART_WORDS,
    TILES,
    load_words,
    start_load,
    store_columns,
    store_rows,
    tile_layout,
    tokens_of,
    transpose,
    wait_for_loads,
)
from titan_fp8.kernels.launch import kernel
from titan_fp8.layouts import BLOCK, E4M3, cdiv, round_up, transposed_width

ROWS = {
    2: (tile_layout((4, 4), (2, 16), (4, 1)), 4),
    1: (tile_layout((8, 4), (1, 32), (4, 1)), 4),
}
"""PACK (2: bf16, 1: FP32) -> layout of a tile whose rows alone are quantized, and its warps."""
SQUARE = {
    2: (tile_layout((4, 4), (2, 16), (16, 1)), 16),
    1: (tile_layout((16, 4), (1, 32), (8, 1)), 8),
}
"""PACK -> layout of a 128x128 tile, and its warps."""
ROWS_MAXNREG = 128
"""For bf16 tiles whose rows and columns are quantized: four programs on an SM take 1 to 2 % less
time than six of 80 registers."""


@gluon.jit
def quantize_rows(
    words, FIRST_PLACE: gl.constexpr, q, s, row, rows, block, KW, S,
    PACK: gl.constexpr, SCALE_FMT: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """Quantizes rows of the tile that starts at `row`, in block number `block` of 128 channels.

    FIRST_PLACE: see `tokens_of`. S: the stride between the blocks of the scales. SHARE: one thread
    computes the scale of a row and passes it to the others through shared memory. Otherwise each
    thread that holds a part of the row computes it.
    """
    WORDS: gl.constexpr = words.type.layout
    tokens: gl.constexpr = gl.SliceLayout(1, WORDS)
    once: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0]) if SHARE else tokens
    scale, r = scale_of(gl.convert_layout(row_amax(words, PACK), once), SCALE_FMT)
    i = gl.convert_layout(tokens_of(FIRST_PLACE, WORDS), once)
    gl.store(s + (block.to(gl.int64) * S + row) + i, scale, mask=i < rows)
    r = gl.convert_layout(r, tokens)
    values = cast_rows(words, r[:, None], PACK)
    store_rows(q, values, FIRST_PLACE, row, rows, block * WORDS.shape[1], KW)


@gluon.jit
def quantize_columns(
    part, q_t, s_t, column, in_group, tokens, columns, word, K, KW, MT,
    PACK: gl.constexpr, SCALE_FMT: gl.constexpr, MASK_AMAX: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Quantizes the columns of a part: 128 places by the channels of its words, from `word` on.

    Writes the first `columns` columns of the transposed copy from `column` on: the first `tokens`
    tokens, then zeros. MASK_AMAX: the part may hold values of tokens of no group (`in_group` false,
    `tokens` 0), which must not affect the scales.
    """
    words = transpose(part, TRANSPOSED)
    amax = amax_words(words, 1, PACK)
    if MASK_AMAX:
        amax = gl.where(in_group, amax, 0)
    t = gl.arange(0, TRANSPOSED.shape[1], gl.SliceLayout(0, TRANSPOSED))
    mask = gl.where(t < tokens, -1, 0).to(gl.int8)[None, :]
    j = gl.arange(0, TRANSPOSED.shape[0], gl.SliceLayout(1, TRANSPOSED))
    scales = s_t + (column // 128).to(gl.int64) * K + word * PACK
    for i in gl.static_range(PACK):
        scale, r = scale_of(channel_bits(amax, i, PACK), SCALE_FMT)
        gl.store(scales + (j * PACK + i), scale, mask=(j < KW - word) & (columns > 0))
        values = cast_columns(words, r[:, None], mask, i, PACK)
        store_columns(q_t, values, column, columns, word * PACK + i, PACK, K, MT)


@kernel(do_not_specialize=["M", "S", "blocks"])
def quantize_1x128_kernel(
    x, q, s, M, KW, S, blocks,
    PACK: gl.constexpr, SCALE_FMT: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Some rows of one block of 128 channels, in registers from the load to the cast."""
    block = gl.program_id(0) % blocks
    row = gl.program_id(0) // blocks * WORDS.shape[0]
    words = load_words(x, row, M - row, block * WORDS.shape[1], KW, WORDS)
    quantize_rows(words, None, q, s, row, M - row, block, KW, S, PACK, SCALE_FMT, True)


@kernel(do_not_specialize=["M", "S", "E", "tiles", "blocks"])
def quantize_128x1_t_kernel(
    x, q, s, q_t, s_t, offs, M, K, KW, MT, S, E, tiles, blocks,
    PACK: gl.constexpr, SCALE_FMT: gl.constexpr, WITH_ROWS: gl.constexpr,
    GROUPS: gl.constexpr, ALIGNED: gl.constexpr, LAYOUTS: gl.constexpr,
):  # fmt: skip
    """The columns of a tile of 128 tokens by 128 channels, and with WITH_ROWS its rows.

    The whole tile is loaded to shared memory, then its columns and rows are quantized from there in
    parts that fit into registers.
    """
    if WITH_ROWS:
        tile = gl.program_id(0) // blocks
        block = gl.program_id(0) % blocks
    else:
        tile = gl.program_id(0) % tiles
        block = gl.program_id(0) // tiles
    row, column, rows, columns, group = locate(tile, offs, M, MT, E, 128, GROUPS, ALIGNED)
    # Tokens of no group have rows but no columns.
    tokens = rows if GROUPS == 0 else gl.where(group < E, rows, 0)
    LOAD: gl.constexpr = LAYOUTS.load
    TRANSPOSED: gl.constexpr = LAYOUTS.transposed
    WIDTH: gl.constexpr = LOAD.shape[1]
    HEIGHT: gl.constexpr = LAYOUTS.rows.shape[0]
    word = block * WIDTH
    words = gl.allocate_shared_memory(gl.int32, LOAD.shape, LAYOUTS.shared)
    start_load(words, x, 0, row, rows if WITH_ROWS else tokens, word, KW, LOAD)
    wait_for_loads()
    for w in gl.static_range(0, WIDTH, PART_WORDS):
        quantize_columns(
            words.slice(w, PART_WORDS, 1).load(LAYOUTS.columns), q_t, s_t, column, group < E,
            tokens, columns, word + w, K, KW, MT,
            PACK, SCALE_FMT, WITH_ROWS and GROUPS > 0, TRANSPOSED,
        )  # fmt: skip
    if WITH_ROWS:
        for place in gl.static_range(0, 128, HEIGHT):
            part = words.slice(place, HEIGHT).load(LAYOUTS.rows)
            quantize_rows(part, place, q, s, row, rows, block, KW, S, PACK, SCALE_FMT, False)


@kernel(do_not_specialize=["S"])
def quantize_128x128_kernel(
    w, q, s, N, KW, S,
    PACK: gl.constexpr, SCALE_FMT: gl.constexpr, ROUNDED: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """One 128x128 tile of an expert's weight, in registers from the load to the cast.

    ROUNDED: w is FP32, and is rounded to bf16 first.
    """
    block = gl.program_id(0)
    row = gl.program_id(1) * 128
    expert = gl.program_id(2).to(gl.int64)
    word = block * WORDS.shape[1]
    words = load_words(w + expert * N * KW, row, N - row, word, KW, WORDS)
    if ROUNDED:
        rounded = words.to(gl.float32, bitcast=True).to(gl.bfloat16)
        words = rounded.to(gl.float32).to(gl.int32, bitcast=True)
    scale, r = scale_of(gl.max(row_amax(words, PACK), 0), SCALE_FMT)
    gl.store(s + (expert * gl.num_programs(1) + gl.program_id(1)) * S + block, scale)
    values = cast_rows(words, gl.full([1, 1], 0.0, gl.float32, WORDS) + r, PACK)
    store_rows(q + expert * N * KW, values, None, row, N - row, word, KW)


@kernel(do_not_specialize=["S"])
def quantize_128x128_t_kernel(
    w, q_t, s_t, N, K, KW, S,
    PACK: gl.constexpr, SCALE_FMT: gl.constexpr, LAYOUTS: gl.constexpr,
):  # fmt: skip
    """The same, transposed: the tile stays in shared memory and is read in parts, twice."""
    row = gl.program_id(0) * 128
    block = gl.program_id(1)
    expert = gl.program_id(2).to(gl.int64)
    LOAD: gl.constexpr = LAYOUTS.load
    TRANSPOSED: gl.constexpr = LAYOUTS.transposed
    WIDTH: gl.constexpr = LOAD.shape[1]
    HEIGHT: gl.constexpr = LAYOUTS.rows.shape[0]
    word = block * WIDTH
    words = gl.allocate_shared_memory(gl.int32, LOAD.shape, LAYOUTS.shared)
    start_load(words, w + expert * N * KW, 0, row, N - row, word, KW, LOAD)
    wait_for_loads()

    # First pass: the maximum, some rows at a time.
    most = magnitudes(words.slice(0, HEIGHT).load(LAYOUTS.rows), PACK)
    for place in gl.static_range(HEIGHT, 128, HEIGHT):
        part = words.slice(place, HEIGHT).load(LAYOUTS.rows)
        most = max_magnitudes(most, magnitudes(part, PACK), PACK)
    scale, r = scale_of(gl.max(row_amax(most, PACK), 0), SCALE_FMT)
    gl.store(s_t + (expert * gl.num_programs(1) + block) * S + gl.program_id(0), scale)

    # Second pass: the casts, some channels at a time. Rows past N are zeros and need no mask.
    r = gl.full([1, 1], 0.0, gl.float32, TRANSPOSED) + r
    mask = gl.full([1, 1], -1, gl.int8, TRANSPOSED)
    q_t += expert * K * N
    for v in gl.static_range(0, WIDTH, PART_WORDS):
        part = words.slice(v, PART_WORDS, 1).load(LAYOUTS.columns)
        part = transpose(part, TRANSPOSED)
        for i in gl.static_range(PACK):
            values = cast_columns(part, r, mask, i, PACK)
            store_columns(q_t, values, row, N - row, (word + v) * PACK + i, PACK, K, N)


def scales_1x128(x: Tensor, rows: int, columns: int) -> Tensor:
    """Uninitialized 1x128 scales (rows, blocks) on x's device, laid out as in `layouts.py`."""
    blocks = cdiv(columns, BLOCK)
    if rows % 4:
        return x.new_empty(blocks, round_up(rows, 4), dtype=torch.float32)[:, :rows].t()
    shape, strides = (rows, blocks), (1, max(rows, 1))
    return torch.empty_strided(shape, strides, dtype=torch.float32, device=x.device)


def _scales_128x128(w: Tensor, rows: int, columns: int) -> Tensor:
    """Uninitialized 128x128 scales (..., row blocks, column blocks) for w (..., N, K)."""
    n, k = cdiv(rows, BLOCK), cdiv(columns, BLOCK)
    s = w.new_empty(*w.shape[:-2], n, round_up(k, 4), dtype=torch.float32)
    return s[..., :k] if k % 4 else s


def quantize_1x128(x: Tensor, *, scale_fmt: str = "fp32") -> tuple[Tensor, Tensor]:
    """Quantizes x (M, K) in blocks of 1x128: q (M, K), s (M, ⌈K/128⌉). The last may be short."""
    m, k = x.shape
    q, s = torch.empty_like(x, dtype=E4M3), scales_1x128(x, m, k)
    blocks = s.shape[1]
    words, out, pack = words_of(x, q)
    layout, warps = ROWS[pack]
    if m:
        quantize_1x128_kernel[(cdiv(m, layout.shape[0]) * blocks,)](
            words, out, s, m, k // pack, s.stride(1), blocks,
            pack, SCALE_FMTS[scale_fmt], layout, num_warps=warps,
        )  # fmt: skip
    return q, s


def quantize_128x1_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False, *, scale_fmt: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """Quantizes x (M, K) in blocks of 128x1, transposed: q (K, Mt), s (K, Mt/128)."""
    return _quantize_columns(x, False, offs, aligned, scale_fmt)[2:]


def quantize_1x128_128x1_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False, *, scale_fmt: str = "fp32"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both of the above from one read: q (M, K), s (M, ⌈K/128⌉), q (K, Mt), s (K, Mt/128)."""
    return _quantize_columns(x, True, offs, aligned, scale_fmt)


def _quantize_columns(
    x: Tensor, with_rows: bool, offs: Tensor | None, aligned: bool, scale_fmt: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and s of the rows (not theirs unless `with_rows`), then q and s of the columns."""
    m, k = x.shape
    width = transposed_width(m, offs, aligned, BLOCK)
    blocks = cdiv(k, BLOCK)
    q_t, s_t = x.new_empty(k, width, dtype=E4M3), scales_1x128(x, k, width)
    q, s = q_t, s_t
    if with_rows:
        q, s = torch.empty_like(x, dtype=E4M3), scales_1x128(x, m, k)
    words, out, pack = words_of(x, q)
    groups = 0 if offs is None else offs.shape[0]
    # With rows, tokens of no group need tiles too, in addition to the tiles that fill `width`.
    tiles = tiles_of(width, groups if with_rows and not aligned else 0, BLOCK)
    layouts, warps = TILES[pack]
    if tiles:
        quantize_128x1_t_kernel[(tiles * blocks,)](
            words, out, s, (q_t, torch.int8), s_t, offs,
            m, k, k // pack, width, round_up(m, 4), groups, tiles, blocks,
            pack, SCALE_FMTS[scale_fmt], with_rows, group_lanes(groups), aligned, layouts,
            maxnreg=ROWS_MAXNREG if with_rows and pack == 2 else MAXNREG, num_warps=warps,
        )  # fmt: skip
    return q, s, q_t, s_t


def quantize_128x128(
    w: Tensor, dtype: torch.dtype | None = None, *, scale_fmt: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """Quantizes w (..., N, K), rounded to `dtype`, in tiles of 128x128.

    Returns q (..., N, K) and s (..., ⌈N/128⌉, ⌈K/128⌉).
    """
    *lead, n, k = w.shape
    q, s = torch.empty_like(w, dtype=E4M3), _scales_128x128(w, n, k)
    words, out, pack = words_of(w, q)
    layout, warps = SQUARE[pack]
    rounded = w.dtype == torch.float32 and dtype == torch.bfloat16
    quantize_128x128_kernel[(cdiv(k, BLOCK), cdiv(n, BLOCK), math.prod(lead))](
        words, out, s, n, k // pack, s.stride(-2),
        pack, SCALE_FMTS[scale_fmt], rounded, layout, num_warps=warps,
    )  # fmt: skip
    return q, s


def quantize_128x128_t(w: Tensor, *, scale_fmt: str = "fp32") -> tuple[Tensor, Tensor]:
    """The same tiles, transposed: q (..., K, N), s (..., ⌈K/128⌉, ⌈N/128⌉)."""
    *lead, n, k = w.shape
    q_t, s_t = w.new_empty(*lead, k, n, dtype=E4M3), _scales_128x128(w, k, n)
    words, _, pack = words_of(w, q_t)
    layouts, warps = TILES[pack]
    quantize_128x128_t_kernel[(cdiv(n, BLOCK), cdiv(k, BLOCK), math.prod(lead))](
        words, (q_t, torch.int8), s_t, n, k, k // pack, s_t.stride(-2),
        pack, SCALE_FMTS[scale_fmt], layouts, maxnreg=MAXNREG, num_warps=warps,
    )  # fmt: skip
    return q_t, s_t
