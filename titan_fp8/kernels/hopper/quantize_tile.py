"""Where a tile lies, who holds what of it, and how it comes and goes.

The transposed copy is what costs: transposed through shared memory, FP8 moves a byte at a time.
Here the transpose itself moves nothing. A thread that has 16 consecutive tokens of a channel owns
16 consecutive bytes of the transposed copy: transposing is a choice of which registers the
conversion to FP8 pairs. Eight lanes lie along the tokens, so that they write a line of the copy.

A tile that is transposed waits in shared memory, in high precision, and passes through registers in
parts. What a multiprocessor has under way from memory is then bounded by its shared memory, and not
by the registers of threads that wait. Its tokens lie in an order of their own: neighbours in memory
are 16 tokens apart, and 16-byte units of a row are swizzled by the place of the row. So the eight
lanes find their words in different banks, and parts may be some rows or some words.

Groups. Tiles are blocks of columns of the transposed copy, numbered group by group from each one's
first column, so that no tile holds tokens of two groups; as groups start at multiples of 128, every
store begins at the same place of a line. What no group owns, the rows behind the last one and the
columns that no token fills, is one group more. Each program finds its tile by sums over the groups,
on the device; the host knows only how many tiles there can be.
"""

import functools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from titan_fp8.reference import BLOCK, cdiv

Pair = tuple[int, int]

async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Triton 3.9's name or 3.6's."""

PART_WORDS = gl.constexpr(32)
"""Words of a row that a part of a tile's columns takes."""


@functools.cache
def layout(
    thread: Pair, lanes: Pair, warps: Pair, repeat: Pair = (1, 1)
) -> gl.DistributedLinearLayout:
    """Who holds what of a tile of (tokens, words): each thread neighbours along the words.

    A thread holds a block of `thread` words, a warp is `lanes` of those, a program `warps` of those
    and the tile `repeat` of those.
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
def columns_layouts(warps: int, words: int = PART_WORDS.value) -> dict[str, object]:
    """Who holds what of 128 tokens by some words whose columns are made.

    Launch arguments: COLUMNS as (places, words), FLIPPED the same as (words, tokens).
    """

    def make(place: list[list[int]], word: list[list[int]], shape: list[int]):
        lanes, warp = 2, 2 + warps.bit_length() - 1
        return gl.DistributedLinearLayout(
            place[3:] + word[warp:], place[:3] + word[:lanes], word[lanes:warp], [], shape
        )

    bits = words.bit_length() - 1
    # The bits of a place say which of 16 tokens, behind those that say which 16.
    token = [[0, 16], [0, 32], [0, 64], [0, 1], [0, 2], [0, 4], [0, 8]]
    return {
        "COLUMNS": make(
            [[1 << i, 0] for i in range(7)], [[0, 1 << i] for i in range(bits)], [128, words]
        ),
        "FLIPPED": make(token, [[1 << i, 0] for i in range(bits)], [words, 128]),
    }


TILE = gl.SwizzledSharedLayout(4, 1, 8, order=[1, 0])
"""A tile in shared memory, of places by words."""
# Channels of a word (2: bf16, 1: FP32) -> launch arguments of a kernel that takes tiles of 128
# tokens by 128 channels: how they come, who holds rows, who columns.
TILED = {
    2: {
        "TILE": TILE,
        "FETCH": layout((1, 4), (2, 16), (4, 1), (16, 1)),
        "ROWS": layout((4, 4), (2, 16), (4, 1)),
        **columns_layouts(4),
        "num_warps": 4,
    },
    1: {
        "TILE": TILE,
        "FETCH": layout((1, 4), (1, 32), (8, 1), (16, 1)),
        "ROWS": layout((4, 4), (1, 32), (8, 1)),
        **columns_layouts(8),
        "num_warps": 8,
    },
}
MAXNREG = 80
"""For 24 warps: shared memory has room for six tiles in bf16, each of 4, or three in FP32, of 8."""


@functools.cache
def group_lanes(groups: int) -> int:
    """Of how many groups, a power of two, `locate` reads the ends; 0 of none."""
    return groups and max(32, 1 << (groups - 1).bit_length())


@gluon.jit
def token_of(place):
    """Which token of a tile has a place: of 128, neighbours are 16 apart."""
    return place // 128 * 128 + place % 8 * 16 + place % 128 // 8


@gluon.jit
def tokens_of(PLACES: gl.constexpr, LAYOUT: gl.constexpr):
    """The tokens of the rows of LAYOUT, which have the places from PLACES on; None: in order."""
    i = gl.arange(0, LAYOUT.shape[0], gl.SliceLayout(1, LAYOUT))
    if PLACES is None:
        return i
    else:
        return token_of(PLACES + i)


@gluon.jit
def load_words(x, row, rows, word, KW, WORDS: gl.constexpr):
    """The tile of x (M, KW words) at (row, word), zeros behind its first `rows` rows."""
    i = gl.arange(0, WORDS.shape[0], gl.SliceLayout(1, WORDS))
    j = gl.arange(0, WORDS.shape[1], gl.SliceLayout(0, WORDS))
    inside = (i < rows)[:, None] & (j < KW - word)[None, :]
    tile = x + (row.to(gl.int64) * KW + word)
    return gl.load(tile + (i[:, None] * KW + j[None, :]), mask=inside, other=0)


@gluon.jit
def fetch(part, x, PLACES: gl.constexpr, row, rows, word, KW, FETCH: gl.constexpr):
    """Begins to bring those tokens of the tile of x (M, KW words) at (row, word) that have the
    places from PLACES on into `part`; zeros for those behind the tile's first `rows`."""
    i = tokens_of(PLACES, FETCH)
    j = gl.arange(0, FETCH.shape[1], gl.SliceLayout(0, FETCH))
    inside = (i < rows)[:, None] & (j < KW - word)[None, :]
    tile = x + (row.to(gl.int64) * KW + word)
    async_load(part, tile + (i[:, None] * KW + j[None, :]), mask=inside)


@gluon.jit
def fetched():
    """Waits for all that `fetch` brings."""
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def flip(part, FLIPPED: gl.constexpr):
    """128 places by some words as those words by 128 tokens, which each thread has already."""
    WORDS: gl.constexpr = part.shape[1]
    part = gl.permute(gl.reshape(part, [16, 8, WORDS]), (2, 1, 0))
    return gl.convert_layout(gl.reshape(part, [WORDS, 128]), FLIPPED, assert_trivial=True)


@gluon.jit
def store_rows(q, values, PLACES: gl.constexpr, row, rows, word, KW):
    """Writes what `cast_rows` made of rows of the tile at (row, word)."""
    OUT: gl.constexpr = values.type.layout
    i = tokens_of(PLACES, OUT)
    j = gl.arange(0, OUT.shape[1], gl.SliceLayout(0, OUT))
    inside = (i < rows)[:, None] & (j < KW - word)[None, :]
    tile = q + (row.to(gl.int64) * KW + word)
    gl.store(tile + (i[:, None] * KW + j[None, :]), values, mask=inside)


@gluon.jit
def store_columns(q_t, values, column, columns, channel, STEP: gl.constexpr, K, MT):
    """Writes what `cast_columns` made of every STEP-th channel, from `channel` on, at `column`."""
    OUT: gl.constexpr = values.type.layout
    j = gl.arange(0, OUT.shape[0], gl.SliceLayout(1, OUT)) * STEP
    t = gl.arange(0, OUT.shape[1], gl.SliceLayout(0, OUT))
    inside = (j < K - channel)[:, None] & (t < columns)[None, :]
    tile = q_t + (channel.to(gl.int64) * MT + column)
    gl.store(tile + (j[:, None] * MT + t[None, :]), values, mask=inside)


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def locate(
    tile, offs, M, MT, E,
    TOKENS: gl.constexpr, GROUPS: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """Where tile number `tile`, of TOKENS columns, lies, and what of it is its group's.

    Returns the row and the column of its first token; how many rows there are from there to the
    group's end and how many columns to the last, which may be more than TOKENS; the group, E for
    what no group owns. Groups begin at columns that are multiples of 128; ALIGNED says that their
    rows are, too, and TOKENS divides 128 then. GROUPS is a power of two, at least E, and 0 where
    there are no groups.
    """
    row = tile * TOKENS
    if GROUPS == 0:
        return row, row, M - row, MT - row, tile * 0
    elif ALIGNED:
        group = gl.where(row < gl.load(offs + E - 1), 0, E)
        return row, row, M - row, MT - row, group
    else:
        g = gl.arange(0, GROUPS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        end = gl.load(offs + g, mask=g < E, other=0)
        begin = gl.load(offs + g - 1, mask=(g > 0) & (g < E), other=0)
        end = gl.minimum(gl.maximum(end, 0), M)
        begin = gl.minimum(gl.maximum(begin, 0), M)
        size = gl.maximum(end - begin, 0)
        width = (size + 127) // 128 * 128
        tiles = (width + TOKENS - 1) // TOKENS
        after = gl.associative_scan(tiles, 0, _sum)
        before = (g < E) & (after <= tile)
        here = (g < E) & (after > tile) & (after - tiles <= tile)
        group = gl.sum(before.to(gl.int32), 0)
        begin = gl.sum(gl.where(before, size, 0), 0)
        start = gl.sum(gl.where(before, width // 128, 0), 0) * 128
        size = gl.where(group < E, gl.sum(gl.where(here, size, 0), 0), M - begin)
        inside = (tile - gl.sum(gl.where(before, tiles, 0), 0)) * TOKENS
        row, column = begin + inside, start + inside
        return row, column, gl.minimum(begin + size, M) - row, MT - column, group


def tiles_of(width: int, groups: int, tokens: int) -> int:
    """How many tiles `locate` may number, those of what no group owns included."""
    ragged = 0 if BLOCK % tokens == 0 else groups
    return cdiv(width + (BLOCK if groups else 0), tokens) + ragged
