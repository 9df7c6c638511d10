"""Where a tile lies, who holds what of it, and how it comes and goes.

The transposed copy is what costs: transposed through shared memory, FP8 moves a byte at a time.
Here the transpose itself moves nothing. A thread loads 16 bytes of each of 16 consecutive tokens,
so it owns, for each of its channels, 16 consecutive bytes of the transposed copy: transposing is a
choice of which registers the conversion to FP8 pairs. Eight lanes lie along the channels, so that a
warp loads whole 128-byte lines of rows, and four along the tokens, half a line of the copy. Shared
memory only brings the halves together, 16 bytes at a time, before they leave: with requests for
half lines the L2 cache is what the kernel waits for.

Groups. Tiles are blocks of columns of the transposed copy, numbered group by group from each one's
first column, so that no tile holds tokens of two groups; as groups start at multiples of 128, every
store begins at the same place of a line. What no group owns, the rows behind the last one and the
columns that no token fills, is one group more. Each program finds its tile by sums over the groups,
on the device; the host knows only how many tiles there can be.
"""

import functools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8.reference import BLOCK, cdiv

Pair = tuple[int, int]

TRANSPOSED = {2: ((16, 4), (4, 8), (2, 2)), 1: ((16, 4), (4, 8), (2, 4))}
"""How a tile of 128 tokens by 128 channels is held for transposing, for bf16 (2) and FP32 (1)."""


@functools.cache
def layout(
    thread: Pair, lanes: Pair, warps: Pair, repeat: Pair = (1, 1), flipped: bool = False
) -> gl.DistributedLinearLayout:
    """Who holds what of a tile of (tokens, words): each thread neighbours along the words.

    A thread holds a block of `thread` words, a warp is `lanes` of those, a program `warps` of those
    and the tile `repeat` of those. `flipped` is the layout of the transposed tile in which each
    thread holds the same words, but neighbours along the tokens.
    """
    bits, size = [], [1, 1]
    for counts in (thread, lanes, warps, repeat):
        tokens = [[size[0] << i, 0] for i in range(counts[0].bit_length() - 1)]
        words = [[0, size[1] << i] for i in range(counts[1].bit_length() - 1)]
        bits.append((words, tokens))
        size = [size[0] * counts[0], size[1] * counts[1]]
    (words, tokens), lane, warp, more = bits
    own = tokens + words if flipped else words + tokens
    bases = [own + sum(more, []), sum(lane, []), sum(warp, []), []]
    if flipped:
        bases, size = [[basis[::-1] for basis in level] for level in bases], size[::-1]
    return gl.DistributedLinearLayout(*bases, size)


@functools.cache
def group_lanes(groups: int) -> int:
    """Of how many groups, a power of two, `locate` reads the ends; 0 of none."""
    return groups and max(32, 1 << (groups - 1).bit_length())


@functools.cache
def transposing(pack: int, tokens: int = 128) -> dict[str, object]:
    """Launch arguments of a kernel that transposes tiles of `pack` channels a word.

    A tile holds 128 tokens, or 256 of half as many channels.
    """
    assert tokens in (128, 256)
    thread, lanes, (down, across) = TRANSPOSED[pack]
    lines = tokens // 128
    warps = down * lines, across // lines
    return {
        "WORDS": layout(thread, lanes, warps),
        "FLIPPED": layout(thread, lanes, warps, flipped=True),
        "LINES": layout((1, 16), (4, 8), (down * across // lines, lines), (4, 1)),
        "num_warps": down * across,
    }


@gluon.jit
def load_words(x, row, rows, word, KW, WORDS: gl.constexpr):
    """The tile of x (M, KW words) at (row, word), zeros behind its first `rows` rows."""
    i = gl.arange(0, WORDS.shape[0], gl.SliceLayout(1, WORDS))
    j = gl.arange(0, WORDS.shape[1], gl.SliceLayout(0, WORDS))
    inside = (i < rows)[:, None] & (j < KW - word)[None, :]
    tile = x + (row.to(gl.int64) * KW + word)
    return gl.load(tile + (i[:, None] * KW + j[None, :]), mask=inside, other=0)


@gluon.jit
def store_rows(q, values, row, rows, word, KW, OUT: gl.constexpr):
    """Writes what `cast_rows` made of the tile at (row, word)."""
    values = gl.convert_layout(values, OUT)
    i = gl.arange(0, OUT.shape[0], gl.SliceLayout(1, OUT))
    j = gl.arange(0, OUT.shape[1], gl.SliceLayout(0, OUT))
    inside = (i < rows)[:, None] & (j < KW - word)[None, :]
    tile = q + (row.to(gl.int64) * KW + word)
    gl.store(tile + (i[:, None] * KW + j[None, :]), values, mask=inside)


@gluon.jit
def store_columns(
    q_t, values, column, columns, channel, STEP: gl.constexpr, K, MT, OUT: gl.constexpr
):
    """Writes what `cast_columns` made of every STEP-th channel, from `channel` on, at `column`."""
    values = gl.convert_layout(values, OUT)
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
