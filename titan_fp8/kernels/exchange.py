"""The kernels that exchange tokens between GPUs of one host that write to each other's memory.

Every rank has the same buffers at the same offsets in its symmetric memory (`exchange.py`). A
kernel gets its own rank's buffers and `deltas` (ranks,), the distance in units of 16 bytes from
there to the memory of each rank. So an address on another GPU is plain arithmetic, and the compiler
knows that it is a multiple of 16.

    barrier    tells all ranks that this one is here, and waits for them; may carry the counts
    places     where the copies of this rank go, and the group ends of what arrives
    send       each token once to every rank that has one of its experts
    expand     what has arrived to expert order, padded
    weigh      the same of gradients, times their scores; and the scores' own gradients
    deliver    each row from expert order back to its token's owner

One kernel ends before the next begins, so the release of a barrier covers what earlier kernels have
written to other GPUs, and what later kernels read comes after its acquire. A barrier that waits
longer than `timeout` writes the rank it has waited for to `failure`, in the CPU's memory, and ends
the program by a trap: no kernel after it runs, so nothing wrong is used. So does `places` if a rank
would get more rows than fit.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.launch import kernel
from titan_fp8.kernels.permute import (
    COPY_LOADS,
    COUNTS,
    SUM_LOADS,
    WARPS,
    _load_rows,
    _store_rows,
    _tiling,
)
from titan_fp8.layouts import BLOCK, cdiv

MAX_RANKS = 32
FLAG_STRIDE = gl.constexpr(32)
"""int32 words between flags, so that no two of them share a line of memory."""
EPOCH = gl.constexpr(MAX_RANKS * FLAG_STRIDE.value)
"""The index of the number of barriers so far, after the flags."""
FLAG_WORDS = (MAX_RANKS + 1) * FLAG_STRIDE.value
TIMED_OUT = gl.constexpr(1 << 8)
OVERFLOWED = gl.constexpr(2 << 8)
"""`failure[0]` is one of these plus a rank; the second comes with the rows needed in failure[1]."""
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
FOUR_WARPS = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS], [0]))
SCALES = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0]))
"""Layout of the scales of a tile's rows (rows, blocks)."""

_SIGNAL = gl.constexpr("st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0;")
# Labels are local to the braces.
_WAIT = gl.constexpr(
    """{
    .reg .pred here, early;
    .reg .b32 seen;
    .reg .b64 start, now;
    mov.u64 start, %globaltimer;
    LOOK:
    ld.acquire.sys.global.u32 seen, [$1];
    sub.s32 seen, seen, $2;
    setp.ge.s32 here, seen, 0;
    @here bra DONE;
    mov.u64 now, %globaltimer;
    sub.u64 now, now, start;
    setp.lt.u64 early, now, $3;
    @early bra LOOK;
    st.volatile.global.u32 [$4], $5;
    membar.sys;
    trap;
    DONE:
    mov.u32 $0, 0;
    }"""
)
_FAIL_ABOVE = gl.constexpr(
    """{
    .reg .pred over;
    setp.gt.s32 over, $1, $2;
    @over st.volatile.global.u32 [$3+4], $1;
    @over st.volatile.global.u32 [$3], $4;
    @over membar.sys;
    @over trap;
    mov.u32 $0, 0;
    }"""
)
_sync = getattr(gl, "barrier", None) or gl.thread_barrier
"""The name since Triton 3.7, or that of 3.6."""


@gluon.jit
def _sum(a, b):
    return a + b


@kernel(do_not_specialize=["rank", "ranks", "experts", "timeout"])
def exchange_barrier_kernel(
    flags, deltas, failure, counts, table, rank, ranks, experts, timeout, EXPERTS: gl.constexpr
):
    """Waits until all ranks have come to this barrier, for `timeout` ns at most.

    counts (experts,): first written to row `rank` of every rank's table (ranks, experts); or None.
    """
    p = gl.arange(0, 32, LANES)
    if counts is not None:
        e = gl.arange(0, EXPERTS, LANES)
        count = gl.load(counts + e, mask=e < experts, other=0).to(gl.int32)
        for peer in range(0, ranks):
            row = table + (gl.load(deltas + peer) * 4 + rank * experts)
            gl.store(row + e, count, mask=e < experts)
    epoch = gl.load(flags + EPOCH) + 1
    _sync()
    gl.store(flags + EPOCH, epoch)
    epochs = gl.full([32], 0, gl.int32, LANES) + epoch
    # Lanes without a rank signal to, and wait for, this one.
    peer = gl.where(p < ranks, p, rank)
    to = flags + (gl.load(deltas + peer) * 4 + rank * FLAG_STRIDE)
    gl.inline_asm_elementwise(
        _SIGNAL, "=r,l,r,~{memory}", [to.to(gl.int64), epochs],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    own = (flags + peer * FLAG_STRIDE).to(gl.int64)
    limit = gl.full([32], 0, gl.int64, LANES) + timeout
    report = (failure + p * 0).to(gl.int64)
    gl.inline_asm_elementwise(
        _WAIT, "=r,l,r,l,l,r,~{memory}", [own, epochs, limit, report, peer + TIMED_OUT],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@kernel(do_not_specialize=["rank", "ranks", "local", "alignment", "capacity"])
def exchange_places_kernel(
    table, offset, sizes, ends, filled, failure, rank, ranks, local, alignment, capacity,
    RANKS: gl.constexpr, LOCAL: gl.constexpr, EXPERTS: gl.constexpr,
):  # fmt: skip
    """Of the `local` experts of one rank: what to add to a copy's index to get its place there.

    table (ranks, experts): the copies from each rank for each expert. Copies are sorted by expert.
    The program of this rank also writes the padded sizes of its groups, their ends, and where their
    padding begins.
    """
    owner = gl.program_id(0)
    experts = ranks * local
    r = gl.arange(0, RANKS, gl.SliceLayout(1, COUNTS))[:, None]
    column = gl.arange(0, LOCAL, gl.SliceLayout(0, COUNTS))[None, :]
    inside = (r < ranks) & (column < local)
    count = gl.load(table + (r * experts + owner * local + column), mask=inside, other=0)
    # Sums along one dimension, in a layout that can be scanned.
    e = gl.arange(0, LOCAL, FOUR_WARPS)
    total = gl.convert_layout(gl.sum(count, 0), FOUR_WARPS)
    ahead = gl.convert_layout(gl.sum(gl.where(r < rank, count, 0), 0), FOUR_WARPS)
    mine = gl.convert_layout(gl.sum(gl.where(r == rank, count, 0), 0), FOUR_WARPS)
    # An expert without tokens gets one block of padding, as in torchtitan.
    size = gl.maximum(gl.cdiv(total, alignment), 1) * alignment
    size = gl.where(e < local, size, 0)
    end = gl.associative_scan(size, 0, _sum)
    every = gl.arange(0, EXPERTS, FOUR_WARPS)
    row = gl.load(table + (rank * experts + every), mask=every < owner * local, other=0)
    first = gl.sum(row, 0) + gl.associative_scan(mine, 0, _sum) - mine
    gl.store(offset + owner * local + e, end - size + ahead - first, mask=e < local)
    if owner == rank:
        gl.store(sizes + e, size, mask=e < local)
        gl.store(ends + e, end, mask=e < local)
        gl.store(filled + e, end - size + total, mask=e < local)
    lanes = gl.arange(0, 32, FOUR_WARPS) * 0
    gl.inline_asm_elementwise(
        _FAIL_ABOVE, "=r,r,r,l,r,~{memory}",
        [lanes + gl.sum(size, 0), lanes + capacity, (failure + lanes).to(gl.int64),
         lanes + (OVERFLOWED + owner)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@kernel(do_not_specialize=["T", "rank", "ranks", "local", "tokens", "tiles", "S"])
def exchange_send_kernel(
    x, scales, weight, index, chosen, offset, deltas, ends, filled,
    out, out_scales, out_weight, origin,
    T, rank, ranks, local, tokens, tiles, units, blocks, S, sections,
    TOP: gl.constexpr, UNIT: gl.constexpr, SECTIONS: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Sends row t of x (T, K) to row rank · tokens + t of `out` of each rank with its experts.

    index (T, TOP): where a copy is among this rank's, sorted by expert; -1 if it has none. chosen
    (T, TOP): its expert. Its place there is the sum of index and offset[expert].

    scales (T, sections), of rows in FP8, arrive as rows, too. At the place of a copy arrive its
    weight (T, TOP) and its origin, copy · ranks + rank. The last programs write both for the
    padding of this rank's own groups: 0 and -1.
    """
    K = units * UNIT
    column = gl.program_id(0) % blocks * TILE.shape[1]
    tile = gl.program_id(0) // blocks
    i = gl.arange(0, TILE.shape[0], gl.SliceLayout(1, TILE))
    if tile < tiles:
        t = tile * TILE.shape[0] + i
        values = _load_rows(x, t, T, column, K, TILE)
        targets = i * 0
        for k in gl.static_range(TOP):
            copy = gl.load(index + (t * TOP + k), mask=t < T, other=-1).to(gl.int32)
            expert = gl.load(chosen + (t * TOP + k), mask=copy >= 0, other=0).to(gl.int32)
            owner = expert // local
            targets |= gl.where(copy >= 0, 1 << owner, 0)
            # 4-byte words of what comes with a copy; once, not for each block of columns.
            first = (copy >= 0) & (column == 0)
            word = gl.load(deltas + owner) * 4 + copy + gl.load(offset + expert)
            if origin is not None:
                gl.store(origin + word, (t * TOP + k) * ranks + rank, mask=first)
            if weight is not None:
                w = gl.load(weight + (t * TOP + k), mask=first, other=0)
                gl.store(out_weight + word, w, mask=first)
        j = column + gl.arange(0, TILE.shape[1], gl.SliceLayout(0, TILE))
        row = (rank * tokens + t).to(gl.int64)
        for owner in range(0, ranks):
            needs = (targets >> owner) & 1 != 0
            to = out + gl.load(deltas + owner) * UNIT
            gl.store(
                to + (row[:, None] * K + j[None, :]), values,
                mask=needs[:, None] & (j < K)[None, :],
            )  # fmt: skip
        if SECTIONS > 0:
            targets = gl.convert_layout(targets, gl.SliceLayout(1, SCALES))
            t_s = tile * TILE.shape[0] + gl.arange(0, TILE.shape[0], gl.SliceLayout(1, SCALES))
            j_s = gl.arange(0, SECTIONS, gl.SliceLayout(0, SCALES))[None, :]
            inside = (t_s < T)[:, None] & (j_s < sections) & (column == 0)
            s = gl.load(scales + (j_s.to(gl.int64) * S + t_s[:, None]), mask=inside)
            row_s = (rank * tokens + t_s).to(gl.int64)[:, None] * sections
            for owner in range(0, ranks):
                needs = ((targets >> owner) & 1 != 0)[:, None] & inside
                to_s = out_scales + gl.load(deltas + owner) * 4
                gl.store(to_s + (row_s + j_s), s, mask=needs)
    else:
        group = tile - tiles
        end = gl.load(ends + group)
        if column == 0:
            for place in range(gl.load(filled + group), end, TILE.shape[0]):
                if origin is not None:
                    gl.store(origin + (place + i), -1, mask=place + i < end)
                if weight is not None:
                    gl.store(out_weight + (place + i), 0.0, mask=place + i < end)


@gluon.jit
def _origins(origin, ends, row, local, ranks, TILE: gl.constexpr):
    """The rank and the copy that each row of a tile belongs to; -1 for padding."""
    i = row + gl.arange(0, TILE.shape[0], gl.SliceLayout(1, TILE))
    end = gl.load(ends + local - 1)
    source = gl.load(origin + i, mask=i < end, other=-1)
    copy = gl.where(source >= 0, source // ranks, -1)
    return gl.where(source >= 0, source % ranks, 0), copy


@kernel(do_not_specialize=["C", "ranks", "local"])
def exchange_deliver_kernel(
    y, origin, ends, deltas, out, C, ranks, local, units, blocks,
    UNIT: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Sends row r of y (C, K) to row `copy` of its owner's `out`, as origin[r] says."""
    row = gl.program_id(0) // blocks * TILE.shape[0]
    column = gl.program_id(0) % blocks * TILE.shape[1]
    if row < gl.load(ends + local - 1):
        K = units * UNIT
        owner, copy = _origins(origin, ends, row, local, ranks, TILE)
        i = row + gl.arange(0, TILE.shape[0], gl.SliceLayout(1, TILE))
        values = _load_rows(y, gl.where(copy >= 0, i, -1), C, column, K, TILE)
        j = column + gl.arange(0, TILE.shape[1], gl.SliceLayout(0, TILE))
        to = (gl.load(deltas + owner) * UNIT)[:, None] + (
            copy.to(gl.int64)[:, None] * K + j[None, :]
        )
        gl.store(out + to, values, mask=(copy >= 0)[:, None] & (j < K)[None, :])


@kernel(do_not_specialize=["rows", "ranks", "local", "tokens"])
def exchange_expand_kernel(
    x, weight, origin, ends, out, rows, ranks, local, tokens, units, blocks,
    TOP: gl.constexpr, UNIT: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Copies what has arrived, x (rows, K), to the places of its copies, times weight or not.

    Padding becomes zeros. What lies past the last group is left alone.
    """
    place = gl.program_id(0) // blocks * TILE.shape[0]
    column = gl.program_id(0) % blocks * TILE.shape[1]
    end = gl.load(ends + local - 1)
    if place < end:
        owner, copy = _origins(origin, ends, place, local, ranks, TILE)
        source = gl.where(copy >= 0, owner * tokens + copy // TOP, -1)
        values = _load_rows(x, source, rows, column, units * UNIT, TILE)
        i = place + gl.arange(0, TILE.shape[0], gl.SliceLayout(1, TILE))
        if weight is not None:
            w = gl.load(weight + i, mask=copy >= 0, other=0)
            values = (values.to(gl.float32) * w[:, None]).to(values.dtype)
        _store_rows(out, values, i, i < end, column, units * UNIT, TILE)


@kernel(do_not_specialize=["C", "rows", "ranks", "local", "tokens", "sections"])
def exchange_weigh_kernel(
    g, scales, y, weight, origin, ends, deltas, out, dots,
    C, rows, ranks, local, tokens, units, sections,
    TOP: gl.constexpr, UNIT: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Sends the dot product of each copy's g (rows, K) and y (C, K) to its owner; out = weight · g.

    scales (rows, sections), if g is in FP8; out may be None. Padding becomes zeros in it. What lies
    past the last group is left alone.
    """
    place = gl.program_id(0) * TILE.shape[0]
    end = gl.load(ends + local - 1)
    if place < end:
        K = units * UNIT
        owner, copy = _origins(origin, ends, place, local, ranks, TILE)
        source = gl.where(copy >= 0, owner * tokens + copy // TOP, -1)
        i = place + gl.arange(0, TILE.shape[0], gl.SliceLayout(1, TILE))
        j = gl.arange(0, TILE.shape[1], gl.SliceLayout(0, TILE))
        w = gl.load(weight + i, mask=copy >= 0, other=0)
        total = gl.full([TILE.shape[0]], 0.0, gl.float32, gl.SliceLayout(1, TILE))
        for column in range(0, K, TILE.shape[1]):
            left = _load_rows(g, source, rows, column, K, TILE)
            if scales is None:
                left = left.to(gl.float32)
            else:
                inside = (copy >= 0)[:, None] & (column + j < K)[None, :]
                at = (source.to(gl.int64) * sections)[:, None] + ((column + j) // 128)[None, :]
                s = gl.load(scales + at, mask=inside, other=0)
                left = left.to(gl.float8e4nv, bitcast=True).to(gl.float32) * s
            right = _load_rows(y, gl.where(copy >= 0, i, -1), C, column, K, TILE).to(gl.float32)
            total += gl.sum(left * right, 1)
            if out is not None:
                weighted = (left * w[:, None]).to(out.dtype.element_ty)
                _store_rows(out, weighted, i, i < end, column, K, TILE)
        gl.store(dots + (gl.load(deltas + owner) * 4 + copy), total, mask=copy >= 0)


def barrier(
    flags: Tensor, deltas: Tensor, failure: Tensor, rank: int, timeout_ns: int,
    counts: Tensor | None = None, table: Tensor | None = None,
) -> None:  # fmt: skip
    """Waits for all ranks, on the GPU; with `counts` (experts,) also exchanges them.

    Args:
        flags: (FLAG_WORDS,) int32, symmetric, zero at first.
        deltas: (ranks,) int64. failure: (2,) int32, pinned.
        table: (ranks, experts) int32, symmetric, which gets the counts of all ranks.
    """
    experts = 0 if counts is None else len(counts)
    exchange_barrier_kernel[(1,)](
        flags, deltas, failure, counts, table, rank, len(deltas), experts, timeout_ns,
        triton.next_power_of_2(max(experts, 32)), num_warps=1,
    )  # fmt: skip


def places(
    table: Tensor, failure: Tensor, rank: int, alignment: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From table (ranks, experts): offset (experts,); sizes, ends and filled (local,). All int32.

    offset: what to add to the index of a copy, sorted by expert, to get its place at its receiver.
    """
    ranks, experts = table.shape
    local = experts // ranks
    offset = table.new_empty(experts)
    sizes, ends, filled = table.new_empty(3, local)
    exchange_places_kernel[(ranks,)](
        table, offset, sizes, ends, filled, failure, rank, ranks, local, alignment, capacity,
        triton.next_power_of_2(ranks), triton.next_power_of_2(max(local, 32)),
        triton.next_power_of_2(max(experts, 32)), num_warps=WARPS,
    )  # fmt: skip
    return offset, sizes, ends, filled


def send(
    x: Tensor, index: Tensor, chosen: Tensor, offset: Tensor, ends: Tensor, filled: Tensor,
    deltas: Tensor, rank: int, out: Tensor, origin: Tensor | None = None,
    weight: Tensor | None = None, out_weight: Tensor | None = None,
    scales: Tensor | None = None, out_scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Sends each row of x (T, K) to the ranks of its experts: to `out` (ranks · tokens, K) there.

    Args:
        index, chosen: (T, k) integers, as in `exchange_send_kernel`.
        weight: (T, k) FP32, or None.
        scales: (T, sections) FP32 of rows in FP8, laid out as 1x128 scales; or None.
        out, origin, out_weight, out_scales: symmetric.
    """
    (t, k), top = x.shape, index.shape[1]
    units, unit, tile = _tiling(k, x.element_size(), COPY_LOADS)
    if unit == 1:
        raise ValueError(f"rows of {k} {x.dtype} cannot be exchanged: allowed are multiples of 16")
    blocks, tiles, local = cdiv(k, tile.shape[1]), cdiv(t, tile.shape[0]), len(ends)
    sections = 0 if scales is None else scales.shape[1]
    exchange_send_kernel[((tiles + local) * blocks,)](
        x, scales, weight, index, chosen, offset, deltas, ends, filled,
        out, out_scales, out_weight, origin,
        t, rank, len(deltas), local, len(out) // len(deltas), tiles, units, blocks,
        0 if scales is None else scales.stride(1), sections,
        top, unit, sections and triton.next_power_of_2(sections), tile, num_warps=WARPS,
    )  # fmt: skip


def deliver(y: Tensor, origin: Tensor, ends: Tensor, deltas: Tensor, out: Tensor) -> None:
    """Sends each row of y (capacity, K) to its copy's row of its owner's `out`, symmetric."""
    c, k = y.shape
    units, unit, tile = _tiling(k, y.element_size(), COPY_LOADS)
    blocks = cdiv(k, tile.shape[1])
    exchange_deliver_kernel[(cdiv(c, tile.shape[0]) * blocks,)](
        y, origin, ends, deltas, out, c, len(deltas), len(ends), units, blocks, unit, tile,
        num_warps=WARPS,
    )  # fmt: skip


def expand(
    x: Tensor, origin: Tensor, ends: Tensor, ranks: int, top: int, weight: Tensor | None = None
) -> Tensor:
    """Rows in expert order (capacity, K), of what `send` has brought, x (ranks · tokens, K).

    weight (capacity,) FP32 multiplies them. What lies past the last group is not written.
    """
    (rows, k), c = x.shape, len(origin)
    out = x.new_empty(c, k)
    units, unit, tile = _tiling(k, x.element_size(), COPY_LOADS)
    blocks = cdiv(k, tile.shape[1])
    exchange_expand_kernel[(cdiv(c, tile.shape[0]) * blocks,)](
        x, weight, origin, ends, out, rows, ranks, len(ends), rows // ranks, units, blocks,
        top, unit, tile, num_warps=WARPS,
    )  # fmt: skip
    return out


def weigh(
    g: Tensor, y: Tensor, weight: Tensor, origin: Tensor, ends: Tensor, deltas: Tensor, top: int,
    dots: Tensor, scales: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Sends g · y of each copy to its owner's `dots`; returns weight · g (capacity, K).

    g (ranks · tokens, K) is what `send` has brought, y (capacity, K), weight (capacity,) FP32. With
    the scales (ranks · tokens, sections) of a g in FP8, as int8, it returns None.
    """
    (c, k), ranks = y.shape, len(deltas)
    out = torch.empty_like(y) if scales is None else None
    units, unit, tile = _tiling(k, y.element_size(), SUM_LOADS)
    exchange_weigh_kernel[(cdiv(c, tile.shape[0]),)](
        g, scales, y, weight, origin, ends, deltas, out, dots, c, len(g), ranks, len(ends),
        len(g) // ranks, units, cdiv(k, BLOCK), top, unit, tile, num_warps=WARPS,
    )  # fmt: skip
    return out
