"""The kernels that exchange tokens between GPUs of one host that write to each other's memory.

`host/peer_exchange.py` launches them. Every rank has the same buffers at the same offsets in its
symmetric memory. A kernel gets its own rank's buffers and `deltas` (ranks,), the distance in units
of 16 bytes from there to the memory of each rank. So an address on another GPU is plain arithmetic,
and the compiler knows that it is a multiple of 16.

    barrier    tells all ranks that this one is here, and waits for them; may carry the counts
    places     where the copies of this rank go, and the group ends of what arrives
    send       each token once to every rank that has one of its experts
    deliver    a token's rows on this rank back to its owner; or their sum, and 4 bytes of each

A slot is a copy of a token: slot (rank · tokens + t) · k + i is choice i of token t of that rank,
which has room for so many `tokens`. Rows arrive at row rank · tokens + t, so ⌊slot / k⌋ is the row
of a slot's token. The place of a slot is its row in expert order. A row returns to row t · k + i of
its owner. So does a sum, for the first choice i that is on this rank.

Tokens in FP8 come with scales, and sums of rows return. Those in high precision return unsummed.

One kernel ends before the next begins, so the release of a barrier covers what earlier kernels have
written to other GPUs, and what later kernels read comes after its acquire. A barrier that waits
longer than `timeout` writes the rank it has waited for to `failure`, in the CPU's memory, and ends
the program by a trap: no kernel after it runs, so nothing wrong is used. So does `places` if a rank
would get more rows than fit.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.launch import kernel
from titan_fp8.kernels.permute import (
    COPY_LOADS,
    COUNTS,
    SUM_LOADS,
    WARPS,
    add_rows,
    load_rows,
    tiling,
)
from titan_fp8.layouts import cdiv, power_of_two

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
    table, offset, ends, filled, failure, rank, ranks, local, alignment, capacity,
    RANKS: gl.constexpr, LOCAL: gl.constexpr, EXPERTS: gl.constexpr,
):  # fmt: skip
    """Of the `local` experts of one rank: what to add to a copy's index to get its place there.

    table (ranks, experts): the copies from each rank for each expert. Copies are sorted by expert.
    The program of this rank also writes the ends of its groups, and where their padding begins.
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
        gl.store(ends + e, end, mask=e < local)
        gl.store(filled + e, end - size + total, mask=e < local)
    lanes = gl.arange(0, 32, FOUR_WARPS) * 0
    gl.inline_asm_elementwise(
        _FAIL_ABOVE, "=r,r,r,l,r,~{memory}",
        [lanes + gl.sum(size, 0), lanes + capacity, (failure + lanes).to(gl.int64),
         lanes + (OVERFLOWED + owner)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _send_copies(
    weight, index, chosen, offset, deltas, out_weight, slots, places, rows,
    t, T, rank, local, tokens, here, SUMS: gl.constexpr, TOP: gl.constexpr,
):  # fmt: skip
    """Sends what is small of the copies of tokens t, if `here`, and returns the ranks they go to.

    Those are the bits of a mask. Arguments as in `exchange_send_kernel`; SUMS: rows are for sums.
    """
    targets = t * 0
    for k in gl.static_range(TOP):
        copy = gl.load(index + (t * TOP + k), mask=t < T, other=-1).to(gl.int32)
        expert = gl.load(chosen + (t * TOP + k), mask=copy >= 0, other=0).to(gl.int32)
        owner = expert // local
        returns = copy >= 0
        if SUMS:
            returns &= (targets >> owner) & 1 == 0
        gl.store(rows + (t * TOP + k), gl.where(returns, t * TOP + k, -1), mask=here & (t < T))
        targets |= gl.where(copy >= 0, 1 << owner, 0)
        # 4-byte words of what comes with a copy.
        sent = (copy >= 0) & here
        delta = gl.load(deltas + owner) * 4
        slot = (rank * tokens + t) * TOP + k
        place = copy + gl.load(offset + expert)
        gl.store(slots + (delta + place), slot, mask=sent)
        gl.store(places + (delta + slot), place, mask=sent)
        if weight is not None:
            w = gl.load(weight + (t * TOP + k), mask=sent, other=0)
            to_w = out_weight + delta
            gl.store(to_w + (place if SUMS else slot), w, mask=sent)
    return targets


@gluon.jit
def _send_scales(
    scales, out_scales, targets, deltas, first, T, rank, ranks, tokens, S, sections, here,
    SECTIONS: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Sends the scales of the tokens of a tile, from `first` on, to the ranks in `targets`."""
    targets = gl.convert_layout(targets, gl.SliceLayout(1, SCALES))
    t = first + gl.arange(0, TILE.shape[0], gl.SliceLayout(1, SCALES))
    j = gl.arange(0, SECTIONS, gl.SliceLayout(0, SCALES))[None, :]
    inside = (t < T)[:, None] & (j < sections) & here
    s = gl.load(scales + (j.to(gl.int64) * S + t[:, None]), mask=inside)
    row = (rank * tokens + t).to(gl.int64)[:, None] * sections
    for owner in range(0, ranks):
        needs = ((targets >> owner) & 1 != 0)[:, None] & inside
        to = out_scales + gl.load(deltas + owner) * 4
        gl.store(to + (row + j), s, mask=needs)


@kernel(do_not_specialize=["T", "rank", "ranks", "local", "tokens", "tiles", "S"])
def exchange_send_kernel(
    x, scales, weight, index, chosen, offset, deltas, ends, filled,
    out, out_scales, out_weight, slots, places, rows,
    T, rank, ranks, local, tokens, tiles, units, blocks, S, sections,
    TOP: gl.constexpr, UNIT: gl.constexpr, SECTIONS: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Sends row t of x (T, K) and of scales (T, sections) or None to each rank with its experts.

    index (T, TOP): where a copy is among this rank's, sorted by expert; -1 if it has none. chosen
    (T, TOP): its expert. Its place there is the sum of index and offset[expert]. At the place
    arrives its slot, and at its slot of `places` its place. Its weight (T, TOP), if not None,
    arrives at its place, or without scales at its slot. The last programs write the slots of the
    padding of this rank's own groups: -1.

    rows (T, TOP): where sums return on this rank, -1 if a choice is not the first for its rank.
    Without scales, where rows return, -1 for a choice without a copy.
    """
    K = units * UNIT
    column = gl.program_id(0) % blocks * TILE.shape[1]
    tile = gl.program_id(0) // blocks
    i = gl.arange(0, TILE.shape[0], gl.SliceLayout(1, TILE))
    if tile < tiles:
        t = tile * TILE.shape[0] + i
        values = load_rows(x, t, T, column, K, TILE)
        here = column == 0  # What is small is sent once, not for each block of columns.
        targets = _send_copies(
            weight, index, chosen, offset, deltas, out_weight, slots, places, rows,
            t, T, rank, local, tokens, here, scales is not None, TOP,
        )  # fmt: skip
        j = column + gl.arange(0, TILE.shape[1], gl.SliceLayout(0, TILE))
        row = (rank * tokens + t).to(gl.int64)
        for owner in range(0, ranks):
            needs = (targets >> owner) & 1 != 0
            to = out + gl.load(deltas + owner) * UNIT
            gl.store(
                to + (row[:, None] * K + j[None, :]), values,
                mask=needs[:, None] & (j < K)[None, :],
            )  # fmt: skip
        if scales is not None:
            _send_scales(
                scales, out_scales, targets, deltas, tile * TILE.shape[0],
                T, rank, ranks, tokens, S, sections, here, SECTIONS, TILE,
            )  # fmt: skip
    else:
        group = tile - tiles
        end = gl.load(ends + group)
        if column == 0:
            for place in range(gl.load(filled + group), end, TILE.shape[0]):
                gl.store(slots + (place + i), -1, mask=place + i < end)


@gluon.jit
def _send_words(words, slots, deltas, out, end, copies):
    """Sends words[row] to the copy of row, at its owner, for all rows to `end`: some per program.

    copies: the slots of a rank.
    """
    STEP: gl.constexpr = 32 * gl.num_warps()
    for begin in range(gl.program_id(0) * STEP, end, gl.num_programs(0) * STEP):
        row = begin + gl.arange(0, STEP, FOUR_WARPS)
        slot = gl.load(slots + row, mask=row < end, other=-1)
        real = slot >= 0
        word = gl.load(words + row, mask=real, other=0)
        delta = gl.load(deltas + slot // copies, mask=real, other=0)
        gl.store(out + (delta * 4 + slot % copies), word, mask=real)


@kernel(do_not_specialize=["C", "local", "tokens", "ranks"])
def exchange_deliver_kernel(
    y, weight, dscores, slots, places, ends, deltas, out, out_dscores,
    C, local, tokens, ranks, units, blocks,
    TOP: gl.constexpr, UNIT: gl.constexpr, TILE: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Sends the rows of y (C, K) for each token, or their SUMS times weight (C,); dscores (C,).

    weight, dscores: or None. `places` may hold what earlier batches have left.
    """
    column = gl.program_id(0) % blocks * TILE.shape[1]
    tile = gl.program_id(0) // blocks
    owner = tile % ranks  # Neighboring programs write to different ranks.
    t = tile // ranks * TILE.shape[0] + gl.arange(0, TILE.shape[0], gl.SliceLayout(1, TILE))
    end = gl.load(ends + local - 1)
    delta = gl.load(deltas + owner)
    if dscores is not None:
        _send_words(dscores, slots, deltas, out_dscores, end, tokens * TOP)
    K = units * UNIT
    j = column + gl.arange(0, TILE.shape[1], gl.SliceLayout(0, TILE))[None, :]
    out += delta * UNIT
    total = gl.full(TILE.shape, 0.0, gl.float32, TILE)
    row = t * 0 - 1
    for k in gl.static_range(TOP):
        copy = t * TOP + k
        slot = owner * tokens * TOP + copy
        place = gl.load(places + slot, mask=t < tokens, other=-1)
        inside = (place >= 0) & (place < end)
        there = inside & (gl.load(slots + place, mask=inside, other=-1) == slot)
        source = gl.where(there, place, -1)
        if not SUMS:
            values = load_rows(y, source, C, column, K, TILE)
            to = out + (copy.to(gl.int64)[:, None] * K + j)
            gl.store(to, values, mask=there[:, None] & (j < K))
        elif weight is None:
            total = add_rows(total, y, source, None, C, column, K, TILE)
        else:
            w = gl.load(weight + place, mask=there, other=0)
            total = add_rows(total, y, source, w, C, column, K, TILE)
        row = gl.where(there & (row < 0), copy, row)
    if SUMS:
        to = out + (row.to(gl.int64)[:, None] * K + j)
        gl.store(to, total.to(out.dtype.element_ty), mask=(row >= 0)[:, None] & (j < K))


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
        power_of_two(max(experts, 32)), num_warps=1,
    )  # fmt: skip


def places(
    table: Tensor, failure: Tensor, rank: int, alignment: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """From table (ranks, experts): offset (experts,); ends and filled (local,). All int32.

    offset: what to add to the index of a copy, sorted by expert, to get its place at its receiver.
    """
    ranks, experts = table.shape
    local = experts // ranks
    offset, ends, filled = (table.new_empty(n) for n in (experts, local, local))
    exchange_places_kernel[(ranks,)](
        table, offset, ends, filled, failure, rank, ranks, local, alignment, capacity,
        power_of_two(ranks), power_of_two(max(local, 32)),
        power_of_two(max(experts, 32)), num_warps=WARPS,
    )  # fmt: skip
    return offset, ends, filled


def send(
    q: Tensor, scales: Tensor | None, weight: Tensor | None, index: Tensor, chosen: Tensor,
    offset: Tensor, ends: Tensor, filled: Tensor, deltas: Tensor, rank: int, out: Tensor,
    out_scales: Tensor | None, out_weight: Tensor, slots: Tensor, places: Tensor, rows: Tensor,
) -> None:  # fmt: skip
    """Sends each row of q (T, K) to the ranks of its experts: to `out` (ranks · tokens, K).

    Args:
        scales: (T, sections) FP32, laid out as 1x128 scales, if q is FP8; else None.
        weight: (T, k) FP32, or None.
        index, chosen: (T, k) integers, as in `exchange_send_kernel`.
        offset, ends, filled: what `places` has returned.
        out, out_scales (ranks · tokens, sections), slots (capacity,), places (ranks · tokens, k),
            out_weight, of the shape of slots with scales, otherwise of places: symmetric.
        rows: (T, k) int32, which gets the rows of what returns.
    """
    (t, k), top = q.shape, index.shape[1]
    stride, sections = (1, 1) if scales is None else (scales.stride(1), scales.shape[1])
    units, unit, tile = tiling(k, q.element_size(), COPY_LOADS)
    x, to = (q, out) if scales is None else ((q, torch.int8), (out, torch.int8))
    blocks, tiles, local = cdiv(k, tile.shape[1]), cdiv(t, tile.shape[0]), len(ends)
    exchange_send_kernel[((tiles + local) * blocks,)](
        x, scales, weight, index, chosen, offset, deltas, ends, filled,
        to, out_scales, out_weight, slots, places, rows,
        t, rank, len(deltas), local, len(out) // len(deltas), tiles, units, blocks,
        stride, sections, top, unit, power_of_two(sections), tile, num_warps=WARPS,
    )  # fmt: skip


def deliver(
    y: Tensor, weight: Tensor | None, dscores: Tensor | None, slots: Tensor, places: Tensor,
    ends: Tensor, deltas: Tensor, out: Tensor, out_dscores: Tensor, sums: bool,
) -> None:  # fmt: skip
    """Sends the rows of y (capacity, K), or with `sums` those of a token, to its owner's `out`.

    Args:
        weight: (capacity,) FP32, which multiplies the rows that are summed; or None.
        dscores: (capacity,) FP32, of which each element goes to its copy's place; or None.
        slots, places: what `send` has brought.
        out, out_dscores: (tokens · k, K) and (tokens, k) FP32, symmetric.
    """
    (c, k), (tokens, top), ranks = y.shape, out_dscores.shape, len(deltas)
    units, unit, tile = tiling(k, y.element_size(), SUM_LOADS if sums else COPY_LOADS)
    blocks = cdiv(k, tile.shape[1])
    exchange_deliver_kernel[(ranks * cdiv(tokens, tile.shape[0]) * blocks,)](
        y, weight, dscores, slots, places, ends, deltas, out, out_dscores,
        c, len(ends), tokens, ranks, units, blocks, top, unit, tile, sums, num_warps=WARPS,
    )  # fmt: skip
