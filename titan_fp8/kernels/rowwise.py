"""Rowwise quantisers."""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.cast import (
    cast_columns,
    cast_rows,
    channel_bits,
    larger,
    largest,
    largest_bits,
    magnitudes,
    scale_of,
)
from titan_fp8.kernels.tile import layouts, load_words, locate, store_columns, store_rows
from titan_fp8.reference import E4M3, ROW_ALIGNMENT, cdiv, transposed_width

ROW_WORDS = 16384
"""Words of a row that one block of threads can hold."""
ROW_COLUMN_WORDS = 8192
"""The same beside the next row and the maxima of the columns."""
ROW_TOKENS = 32
"""Tokens a program of the pass over rows and columns reads, before it publishes column maxima."""
COLUMN_TOKENS = 128
"""The same for the pass over columns alone; also the tokens of a tile that is cast."""
MAXIMA = ((1, 4), (1, 32), (4, 1), (8, 1))
CAST = {1: ((16, 4), (8, 4), (1, 8)), 2: ((16, 4), (8, 4), (1, 4))}


@gluon.jit(do_not_specialize=["R"])
def _row_kernel(x, q, s, R, KW, PACK: gl.constexpr, WORDS: gl.constexpr):
    row = gl.program_id(0) * WORDS.shape[0]
    words = load_words(x, row, R - row, 0, KW, WORDS)
    scale, r = scale_of(largest_bits(words, PACK))
    store_rows(q, cast_rows(words, r[:, None], PACK), row, R - row, 0, KW, WORDS)
    i = gl.arange(0, WORDS.shape[0], gl.SliceLayout(1, WORDS))
    gl.store(s + row + i, scale, mask=i < R - row)


@gluon.jit(do_not_specialize=["R"])
def _long_row_kernel(x, q, s, R, KW, PACK: gl.constexpr, WORDS: gl.constexpr):
    row = gl.program_id(0) * WORDS.shape[0]
    most = gl.full(WORDS.shape, 0, gl.int32, WORDS)
    for word in range(0, KW, WORDS.shape[1]):
        words = load_words(x, row, R - row, word, KW, WORDS)
        most = larger(most, magnitudes(words, PACK), PACK)
    scale, r = scale_of(largest_bits(most, PACK))
    for word in range(0, KW, WORDS.shape[1]):
        words = load_words(x, row, R - row, word, KW, WORDS)
        store_rows(q, cast_rows(words, r[:, None], PACK), row, R - row, word, KW, WORDS)
    i = gl.arange(0, WORDS.shape[0], gl.SliceLayout(1, WORDS))
    gl.store(s + row + i, scale, mask=i < R - row)


@gluon.jit(do_not_specialize=["M", "E", "blocks"])
def _maxima_kernel(
    x, q, s, amax, offs, M, K, KW, MT, E, blocks,
    PACK: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, GROUPS: gl.constexpr,
    WORDS: gl.constexpr,
):  # fmt: skip
    word = gl.program_id(0) % blocks * WORDS.shape[1]
    row, rows, column, columns, group = locate(
        gl.program_id(0) // blocks, TOKENS, offs, M, MT, E, 16, GROUPS, False
    )
    if not ROWS:
        rows = gl.where(group < E, rows, 0)
    rows = gl.minimum(rows, TOKENS)
    x += gl.program_id(1).to(gl.int64) * M * KW
    amax += (gl.program_id(1) + group).to(gl.int64) * K
    most = gl.full(WORDS.shape, 0, gl.int32, WORDS)
    ahead = load_words(x, row, rows, word, KW, WORDS)
    for i in range(0, rows, WORDS.shape[0]):
        words = ahead
        next_i = i + WORDS.shape[0]
        ahead = load_words(x, row + next_i, rows - next_i, word, KW, WORDS)
        if ROWS:
            scale, r = scale_of(largest_bits(words, PACK))
            store_rows(q, cast_rows(words, r[:, None], PACK), row + i, rows - i, word, KW, WORDS)
            k = gl.arange(0, WORDS.shape[0], gl.SliceLayout(1, WORDS))
            gl.store(s + (row + i) + k, scale, mask=k < rows - i)
        most = larger(most, magnitudes(words, PACK), PACK)
    most = largest(most, 0, PACK)
    j = gl.arange(0, WORDS.shape[1], gl.SliceLayout(0, WORDS))
    inside = (j < KW - word) & (group < E) & (rows > 0)
    for i in gl.static_range(PACK):
        gl.atomic_max(
            amax + ((word + j) * PACK + i), channel_bits(most, i, PACK), mask=inside, sem="relaxed"
        )


@gluon.jit(do_not_specialize=["M", "E", "blocks"])
def _cast_columns_kernel(
    x, amax, q_t, s_t, offs, M, K, KW, MT, E, blocks,
    PACK: gl.constexpr, GROUPS: gl.constexpr, WORDS: gl.constexpr, FLIPPED: gl.constexpr,
):  # fmt: skip
    word = gl.program_id(0) % blocks * WORDS.shape[1]
    # Backwards: the end of x, read last, is still in the L2 cache.
    tile = gl.num_programs(0) // blocks - 1 - gl.program_id(0) // blocks
    expert = gl.program_id(1).to(gl.int64)
    x += expert * M * KW
    q_t += expert * K * MT
    amax += expert * K
    s_t += expert * K
    channels: gl.constexpr = gl.SliceLayout(1, FLIPPED)
    j = gl.arange(0, FLIPPED.shape[0], channels)
    inside = j < KW - word
    channel = (word + j) * PACK
    if tile < E:
        for i in gl.static_range(PACK):
            at = tile.to(gl.int64) * K + (channel + i)
            scale, r = scale_of(gl.load(amax + at, mask=inside, other=0))
            gl.store(s_t + at, scale, mask=inside)
    row, rows, column, columns, group = locate(
        tile, FLIPPED.shape[1], offs, M, MT, E, 16, GROUPS, False
    )
    tokens = gl.where(group < E, rows, 0)
    words = load_words(x, row, tokens, word, KW, WORDS)
    flipped = gl.convert_layout(gl.permute(words, (1, 0)), FLIPPED, assert_trivial=True)
    t = gl.arange(0, FLIPPED.shape[1], gl.SliceLayout(0, FLIPPED))
    keep = gl.where(t < tokens, -1, 0).to(gl.int8)[None, :]
    for i in gl.static_range(PACK):
        at = group.to(gl.int64) * K + (channel + i)
        scale, r = scale_of(gl.load(amax + at, mask=inside & (group < E), other=0))
        values = cast_columns(flipped, r[:, None], keep, i, PACK)
        store_columns(q_t, values, column, columns, word * PACK + i, PACK, K, MT, FLIPPED)


def _row_layout(words: int) -> tuple[gl.DistributedLinearLayout, int]:
    """Layout of some whole rows of that many words, four 16-byte loads a thread; its warps."""
    words = max(128, triton.next_power_of_2(words))
    across = min(16, max(1, words // 512))
    down = max(1, 4 // across)
    chunks = words // (128 * across)
    layout, _ = layouts((1, 4), (1, 32), (down, across), (max(1, 4 // chunks), chunks))
    return layout, down * across


def _words(x: Tensor) -> tuple[Tensor, int]:
    """x as 32-bit words, and the channels in each."""
    return x.view(torch.int32), 4 // x.element_size()


def quantize_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises x (..., R, C) with one scale a row: q (..., R, C), s (..., R)."""
    q, s = torch.empty_like(x, dtype=E4M3), x.new_empty(x.shape[:-1], dtype=torch.float32)
    words, pack = _words(x)
    rows, columns = s.numel(), x.shape[-1] // pack
    kernel = _row_kernel if columns <= ROW_WORDS else _long_row_kernel
    layout, warps = _row_layout(min(columns, 2048) if columns > ROW_WORDS else columns)
    out = q.view((torch.int8, torch.int16)[pack - 1])
    if rows:
        kernel[(cdiv(rows, layout.shape[0]),)](
            words, out, s, rows, columns, pack, layout, num_warps=warps
        )
    return q, s


def _columns(
    x: Tensor, rows: bool, offs: Tensor | None, aligned: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *lead, m, k = x.shape
    experts = lead[0] if lead else 1
    width = transposed_width(m, offs, aligned, ROW_ALIGNMENT)
    q = x.new_empty((m, k) if rows else 0, dtype=E4M3)
    s = x.new_empty(m if rows else 0, dtype=torch.float32)
    q_t = x.new_empty(*lead, k, width, dtype=E4M3)
    s_t = x.new_empty(*lead, *(() if offs is None else offs.shape), k, dtype=torch.float32)
    amax = torch.zeros_like(s_t, dtype=torch.int32)
    words, pack = _words(x)
    e = 1 if offs is None else offs.shape[0]
    groups = 0 if offs is None else max(32, triton.next_power_of_2(e + 1))

    def tiles(tokens: int) -> int:
        return cdiv(width, tokens) if offs is None else (width + (tokens - 1) * (e + 1)) // tokens

    if rows:
        layout, warps = _row_layout(k // pack)
        tokens, blocks = ROW_TOKENS, 1
    else:
        layout, warps = layouts(*MAXIMA)[0], 4
        tokens, blocks = COLUMN_TOKENS, cdiv(k // pack, layout.shape[1])
    shape = (m, k, k // pack, width, e, blocks)
    if m:
        out = q.view((torch.int8, torch.int16)[pack - 1])
        _maxima_kernel[(tiles(tokens) * blocks, experts)](
            words, out, s, amax, offs, *shape, pack, rows, tokens, groups, layout, num_warps=warps
        )
    thread, lanes, warps = CAST[pack]
    layout, flipped = layouts(thread, lanes, warps)
    blocks = cdiv(k // pack, layout.shape[1])
    _cast_columns_kernel[(max(e, tiles(128)) * blocks, experts)](
        words, amax, q_t.view(torch.int8), s_t, offs, *shape[:-1], blocks,
        pack, groups, layout, flipped, num_warps=warps[0] * warps[1],
    )  # fmt: skip
    return q, s, q_t, s_t


def quantize_col_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantises x (M, K) with one scale a column and group, written transposed.

    q (K, Mt); s (K,), with groups (E, K). A group without tokens has the scale of zeros.
    """
    return _columns(x, False, offs, aligned)[2:]


def quantize_row_col_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both of the above for x (M, K): q (M, K), s (M,), q (K, Mt), s (K,) or (E, K)."""
    if x.shape[1] * x.element_size() > 4 * ROW_COLUMN_WORDS:
        return (*quantize_row(x), *quantize_col_t(x, offs, aligned))
    return _columns(x, True, offs, aligned)


def quantize_weight_col_t(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises w (..., N, K) with one scale a column, transposed: q (..., K, N), s (..., K)."""
    return _columns(w, False, None, True)[2:]
