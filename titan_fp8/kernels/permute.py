"""The permutation kernels around the experts: copies, sums and dot products of indexed rows.

A program writes some rows of the result, or a block of their columns if rows are long. Each warp
has rows of its own and reads them 512 bytes at a time, with several 16-byte loads in flight per
thread. One load of the index tells a thread its rows, and no program waits for another.

`permute_places_kernel` makes the index itself, from the numbers of tokens.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.hopper.quantize_tile import tile_layout
from titan_fp8.kernels.launch import kernel
from titan_fp8.layouts import cdiv, power_of_two

WARPS = 4
COPY_LOADS = 8
"""16-byte loads per thread and tile in the kernel that copies."""
SUM_LOADS = 4
"""The same in the kernels that sum, for each of the rows that they combine."""
LOADS_ACROSS = 4
"""How many of these loads lie along one row, if it is long enough; the others read other rows."""


@gluon.jit
def load_rows(x, source, M, column, K, TILE: gl.constexpr):
    """Rows `source` of x (M, K) from `column` on; zeros where x has no such row."""
    j = column + gl.arange(0, TILE.shape[1], gl.SliceLayout(0, TILE))
    inside = ((source >= 0) & (source < M))[:, None] & (j < K)[None, :]
    return gl.load(x + (source.to(gl.int64)[:, None] * K + j[None, :]), mask=inside, other=0)


@gluon.jit
def _store_rows(out, values, i, valid, column, K, TILE: gl.constexpr):
    """Writes rows i of out (R, K) from `column` on, where `valid`."""
    j = column + gl.arange(0, TILE.shape[1], gl.SliceLayout(0, TILE))
    inside = valid[:, None] & (j < K)[None, :]
    gl.store(out + (i.to(gl.int64)[:, None] * K + j[None, :]), values, mask=inside)


@gluon.jit
def add_rows(total, y, source, weight, M, column, K, TILE: gl.constexpr):
    """total + rows `source` of y (M, K), times weight (rows,) if it is not None, in FP32."""
    values = load_rows(y, source, M, column, K, TILE).to(gl.float32)
    return total + (values if weight is None else values * weight[:, None])


# The kernels get K as `units` of UNIT elements, 16 bytes each, so that the compiler knows that rows
# start at multiples of 16 bytes.


@kernel(do_not_specialize=["M", "R"])
def permute_gather_kernel(
    x, slots, weight, out, M, R, units, blocks,
    SLOTS: gl.constexpr, UNIT: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """out[i] = x[slots[i] // SLOTS], times weight[slots[i]] if there are weights."""
    row = gl.program_id(0) // blocks * TILE.shape[0]
    column = gl.program_id(0) % blocks * TILE.shape[1]
    i = row + gl.arange(0, TILE.shape[0], gl.SliceLayout(1, TILE))
    slot = gl.load(slots + i, mask=i < R, other=-1)
    source = gl.where(slot < 0, -1, slot // SLOTS)
    values = load_rows(x, source, M, column, units * UNIT, TILE)
    if weight is not None:
        w = gl.load(weight + slot, mask=(source >= 0) & (source < M), other=0)
        values = (values.to(gl.float32) * w[:, None]).to(values.dtype)
    _store_rows(out, values, i, i < R, column, units * UNIT, TILE)


@kernel(do_not_specialize=["M", "T"])
def permute_combine_kernel(
    y, index, weight, out, M, T, units, blocks,
    TOP: gl.constexpr, UNIT: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """out[t] = the sum of y[index[t, k]] over k, times weight[t, k] if there are weights."""
    row = gl.program_id(0) // blocks * TILE.shape[0]
    column = gl.program_id(0) % blocks * TILE.shape[1]
    i = row + gl.arange(0, TILE.shape[0], gl.SliceLayout(1, TILE))
    total = gl.full(TILE.shape, 0.0, gl.float32, TILE)
    for k in gl.static_range(TOP):
        source = gl.load(index + (i * TOP + k), mask=i < T, other=-1)
        if weight is None:
            total = add_rows(total, y, source, None, M, column, units * UNIT, TILE)
        else:
            # A row that y does not have counts as zero, even if its weight is NaN.
            w = gl.load(weight + (i * TOP + k), mask=i < T, other=0)
            w = gl.where((source >= 0) & (source < M), w, 0)
            total = add_rows(total, y, source, w, M, column, units * UNIT, TILE)
    _store_rows(out, total.to(out.dtype.element_ty), i, i < T, column, units * UNIT, TILE)


@kernel(do_not_specialize=["M", "T"])
def permute_dot_kernel(
    a, b, index, out, M, T, units, TOP: gl.constexpr, UNIT: gl.constexpr, TILE: gl.constexpr
):
    """out[t, k] = the dot product of a[t] and b[index[t, k]]."""
    i = gl.program_id(0) * TILE.shape[0] + gl.arange(0, TILE.shape[0], gl.SliceLayout(1, TILE))
    K = units * UNIT
    source = gl.load(index + i, mask=i < T * TOP, other=-1)
    total = gl.full([TILE.shape[0]], 0.0, gl.float32, gl.SliceLayout(1, TILE))
    for column in range(0, K, TILE.shape[1]):
        j = column + gl.arange(0, TILE.shape[1], gl.SliceLayout(0, TILE))
        inside = (i < T * TOP)[:, None] & (j < K)[None, :]
        token = (i // TOP).to(gl.int64)[:, None]
        left = gl.load(a + (token * K + j[None, :]), mask=inside, other=0)
        right = load_rows(b, source, M, column, K, TILE)
        total += gl.sum(left.to(gl.float32) * right.to(gl.float32), 1)
    # Zero even where a holds NaN or Inf.
    total = gl.where((source >= 0) & (source < M), total, 0)
    gl.store(out + i, total, mask=i < T * TOP)


@functools.cache
def tiling(k: int, itemsize: int, loads: int) -> tuple[int, int, gl.DistributedLinearLayout]:
    """For rows of k elements: the units of a row, the elements of a unit, and the layout of a tile.

    A unit is what one load reads. Each thread loads `loads` units of a tile.
    """
    # Rows that do not start at multiples of 16 bytes are read element by element.
    unit = 16 // itemsize if k * itemsize % 16 == 0 else 1
    across = min(LOADS_ACROSS, power_of_two(cdiv(max(k, 1), 32 * unit)))
    return k // unit, unit, tile_layout((1, unit), (1, 32), (WARPS, 1), (loads // across, across))


def gather_rows(x: Tensor, slots: Tensor, weight: Tensor | None = None, k: int = 1) -> Tensor:
    """See `reference.gather_rows`."""
    (m, width), r = x.shape, slots.shape[0]
    out = x.new_empty(r, width)
    units, unit, tile = tiling(width, x.element_size(), COPY_LOADS)
    blocks = cdiv(width, tile.shape[1])
    if out.numel():
        permute_gather_kernel[(cdiv(r, tile.shape[0]) * blocks,)](
            x, slots, weight, out, m, r, units, blocks, k, unit, tile, num_warps=WARPS
        )
    return out


def combine_rows(y: Tensor, index: Tensor, weight: Tensor | None = None) -> Tensor:
    """See `reference.combine_rows`."""
    (m, k), (t, top) = y.shape, index.shape
    out = y.new_empty(t, k)
    units, unit, tile = tiling(k, y.element_size(), SUM_LOADS)
    blocks = cdiv(k, tile.shape[1])
    if out.numel():
        permute_combine_kernel[(cdiv(t, tile.shape[0]) * blocks,)](
            y, index, weight, out, m, t, units, blocks, top, unit, tile, num_warps=WARPS
        )
    return out


def dot_rows(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    """See `reference.dot_rows`."""
    t, top = index.shape
    out = a.new_empty(t, top, dtype=torch.float32)
    units, unit, tile = tiling(a.shape[1], a.element_size(), SUM_LOADS)
    if out.numel():
        permute_dot_kernel[(cdiv(out.numel(), tile.shape[0]),)](
            a, b, index, out, b.shape[0], t, units, top, unit, tile, num_warps=WARPS
        )
    return out


LANES = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS], [0]))
COUNTS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0]))
"""Layout of the counts (ranks, experts)."""
CHUNK = gl.constexpr(1024)
"""Elements that a program writes at a time."""


@gluon.jit
def _fill(out, first, count, value, STEP: gl.constexpr):
    """out[first + i] = value + STEP · i for i < count."""
    for begin in range(0, count, CHUNK):
        i = begin + gl.arange(0, CHUNK, LANES)
        gl.store(out + first + i, value + STEP * i, mask=i < count)


@kernel(do_not_specialize=["experts", "ranks", "length", "alignment"])
def permute_places_kernel(
    counts, tokens, places, sizes, experts, ranks, length, alignment,
    RANKS: gl.constexpr, EXPERTS: gl.constexpr,
):  # fmt: skip
    """Writes the index of the tokens from one rank for one expert.

    The program of the last rank also writes the padding of its expert, and that of rank 0 its size.
    Every program reads all counts and sums those before its own, so none waits for another.
    """
    part = gl.program_id(0)
    rank = part // experts
    expert = part % experts
    r = gl.arange(0, RANKS, gl.SliceLayout(1, COUNTS))[:, None]
    e = gl.arange(0, EXPERTS, gl.SliceLayout(0, COUNTS))[None, :]
    index = r * experts + e
    count = gl.load(counts + index, mask=(r < ranks) & (e < experts), other=0).to(gl.int32)
    # This program's first token and number of tokens, and the tokens from lower ranks for its
    # expert, whose places come first.
    token = gl.sum(gl.sum(gl.where(index < part, count, 0), 0), 0)
    mine = gl.sum(gl.sum(gl.where((r == rank) & (e == expert), count, 0), 0), 0)
    ahead = gl.sum(gl.sum(gl.where((r < rank) & (e == expert), count, 0), 0), 0)

    # An expert without tokens gets one block of padding, as in torchtitan.
    size = gl.maximum(gl.cdiv(gl.sum(count, 0), alignment), 1) * alignment
    of = gl.arange(0, EXPERTS, gl.SliceLayout(0, COUNTS))
    begin = gl.sum(gl.where(of < expert, size, 0), 0)
    size = gl.sum(gl.where(of == expert, size, 0), 0)
    place = begin + ahead
    _fill(tokens, place, mine, token, 1)
    _fill(places, token, mine, place, 1)
    if rank == 0:
        gl.store(sizes + expert, size)
    if rank == ranks - 1:
        # The last expert's padding extends to the end of the output.
        place += mine
        end = gl.where(expert == experts - 1, length, begin + size)
        _fill(tokens, place, end - place, -1, 0)


def places_of_tokens(
    counts: Tensor, experts: int, ranks: int, tokens: int, length: int, alignment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.places_of_tokens`."""
    of_place, of_token, sizes = (
        counts.new_empty(n, dtype=torch.int32) for n in (length, tokens, experts)
    )
    permute_places_kernel[(ranks * experts,)](
        counts, of_place, of_token, sizes, experts, ranks, length, alignment,
        power_of_two(ranks), power_of_two(experts), num_warps=WARPS,
    )  # fmt: skip
    return of_place, of_token, sizes
