"""Blockwise quantisers."""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.cast import (
    cast_columns,
    cast_rows,
    channel_bits,
    largest,
    largest_bits,
    scale_of,
)
from titan_fp8.kernels.tile import layouts, load_words, locate, store_columns, store_rows
from titan_fp8.reference import BLOCK, E4M3, cdiv, round_up, transposed_width

# A kernel and the words of 128 channels (64: bf16, 128: FP32) -> thread, lanes, warps, each
# (tokens, words).
LAYOUTS = {
    ("rows", 64): ((8, 4), (2, 16), (4, 1)),
    ("rows", 128): ((8, 4), (1, 32), (4, 1)),
    ("columns", 64): ((16, 4), (8, 4), (1, 4)),
    ("columns", 128): ((16, 4), (8, 4), (1, 8)),
    ("both", 64): ((16, 4), (8, 4), (1, 4)),
    ("both", 128): ((16, 4), (8, 4), (1, 8)),
    ("square", 64): ((16, 4), (2, 16), (4, 1)),
    ("square", 128): ((16, 4), (1, 32), (8, 1)),
    ("square_t", 64): ((16, 4), (8, 4), (1, 4)),
    ("square_t", 128): ((16, 4), (8, 4), (1, 8)),
}


@gluon.jit(do_not_specialize=["M", "S", "blocks"])
def _rows_kernel(x, q, s, M, KW, S, blocks, PACK: gl.constexpr, WORDS: gl.constexpr):
    block = gl.program_id(0) % blocks
    row = gl.program_id(0) // blocks * WORDS.shape[0]
    words = load_words(x, row, M - row, block * WORDS.shape[1], KW, WORDS)
    scale, r = scale_of(largest_bits(words, PACK))
    store_rows(
        q, cast_rows(words, r[:, None], PACK), row, M - row, block * WORDS.shape[1], KW, WORDS
    )
    i = gl.arange(0, WORDS.shape[0], gl.SliceLayout(1, WORDS))
    gl.store(s + (block.to(gl.int64) * S + row) + i, scale, mask=i < M - row)


@gluon.jit(do_not_specialize=["M", "S", "E", "blocks"])
def _tokens_kernel(
    x, q, s, q_t, s_t, offs, M, K, KW, MT, S, E, blocks,
    PACK: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, ALIGNED: gl.constexpr,
    WORDS: gl.constexpr, FLIPPED: gl.constexpr,
):  # fmt: skip
    block = gl.program_id(0) % blocks
    word = block * WORDS.shape[1]
    row, rows, column, columns, group = locate(
        gl.program_id(0) // blocks, 128, offs, M, MT, E, 128, GROUPS, ALIGNED
    )
    tokens = rows if GROUPS == 0 else gl.where(group < E, rows, 0)
    words = load_words(x, row, rows if ROWS else tokens, word, KW, WORDS)
    if ROWS:
        scale, r = scale_of(largest_bits(words, PACK))
        i = gl.arange(0, WORDS.shape[0], gl.SliceLayout(1, WORDS))
        gl.store(s + (block.to(gl.int64) * S + row) + i, scale, mask=i < rows)
        store_rows(q, cast_rows(words, r[:, None], PACK), row, rows, word, KW, WORDS)
    channels: gl.constexpr = gl.SliceLayout(1, FLIPPED)
    amax = gl.convert_layout(largest(words, 0, PACK), channels, assert_trivial=True)
    if ROWS and GROUPS > 0:
        amax = gl.where(group < E, amax, 0)
    flipped = gl.convert_layout(gl.permute(words, (1, 0)), FLIPPED, assert_trivial=True)
    t = gl.arange(0, FLIPPED.shape[1], gl.SliceLayout(0, FLIPPED))
    j = gl.arange(0, FLIPPED.shape[0], channels)
    keep = gl.where(t < tokens, -1, 0).to(gl.int8)[None, :]
    s_t += (column // 128).to(gl.int64) * K + word * PACK
    for i in gl.static_range(PACK):
        scale, r = scale_of(channel_bits(amax, i, PACK))
        gl.store(s_t + (j * PACK + i), scale, mask=(j < KW - word) & (columns > 0))
        values = cast_columns(flipped, r[:, None], keep, i, PACK)
        store_columns(q_t, values, column, columns, word * PACK + i, PACK, K, MT, FLIPPED)


@gluon.jit(do_not_specialize=["S", "blocks", "row_blocks"])
def _square_kernel(
    w, q, s, N, K, KW, S, blocks, row_blocks,
    PACK: gl.constexpr, TRANSPOSED: gl.constexpr, WORDS: gl.constexpr, FLIPPED: gl.constexpr,
):  # fmt: skip
    block = gl.program_id(0) % blocks
    row_block = gl.program_id(0) // blocks
    row = row_block * 128
    word = block * WORDS.shape[1]
    expert = gl.program_id(1).to(gl.int64)
    words = load_words(w + expert * N * KW, row, N - row, word, KW, WORDS)
    scale, r = scale_of(gl.max(largest_bits(words, PACK), 0))
    if TRANSPOSED:
        gl.store(s + (expert * blocks + block) * S + row_block, scale)
        q += expert * K * N
        r = gl.full([1, 1], 0.0, gl.float32, FLIPPED) + r
        keep = gl.full([1, 1], -1, gl.int8, FLIPPED)
        flipped = gl.convert_layout(gl.permute(words, (1, 0)), FLIPPED, assert_trivial=True)
        for i in gl.static_range(PACK):
            values = cast_columns(flipped, r, keep, i, PACK)
            store_columns(q, values, row, N - row, word * PACK + i, PACK, K, N, FLIPPED)
    else:
        gl.store(s + (expert * row_blocks + row_block) * S + block, scale)
        r = gl.full([1, 1], 0.0, gl.float32, WORDS) + r
        store_rows(q + expert * N * KW, cast_rows(words, r, PACK), row, N - row, word, KW, WORDS)


def _words(x: Tensor) -> tuple[Tensor, int]:
    """x as 32-bit words, and the channels in each."""
    return x.view(torch.int32), 4 // x.element_size()


def _scales(x: Tensor, *shape: int) -> Tensor:
    """Storage of scales, the last dim padded to a multiple of 4; zeros where there is padding."""
    new = x.new_zeros if shape[-1] % 4 else x.new_empty
    return new(*shape[:-1], round_up(shape[-1], 4), dtype=torch.float32)


def _layouts(kernel: str, pack: int) -> dict:
    thread, lanes, warps = LAYOUTS[kernel, BLOCK // pack]
    words, flipped = layouts(thread, lanes, warps)
    return {"WORDS": words, "FLIPPED": flipped, "num_warps": warps[0] * warps[1]}


def quantize_1x128(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises x (M, K) in blocks of 1x128: q (M, K), s (M, ⌈K/128⌉). The last may be short."""
    m, k = x.shape
    q = torch.empty_like(x, dtype=E4M3)
    s = _scales(x, cdiv(k, BLOCK), m)
    words, pack = _words(x)
    config = _layouts("rows", pack)
    del config["FLIPPED"]
    tiles = cdiv(m, config["WORDS"].shape[0]) * s.shape[0]
    if tiles:
        out = q.view((torch.int8, torch.int16)[pack - 1])
        _rows_kernel[(tiles,)](words, out, s, m, k // pack, s.shape[1], s.shape[0], pack, **config)
    return q, s[:, :m].t()


def _launch_tokens(x: Tensor, rows: bool, offs: Tensor | None, aligned: bool) -> tuple[Tensor, ...]:
    m, k = x.shape
    width = transposed_width(m, offs, aligned, BLOCK)
    q = x.new_empty((m, k) if rows else 0, dtype=E4M3)
    s = _scales(x, cdiv(k, BLOCK), m if rows else 0)
    q_t = x.new_empty(k, width, dtype=E4M3)
    s_t = x.new_empty(width // BLOCK, k, dtype=torch.float32)
    words, pack = _words(x)
    groups = 0 if offs is None else offs.shape[0]
    # Rows behind the last group may need a tile more than the columns do.
    tiles = width // BLOCK + (groups > 0 and rows and not aligned)
    config = _layouts("both" if rows else "columns", pack)
    blocks = cdiv(k // pack, config["WORDS"].shape[1])
    if tiles:
        _tokens_kernel[(tiles * blocks,)](
            words, q.view((torch.int8, torch.int16)[pack - 1]), s, q_t.view(torch.int8), s_t, offs,
            m, k, k // pack, width, s.shape[1], groups, blocks,
            pack, rows, groups and max(32, triton.next_power_of_2(groups + 1)), aligned, **config,
        )  # fmt: skip
    return q, s[:, :m].t(), q_t, s_t.t()


def quantize_128x1_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantises x (M, K) in blocks of 128x1, written transposed: q (K, Mt), s (K, Mt/128)."""
    return _launch_tokens(x, False, offs, aligned)[2:]


def quantize_1x128_128x1_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both of the above out of one read: q (M, K), s (M, ⌈K/128⌉), q (K, Mt), s (K, Mt/128)."""
    return _launch_tokens(x, True, offs, aligned)


def _launch_square(w: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    *lead, n, k = w.shape
    rows, blocks = cdiv(n, BLOCK), cdiv(k, BLOCK)
    experts = lead[0] if lead else 1
    q = w.new_empty(*lead, *((k, n) if transposed else (n, k)), dtype=E4M3)
    s = _scales(w, *lead, *((blocks, rows) if transposed else (rows, blocks)))
    words, pack = _words(w)
    config = _layouts("square_t" if transposed else "square", pack)
    out = q.view(torch.int8 if transposed or pack == 1 else torch.int16)
    _square_kernel[(rows * blocks, experts)](
        words, out, s, n, k, k // pack, s.shape[-1], blocks, rows, pack, transposed, **config
    )
    return q, s[..., : rows if transposed else blocks]


def quantize_128x128(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises w (..., N, K) in tiles of 128x128: q (..., N, K), s (..., ⌈N/128⌉, ⌈K/128⌉)."""
    return _launch_square(w, False)


def quantize_128x128_t(w: Tensor) -> tuple[Tensor, Tensor]:
    """The same tiles, written transposed: q (..., K, N), s (..., ⌈K/128⌉, ⌈N/128⌉)."""
    return _launch_square(w, True)
