"""Tiles of the transposing quantizers: their layouts, loads and stores.

A transpose of FP8 through shared memory would move single bytes. Here the transpose moves nothing.
A thread that holds 16 consecutive tokens of a channel owns 16 consecutive bytes of the transposed
copy, so transposing only decides which registers a conversion to FP8 packs together. Eight lanes
lie along the tokens, so together they write a 128-byte line of the copy.

A tile stays in shared memory in high precision, and threads read it in parts. The bytes in flight
per SM are then bounded by its shared memory, not by the registers of waiting threads.

Places. The rows of a tile in shared memory are called places. Place p holds token `token_of(p)`:
neighboring places hold tokens 16 apart. Also, the 16-byte units of a row are swizzled by its
place. So eight lanes whose tokens are 16 apart read from different banks, whether a part of a tile
consists of some of its rows or of some of its words.
"""

import functools
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

Pair = tuple[int, int]

async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Triton 3.9's name or 3.6's."""

PART_WORDS = gl.constexpr(32)
"""Words of a row in a part of a tile whose columns are quantized."""


@functools.cache
def tile_layout(
    thread: Pair, lanes: Pair, warps: Pair, repeat: Pair = (1, 1)
) -> gl.DistributedLinearLayout:
    """Layout of a tile of (tokens, words); neighboring words are in neighboring registers.

    Each pair is a number of (tokens, words), powers of two: the block of a thread, the lanes of a
    warp, the warps, and how often all of this repeats. The size of the tile is their product.
    """
    bits, size = [], [1, 1]
    for counts in (thread, lanes, warps, repeat):
        tokens = [[size[0] << i, 0] for i in range(counts[0].bit_length() - 1)]
        words = [[0, size[1] << i] for i in range(counts[1].bit_length() - 1)]
        bits.append((words, tokens))
        size = [size[0] * counts[0], size[1] * counts[1]]
    (words, tokens), lane, warp, more = bits
    return gl.DistributedLinearLayout(
        words + tokens + sum(more, []), sum(lane, []), sum(warp, []), [], size
    )


@functools.cache
def column_layouts(
    warps: int, words: int = PART_WORDS.value
) -> tuple[gl.DistributedLinearLayout, gl.DistributedLinearLayout]:
    """The two layouts of a part, 128 tokens by some words, whose columns are quantized.

    The first is of (places, words), as read from shared memory, the second of (words, tokens), as
    written to the transposed copy. Each thread holds the same elements in both.
    """

    def layout(place: list[list[int]], word: list[list[int]], shape: list[int]):
        lanes, warp = 2, 2 + warps.bit_length() - 1
        registers = place[3:] + word[warp:]
        return gl.DistributedLinearLayout(
            registers, place[:3] + word[:lanes], word[lanes:warp], [], shape
        )

    bits = words.bit_length() - 1
    place = [[1 << i, 0] for i in range(7)]
    # What each bit of a place adds to the token: first which 16 tokens, then which of them.
    token = [[0, 16], [0, 32], [0, 64], [0, 1], [0, 2], [0, 4], [0, 8]]
    return (
        layout(place, [[0, 1 << i] for i in range(bits)], [128, words]),
        layout(token, [[1 << i, 0] for i in range(bits)], [words, 128]),
    )


@dataclass(frozen=True)
class TileLayouts:
    """The layouts of a kernel that transposes tiles of 128 tokens, as one constexpr argument.

    A kernel names those that it passes on, for example `LOAD: gl.constexpr = LAYOUTS.load`.
    """

    shared: gl.SwizzledSharedLayout | gl.SharedLinearLayout
    """Of the tile in shared memory, (places, words)."""
    load: gl.DistributedLinearLayout
    """Of the threads that copy it from global memory."""
    rows: gl.DistributedLinearLayout | None
    """Of a part whose rows are quantized, (places, words)."""
    columns: gl.DistributedLinearLayout
    """Of a part whose columns are quantized, (places, words)."""
    transposed: gl.DistributedLinearLayout
    """Of the same part as (words, tokens)."""


SHARED = gl.SwizzledSharedLayout(4, 1, 8, order=[1, 0])
TILES = {
    2: (
        TileLayouts(
            SHARED,
            tile_layout((1, 4), (2, 16), (4, 1), (16, 1)),
            tile_layout((4, 4), (2, 16), (4, 1)),
            *column_layouts(4),
        ),
        4,
    ),
    1: (
        TileLayouts(
            SHARED,
            tile_layout((1, 4), (1, 32), (8, 1), (16, 1)),
            tile_layout((4, 4), (1, 32), (8, 1)),
            *column_layouts(8),
        ),
        8,
    ),
}
"""PACK (2: bf16, 1: FP32) -> layouts of tiles of 128 tokens by 128 channels, and their warps."""
MAXNREG = 80
"""Registers per thread with which 24 warps fit on an SM. Its shared memory has room for six bf16
tiles of 4 warps or three FP32 tiles of 8."""


@gluon.jit
def token_of(place):
    """The token of a tile that is at a place."""
    return place // 128 * 128 + place % 8 * 16 + place % 128 // 8


@gluon.jit
def tokens_of(FIRST_PLACE: gl.constexpr, LAYOUT: gl.constexpr):
    """The token of each row of LAYOUT, if row 0 is place FIRST_PLACE; if None, row i is token i."""
    i = gl.arange(0, LAYOUT.shape[0], gl.SliceLayout(1, LAYOUT))
    if FIRST_PLACE is None:
        return i
    else:
        return token_of(FIRST_PLACE + i)


@gluon.jit
def load_words(x, row, rows, word, KW, LAYOUT: gl.constexpr):
    """Loads the tile of x (M, KW words) at (row, word); zeros past its first `rows` rows."""
    i = gl.arange(0, LAYOUT.shape[0], gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, LAYOUT.shape[1], gl.SliceLayout(0, LAYOUT))
    inside = (i < rows)[:, None] & (j < KW - word)[None, :]
    tile = x + (row.to(gl.int64) * KW + word)
    return gl.load(tile + (i[:, None] * KW + j[None, :]), mask=inside, other=0)


@gluon.jit
def start_load(part, x, FIRST_PLACE: gl.constexpr, row, rows, word, KW, LOAD: gl.constexpr):
    """Starts to copy a part of the tile of x (M, KW words) at (row, word) to shared memory.

    The part is the places from FIRST_PLACE on. Places of tokens past the tile's first `rows` rows
    get zeros.
    """
    i = tokens_of(FIRST_PLACE, LOAD)
    j = gl.arange(0, LOAD.shape[1], gl.SliceLayout(0, LOAD))
    inside = (i < rows)[:, None] & (j < KW - word)[None, :]
    tile = x + (row.to(gl.int64) * KW + word)
    async_load(part, tile + (i[:, None] * KW + j[None, :]), mask=inside)


@gluon.jit
def wait_for_loads():
    """Waits for all that this thread has started with `start_load`.

    Reading the part then needs no barrier of its own: the compiler inserts one.
    """
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def transpose(part, TRANSPOSED: gl.constexpr):
    """128 places by some words, as words by 128 tokens. No data moves between threads."""
    WORDS: gl.constexpr = part.shape[1]
    part = gl.permute(gl.reshape(part, [16, 8, WORDS]), (2, 1, 0))
    return gl.convert_layout(gl.reshape(part, [WORDS, 128]), TRANSPOSED, assert_trivial=True)


@gluon.jit
def store_rows(q, values, FIRST_PLACE: gl.constexpr, row, rows, word, KW):
    """Writes the results of `cast_rows` for a part of the tile at (row, word)."""
    LAYOUT: gl.constexpr = values.type.layout
    i = tokens_of(FIRST_PLACE, LAYOUT)
    j = gl.arange(0, LAYOUT.shape[1], gl.SliceLayout(0, LAYOUT))
    inside = (i < rows)[:, None] & (j < KW - word)[None, :]
    tile = q + (row.to(gl.int64) * KW + word)
    gl.store(tile + (i[:, None] * KW + j[None, :]), values, mask=inside)


@gluon.jit
def store_columns(q_t, values, column, columns, channel, STEP: gl.constexpr, K, MT):
    """Writes the results of `cast_columns` for every STEP-th channel from `channel` on.

    Token 0 goes to `column` of q_t (K, MT). Tokens from `columns` on are not written.
    """
    LAYOUT: gl.constexpr = values.type.layout
    j = gl.arange(0, LAYOUT.shape[0], gl.SliceLayout(1, LAYOUT)) * STEP
    t = gl.arange(0, LAYOUT.shape[1], gl.SliceLayout(0, LAYOUT))
    inside = (j < K - channel)[:, None] & (t < columns)[None, :]
    tile = q_t + (channel.to(gl.int64) * MT + column)
    gl.store(tile + (j[:, None] * MT + t[None, :]), values, mask=inside)
