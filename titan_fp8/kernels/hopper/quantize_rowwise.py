"""Rowwise quantizers of rows: one scale per row.

A program holds whole rows in registers, at least four 16-byte loads per thread, so it reads x once.
Rows of more than 32768 words (128 KiB) do not fit into registers and are read twice.

`quantize_rowwise_columns.py` quantizes columns.
"""

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.hopper.quantize_cast import (
    cast_rows,
    magnitudes,
    max_magnitudes,
    row_amax,
    scale_of,
    words_of,
)
from titan_fp8.kernels.hopper.quantize_tile import load_words, store_rows, tile_layout
from titan_fp8.kernels.launch import kernel
from titan_fp8.layouts import E4M3, cdiv, power_of_two

MAX_ROW_WORDS = 32768
"""The words of the longest row that a program holds."""


@kernel(do_not_specialize=["R"])
def quantize_row_kernel(x, q, s, R, KW, PACK: gl.constexpr, WORDS: gl.constexpr):
    """Whole rows, in registers from the load to the cast."""
    row = gl.program_id(0) * WORDS.shape[0]
    words = load_words(x, row, R - row, 0, KW, WORDS)
    scale, r = scale_of(row_amax(words, PACK))
    i = gl.arange(0, WORDS.shape[0], gl.SliceLayout(1, WORDS))
    gl.store(s + row + i, scale, mask=i < R - row)
    store_rows(q, cast_rows(words, r[:, None], PACK), None, row, R - row, 0, KW)


@kernel(do_not_specialize=["R"])
def quantize_long_row_kernel(x, q, s, R, KW, PACK: gl.constexpr, WORDS: gl.constexpr):
    """Long rows, part by part: one pass for the maxima, one for the casts."""
    row = gl.program_id(0) * WORDS.shape[0]
    most = gl.full(WORDS.shape, 0, gl.int32, WORDS)
    for word in range(0, KW, WORDS.shape[1]):
        words = load_words(x, row, R - row, word, KW, WORDS)
        most = max_magnitudes(most, magnitudes(words, PACK), PACK)
    scale, r = scale_of(row_amax(most, PACK))
    i = gl.arange(0, WORDS.shape[0], gl.SliceLayout(1, WORDS))
    gl.store(s + row + i, scale, mask=i < R - row)
    for word in range(0, KW, WORDS.shape[1]):
        words = load_words(x, row, R - row, word, KW, WORDS)
        store_rows(q, cast_rows(words, r[:, None], PACK), None, row, R - row, word, KW)


@functools.cache
def row_layout(words: int) -> tuple[gl.DistributedLinearLayout, int]:
    """Layout of rows of that many words, at least four 16-byte loads per thread, and its warps."""
    words = max(128, power_of_two(words))
    across = min(32, max(1, words // 512))
    down = max(1, 4 // across)
    chunks = words // (128 * across)
    repeat = (max(1, 4 // chunks), chunks)
    return tile_layout((1, 4), (1, 32), (down, across), repeat), down * across


def quantize_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes x (..., R, C) with one scale per row: q (..., R, C), s (..., R)."""
    q, s = torch.empty_like(x, dtype=E4M3), x.new_empty(x.shape[:-1], dtype=torch.float32)
    words, out, pack = words_of(x, q)
    rows, row_words = s.numel(), x.shape[-1] // pack
    fits = row_words <= MAX_ROW_WORDS
    layout, warps = row_layout(row_words if fits else 2048)
    if rows:
        (quantize_row_kernel if fits else quantize_long_row_kernel)[(cdiv(rows, layout.shape[0]),)](
            words, out, s, rows, row_words, pack, layout, num_warps=warps
        )
    return q, s
