"""Where a tile lies, who holds what of it, and how it comes and goes.

The transposed copy is what costs: transposed through shared memory, FP8 moves a byte at a time.
Here nothing moves. A thread loads 16 bytes of each of 16 consecutive tokens, so it owns, for each
of its channels, 16 consecutive bytes of the transposed copy: the transpose is a choice of which
registers the conversion to FP8 pairs. Of a warp's lanes, those along the tokens store whole lines
of the copy together, those along the channels load whole sectors.

Groups. Tiles are numbered group by group, each group's last one short, so that no tile holds tokens
of two groups; what no group owns, the rows behind the last and the columns that no token fills, is
one group more. Each program finds its tile by summing over the groups before it, on the device.
"""

import functools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@functools.cache
def layouts(
    thread: tuple[int, int],
    lanes: tuple[int, int],
    warps: tuple[int, int],
    repeat: tuple[int, int] = (1, 1),
) -> tuple[gl.DistributedLinearLayout, gl.DistributedLinearLayout]:
    """Who holds what of a tile of (tokens, words), and of its transpose, tokens fastest.

    A thread holds `thread` neighbours, a warp is `lanes` of those, a block `warps` of those, and
    the tile `repeat` of those. A thread holds the same words in both, only in another order.
    """
    bits, size = [], [1, 1]
    for counts in (thread, lanes, warps, repeat):
        tokens = [[size[0] << i, 0] for i in range(counts[0].bit_length() - 1)]
        words = [[0, size[1] << i] for i in range(counts[1].bit_length() - 1)]
        bits.append((words, tokens))
        size = [size[0] * counts[0], size[1] * counts[1]]
    (words, tokens), lane, warp, more = bits
    rest = [sum(lane, []), sum(warp, []), []]
    straight = [words + tokens + sum(more, []), *rest]
    flipped = [tokens + words + sum(more, []), *rest]
    return (
        gl.DistributedLinearLayout(*straight, size),
        gl.DistributedLinearLayout(*([b[::-1] for b in f] for f in flipped), size[::-1]),
    )


@gluon.jit
def load_words(x, row, rows, word, KW, layout: gl.constexpr):
    """The tile of x (M, KW words) at (row, word); zeros behind `rows` rows."""
    i = gl.arange(0, layout.shape[0], gl.SliceLayout(1, layout))
    j = gl.arange(0, layout.shape[1], gl.SliceLayout(0, layout))
    inside = (i < rows)[:, None] & (j < KW - word)[None, :]
    tile = x + (row.to(gl.int64) * KW + word)
    return gl.load(tile + (i[:, None] * KW + j[None, :]), mask=inside, other=0)


@gluon.jit
def store_rows(q, values, row, rows, word, KW, layout: gl.constexpr):
    """Writes what `cast_rows` made of the tile at (row, word)."""
    i = gl.arange(0, layout.shape[0], gl.SliceLayout(1, layout))
    j = gl.arange(0, layout.shape[1], gl.SliceLayout(0, layout))
    inside = (i < rows)[:, None] & (j < KW - word)[None, :]
    tile = q + (row.to(gl.int64) * KW + word)
    gl.store(tile + (i[:, None] * KW + j[None, :]), values, mask=inside)


@gluon.jit
def store_columns(
    q_t, values, column, columns, channel, step: gl.constexpr, K, MT, layout: gl.constexpr
):
    """Writes what `cast_columns` made of every `step`-th channel, from `channel` on, at `column`."""
    j = gl.arange(0, layout.shape[0], gl.SliceLayout(1, layout)) * step
    t = gl.arange(0, layout.shape[1], gl.SliceLayout(0, layout))
    inside = (j < K - channel)[:, None] & (t < columns)[None, :]
    tile = q_t + (channel.to(gl.int64) * MT + column)
    gl.store(tile + (j[:, None] * MT + t[None, :]), values, mask=inside)


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def locate(
    tile,
    TOKENS: gl.constexpr,
    offs,
    M,
    MT,
    E,
    ALIGN: gl.constexpr,
    GROUPS: gl.constexpr,
    ALIGNED: gl.constexpr,
):
    """Where a tile lies: its first row, its rows, its first column, its columns, its group.

    Rows and columns may exceed TOKENS; the group is E where no group owns the tile. GROUPS is a
    power of two above E, 0 where there are no groups.
    """
    row = tile * TOKENS
    if GROUPS == 0:
        return row, M - row, row, MT - row, tile * 0
    elif ALIGNED and ALIGN % TOKENS == 0:
        group = gl.where(row < gl.load(offs + E - 1), 0, E)
        return row, M - row, row, MT - row, group
    else:
        g = gl.arange(0, GROUPS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        end = gl.load(offs + g, mask=g < E, other=M)
        begin = gl.load(offs + g - 1, mask=(g > 0) & (g <= E), other=0)
        end = gl.minimum(gl.maximum(end, 0), M)
        begin = gl.minimum(gl.maximum(begin, 0), M)
        size = gl.where(g <= E, gl.maximum(end - begin, 0), 0)
        tiles = (size + TOKENS - 1) // TOKENS
        width = (size + ALIGN - 1) // ALIGN
        before = (g < E) & (gl.associative_scan(tiles, 0, _sum) <= tile)
        group = gl.sum(before.to(gl.int32), 0)
        within = (tile - gl.sum(gl.where(before, tiles, 0), 0)) * TOKENS
        begin = gl.sum(gl.where(before, size, 0), 0)
        end = gl.sum(gl.where(g == group, end, 0), 0)
        column = gl.sum(gl.where(before, width, 0), 0) * ALIGN
        columns = (end - begin + ALIGN - 1) // ALIGN * ALIGN
        columns = gl.where(group < E, gl.minimum(columns, MT - column), MT - column)
        return begin + within, end - begin - within, column + within, columns - within, group
