"""Where the kernels read the group ends `offs` (E,), on the device.

The CPU never knows the sizes of groups. It launches persistent programs, or as many as any sizes
may need, and each program finds out here which group its tile is in. Ends beyond M count as M. Rows
past the last end form a pseudo-group, number E: GEMMs write zeros there, and quantizers write their
rows but no columns.

    group_of_tile   GEMM, fprop and dgrad: walks from group to group until it reaches the tile's
    next_group      GEMM, wgrad: from one group to the next
    locate          quantizers: finds the tile by prefix sums over all groups

In the transposed copies of the quantizers each group starts at a column that is a multiple of 128,
so no tile has tokens of two groups, and stores are aligned to lines of 128 bytes.
"""

import functools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8.layouts import BLOCK, cdiv, power_of_two


@gluon.jit
def group_of_tile(tile, group, first, row_begin, row_end, offs_ptr, M, E, n_tiles):
    """Finds the group that a tile is in, by walking on from `group`, whose first tile is `first`.

    Returns the group, its first tile, its first row and its end row. A group has `n_tiles` tiles
    for each 128 of its rows, counted from its first row rounded down to a multiple of 4: TMA loads
    of scales must start at a multiple of 16 bytes.
    """
    tiles = gl.cdiv(row_end - row_begin // 4 * 4, 128) * n_tiles
    while (group <= E) & (tile >= first + tiles):
        first += tiles
        group += 1
        row_begin = row_end
        row_end = M
        if offs_ptr is not None:
            if group < E:
                row_end = gl.maximum(row_begin, gl.minimum(gl.load(offs_ptr + group), M))
        tiles = gl.cdiv(row_end - row_begin // 4 * 4, 128) * n_tiles
        tiles = gl.where(row_end > row_begin, tiles, 0)
    return group, first, row_begin, row_end


@gluon.jit
def next_group(group, end, block, blocks, offs_ptr, width, E):
    """The group after `group`, which ends at token `end` and has `blocks` blocks from `block` on.

    Returns the next group, its end token, its first block of 128 columns, its number of blocks, and
    how many halves of these blocks hold tokens. An end beyond the last token is cut to the width of
    the operands, whose columns without a token are zero.
    """
    block += blocks
    group += 1
    begin = end
    end = width
    if offs_ptr is not None:
        if group < E:
            end = gl.maximum(begin, gl.minimum(gl.load(offs_ptr + group), width))
    halves = gl.minimum(gl.cdiv(end - begin, 64), (gl.cdiv(width, 128) - block) * 2)
    return group, end, block, gl.cdiv(halves, 2), halves


@functools.cache
def group_lanes(groups: int) -> int:
    """How many group ends `locate` reads: a power of two of at least 32, or 0 without groups."""
    return groups and power_of_two(max(groups, 32))


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def locate(
    tile, offs, M, MT, E,
    TOKENS: gl.constexpr, GROUPS: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """Where a tile of TOKENS tokens is in x and in the transposed copy, and its group.

    Tiles are numbered group by group, from the first column of each. GROUPS is a power of two not
    below E, or 0 without groups. ALIGNED: the first rows of groups are multiples of 128, as their
    first columns always are; TOKENS then divides 128.

    Returns the row and the column of the tile's first token, the number of rows from there to the
    end of the group and of columns to the end of the copy (both may exceed TOKENS), and the group.
    """
    row = tile * TOKENS
    if GROUPS == 0:
        return row, row, M - row, MT - row, tile * 0
    elif ALIGNED:
        # Rows and columns coincide. Callers need to know only whether the rows have a group.
        group = gl.where(row < gl.load(offs + E - 1), 0, E)
        return row, row, M - row, MT - row, group
    else:
        # Element g of these vectors belongs to group g: its rows, cut to M, columns and tiles.
        g = gl.arange(0, GROUPS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        end = gl.load(offs + g, mask=g < E, other=0)
        begin = gl.load(offs + g - 1, mask=(g > 0) & (g < E), other=0)
        end = gl.minimum(gl.maximum(end, 0), M)
        begin = gl.minimum(gl.maximum(begin, 0), M)
        size = gl.maximum(end - begin, 0)
        width = (size + 127) // 128 * 128
        tiles = (width + TOKENS - 1) // TOKENS
        # `here` selects the group of this tile, `before` those that end before it.
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
    """The largest number of tiles that groups of any sizes need, with those of the pseudo-group."""
    ragged = 0 if BLOCK % tokens == 0 else groups
    return cdiv(width + (BLOCK if groups else 0), tokens) + ragged
