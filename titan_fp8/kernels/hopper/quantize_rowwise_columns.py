"""Rowwise quantisers of columns, written transposed: one scale per column, or per group and column.

A scale stands for all tokens of a group, far more than a program holds. Without groups one kernel
reads x once and its programs exchange maxima (`quantize_rowwise_one_pass.py`), unless x has too
many rows for that. Otherwise x is read twice, by two kernels:

1. quantize_column_amax_kernel takes the maxima of some tokens in registers and combines them with
   those of the group by `atomic_max`. If the rows are to be quantised as well, it holds whole rows
   and does that too.
2. quantize_column_cast_kernel casts and transposes tiles (`quantize_tile.py`), the last tiles
   first, because these are still in the L2 cache. It also writes the scales.

Two tensors with the same groups, the operands of wgrad, share the launches of both kernels: the
programs of the second tensor follow those of the first. If the rows of the gradient are quantised
too, each has its own first launch.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.hopper.group_ends import group_lanes, locate, tiles_of
from titan_fp8.kernels.hopper.quantize_cast import (
    FP8_WORDS,
    amax_words,
    as_words,
    cast_rows,
    magnitudes,
    max_magnitudes,
    row_amax,
    scale_of,
)
from titan_fp8.kernels.hopper.quantize_rowwise import quantize_row, row_layout
from titan_fp8.kernels.hopper.quantize_rowwise_one_pass import (
    cast_part,
    fits_one_pass,
    load_amax,
    publish_amax,
    quantize_columns_in_one_pass,
    store_scales,
)
from titan_fp8.kernels.hopper.quantize_tile import (
    MAXNREG,
    PART_WORDS,
    TILES,
    load_words,
    start_load,
    store_rows,
    tile_layout,
    wait_for_loads,
)
from titan_fp8.kernels.launch import kernel
from titan_fp8.layouts import E4M3, ROW_ALIGNMENT, cdiv, transposed_width

AMAX_TOKENS = 256
"""Tokens of which a program takes the maxima of some columns."""
AMAX_LAYOUT = tile_layout((1, 4), (1, 32), (4, 1), (8, 1))
"""Holds 32 of them at a time."""
AMAX_WARPS = 4
ROW_AMAX_TOKENS = 32
"""Tokens of which a program takes the maxima of all columns and quantises the rows."""
ROW_AMAX_WORDS = 8192
"""The longest row of these: the registers hold it, the next row and the maxima."""


@kernel(do_not_specialize=["M", "E", "tiles", "blocks"])
def quantize_column_amax_kernel(
    x, amax, K, KW, x2, amax2, K2, KW2, q, s, offs, M, MT, E, tiles, blocks,
    PACK: gl.constexpr, ROWS: gl.constexpr, PAIR: gl.constexpr, TOKENS: gl.constexpr,
    GROUPS: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Column maxima of TOKENS tokens; with ROWS (and `blocks` 1) also q and s of their rows."""
    pid = gl.program_id(0)
    if PAIR:
        if pid >= tiles * blocks:
            pid -= tiles * blocks
            x, amax, K, KW = x2, amax2, K2, KW2
    word = pid // tiles * WORDS.shape[1]
    row, _, rows, _, group = locate(pid % tiles, offs, M, MT, E, TOKENS, GROUPS, False)
    if not ROWS:  # Tokens of no group have rows but no columns.
        rows = gl.where(group < E, rows, 0)
    rows = gl.minimum(rows, TOKENS)
    x += gl.program_id(1).to(gl.int64) * M * KW
    amax += (gl.program_id(1) + group).to(gl.int64) * K
    most = gl.full(WORDS.shape, 0, gl.int32, WORDS)
    # The next words are loaded before these are used, so that their latency is hidden.
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


@kernel(do_not_specialize=["M", "E", "tiles", "blocks"])
def quantize_column_cast_kernel(
    x, amax, q_t, s_t, K, KW, x2, amax2, q_t2, s_t2, K2, KW2, offs, M, MT, E, tiles, blocks,
    PACK: gl.constexpr, PAIR: gl.constexpr, GROUPS: gl.constexpr, LAYOUTS: gl.constexpr,
):  # fmt: skip
    """Casts a tile by the column maxima of its group; tile e also writes the scales of group e."""
    # The first kernel ended with the last tiles: they come first.
    pid = gl.num_programs(0) - 1 - gl.program_id(0)
    if PAIR:
        if pid >= tiles * blocks:
            pid -= tiles * blocks
            x, amax, q_t, s_t, K, KW = x2, amax2, q_t2, s_t2, K2, KW2
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
    # While the tile is on its way, the scales.
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


class _Tokens(NamedTuple):
    """The tokens of one or two tensors (..., M, K), and the groups that they are in."""

    offs: Tensor | None
    m: int
    width: int
    """Columns of the transposed copies."""
    experts: int
    """Matrices, the product of the leading dimensions."""

    @property
    def groups(self) -> int:
        """E, 0 without groups."""
        return 0 if self.offs is None else self.offs.shape[0]

    @property
    def scales(self) -> int:
        """Scales of a column."""
        return 1 if self.offs is None else self.groups


class _Columns:
    """One tensor x (..., M, K), its maxima and its outputs."""

    def __init__(self, x: Tensor, tokens: _Tokens):
        *lead, _, k = x.shape
        groups = () if tokens.offs is None else tuple(tokens.offs.shape)
        self.x, self.k, self.pack = as_words(x), k, 4 // x.element_size()
        self.q_t = x.new_empty(*lead, k, tokens.width, dtype=E4M3)
        self.s_t = x.new_empty(*lead, *groups, k, dtype=torch.float32)
        self.amax = torch.zeros_like(self.s_t, dtype=torch.int32)

    def blocks(self, words: int) -> int:
        """Tiles of that many words along the channels."""
        return cdiv(self.k // self.pack, words)

    def amax_args(self) -> tuple:
        return self.x, self.amax, self.k, self.k // self.pack

    def cast_args(self) -> tuple:
        return self.x, self.amax, (self.q_t, torch.int8), self.s_t, self.k, self.k // self.pack


def _launch_amax(
    columns: list[_Columns], tokens: _Tokens, rows: tuple[Tensor, Tensor] | None = None
) -> None:
    """Takes the maxima of one or two tensors; with `rows`, writes q and s of the rows of one."""
    a, b = columns[0], columns[-1]
    if rows is None:
        layout, warps, tile_tokens, q, s = AMAX_LAYOUT, AMAX_WARPS, AMAX_TOKENS, a.x, a.s_t
    else:
        layout, warps = row_layout(a.k // a.pack)
        tile_tokens = ROW_AMAX_TOKENS
        q, s = (rows[0], FP8_WORDS[a.pack]), rows[1]
    tiles = tiles_of(tokens.width, tokens.groups, tile_tokens)
    words = layout.shape[1]
    quantize_column_amax_kernel[(tiles * sum(c.blocks(words) for c in columns), tokens.experts)](
        *a.amax_args(), *b.amax_args(), q, s, tokens.offs, tokens.m, tokens.width,
        tokens.scales, tiles, a.blocks(words),
        a.pack, rows is not None, len(columns) == 2, tile_tokens, group_lanes(tokens.groups),
        layout, num_warps=warps,
    )  # fmt: skip


def _launch_cast(columns: list[_Columns], tokens: _Tokens) -> None:
    """Casts one or two tensors by their maxima and writes their scales."""
    a, b = columns[0], columns[-1]
    layouts, warps = TILES[a.pack]
    words = layouts.load.shape[1]
    # Tile e writes the scales of group e, so there is a tile for each group at least.
    tiles = max(tokens.scales, tiles_of(tokens.width, tokens.groups, 128))
    quantize_column_cast_kernel[(tiles * sum(c.blocks(words) for c in columns), tokens.experts)](
        *a.cast_args(), *b.cast_args(), tokens.offs, tokens.m, tokens.width,
        tokens.scales, tiles, a.blocks(words),
        a.pack, len(columns) == 2, group_lanes(tokens.groups), layouts,
        maxnreg=MAXNREG, num_warps=warps,
    )  # fmt: skip


def _quantize_in_two_passes(
    tensors: list[Tensor], tokens: _Tokens, rows: tuple[Tensor, Tensor] | None = None
) -> list[_Columns]:
    """Quantises the columns of one or two tensors; with `rows`, writes the first one's q and s."""
    columns = [_Columns(x, tokens) for x in tensors]
    if tokens.m and rows is not None:
        # A program with rows holds all channels of its tensor, so the second has a launch apart.
        _launch_amax(columns[:1], tokens, rows)
        if len(columns) == 2:
            _launch_amax(columns[1:], tokens)
    elif tokens.m:
        _launch_amax(columns, tokens)
    _launch_cast(columns, tokens)
    return columns


def _tokens_of(x: Tensor, offs: Tensor | None, aligned: bool) -> _Tokens:
    *lead, m, _ = x.shape
    return _Tokens(offs, m, transposed_width(m, offs, aligned, ROW_ALIGNMENT), math.prod(lead))


def _takes_one_pass(x: Tensor, tokens: _Tokens) -> bool:
    return tokens.offs is None and fits_one_pass(tokens.width, x.device)


def quantize_col_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantises x (M, K) with one scale per column and group, transposed.

    q (K, Mt); s (K,), with groups (E, K). A group without tokens has the scale of zeros.
    """
    tokens = _tokens_of(x, offs, aligned)
    if _takes_one_pass(x, tokens):
        return quantize_columns_in_one_pass(x, tokens.width)
    (columns,) = _quantize_in_two_passes([x], tokens)
    return columns.q_t, columns.s_t


def quantize_weight_col_t(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises w (..., N, K) with one scale per column, transposed: q (..., K, N), s (..., K)."""
    return quantize_col_t(w)


def quantize_col_t_pair(
    g: Tensor, x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_col_t` of g (M, N) and x (M, K), of one dtype; with groups in shared launches."""
    tokens = _tokens_of(g, offs, aligned)
    if _takes_one_pass(g, tokens):
        return (*quantize_col_t(g), *quantize_col_t(x.contiguous()))
    a, b = _quantize_in_two_passes([g, x.contiguous()], tokens)
    return a.q_t, a.s_t, b.q_t, b.s_t


def quantize_row_col_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows and columns of x (M, K): q (M, K), s (M,), q (K, Mt), s (K,) or (E, K)."""
    if not _holds_rows(x):
        return (*quantize_row(x), *quantize_col_t(x, offs, aligned))
    q, s = _empty_rows(x)
    (columns,) = _quantize_in_two_passes([x], _tokens_of(x, offs, aligned), (q, s))
    return q, s, columns.q_t, columns.s_t


def quantize_row_col_t_pair(
    g: Tensor, x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows and columns of g (M, N), then columns of x (M, K), of one dtype: for backward."""
    if not _holds_rows(g):
        return (*quantize_row(g), *quantize_col_t_pair(g, x, offs, aligned))
    if offs is None:
        return (*quantize_row_col_t(g), *quantize_col_t(x.contiguous()))
    q, s = _empty_rows(g)
    tokens = _tokens_of(g, offs, aligned)
    a, b = _quantize_in_two_passes([g, x.contiguous()], tokens, (q, s))
    return q, s, a.q_t, a.s_t, b.q_t, b.s_t


def _holds_rows(x: Tensor) -> bool:
    """Whether the first kernel can hold whole rows of x."""
    return x.shape[1] * x.element_size() <= 4 * ROW_AMAX_WORDS


def _empty_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=E4M3), x.new_empty(x.shape[0], dtype=torch.float32)
