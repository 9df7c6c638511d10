"""What the FP8 GEMM kernels share; `gemm.py` explains their design.

A kernel has three warp-specialized partitions: a producer warp and two consumer warpgroups. Two
structures in shared memory connect them, both guarded by pairs of mbarriers:

    ring        STAGES stages, each with one block of 128 along the contraction and its scales. The
                producer waits on `empty`, issues TMA loads that complete on `full`, and moves on.
                Each consumer waits on `full` and arrives at `empty`, which takes two arrivals.
    tile queue  QUEUE_SLOTS slots, each with one `Tile`, and the same two barriers.

A stage or slot is used again and again, so its barriers alternate between phases 0 and 1. Each
partition keeps a `PipelineState`: the stage or slot that is next, and the phase to wait for.
Consumers wait on `full` with this phase, 0 in the first round. The producer waits on `empty` with
the phase flipped: waiting for phase 1 of a fresh barrier succeeds at once, so every stage is empty
at first.

Aggregates group values that belong together. They exist at compile time only.
"""

from typing import TYPE_CHECKING

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.language import core

# Renamed after Triton 3.6, as was `shared_memory_descriptor._reinterpret`.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

WAVE = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
)
"""Layout of the 64 x 128 accumulator that a consumer has for a wave."""
ROWS = gl.constexpr(gl.SliceLayout(1, WAVE.value))
COLUMNS = gl.constexpr(gl.SliceLayout(0, WAVE.value))
"""ROWS, COLUMNS: layouts of a vector along the rows or the columns of WAVE."""
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""One column scale per thread. In the layout COLUMNS a thread would hold 32 for the whole tile."""
VECTOR = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1))
SCALAR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SCALAR_2D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
QUEUE_SLOTS = gl.constexpr(2)
FIELDS = gl.constexpr(7)
"""Integers in a slot of the tile queue: the fields of a `Tile`."""


# To a type checker, aggregates are dataclasses.
if TYPE_CHECKING:
    from dataclasses import dataclass as aggregate
else:

    def aggregate(cls):
        """`gluon.aggregate`, with the constructor that Triton 3.6 does not generate."""

        def init(self, *values):
            for field, value in zip(cls.__annotations__, values, strict=True):
                is_value = isinstance(value, core.base_value)
                setattr(self, field, value if is_value else gl.constexpr(value))

        init.__triton_builtin__ = True
        cls.__init__ = init
        return core._aggregate(cls)


@aggregate
class Operands:
    """TMA descriptors of A, B and their scales; no scales for rowwise products."""

    a: tma.tensor_descriptor
    sa: tma.tensor_descriptor | gl.constexpr
    b: tma.tensor_descriptor
    sb: tma.tensor_descriptor | gl.constexpr


@aggregate
class Output:
    """C as a matrix with rows of N elements: its TMA descriptor and its address."""

    desc: tma.tensor_descriptor
    ptr: gl.tensor
    N: gl.tensor


@aggregate
class Ring:
    """Shared memory of A, B and their scales, and the barriers of each stage.

    The operand that differs between the two waves has two boxes per stage, at 2 * stage + wave.
    """

    a: gl.shared_memory_descriptor
    sa: gl.shared_memory_descriptor | gl.constexpr
    b: gl.shared_memory_descriptor
    sb: gl.shared_memory_descriptor | gl.constexpr
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@aggregate
class TileQueue:
    """Shared memory for the fields of QUEUE_SLOTS tiles, and the barriers of each slot."""

    fields: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@aggregate
class Tile:
    """A tile of C, as the producer describes it to the consumers; starts at (row, column) of C."""

    row: gl.tensor
    row_begin: gl.tensor
    """Rows from here to `row_end` may be stored; the tile may extend beyond them."""
    row_end: gl.tensor
    column: gl.tensor
    blocks: gl.tensor
    """Blocks to contract (rowwise wgrad: halves of blocks); -1 ends the consumers' loops."""
    waves: gl.tensor
    """2, or 1 at the edge of C and where a tile is split between programs."""
    group: gl.tensor


@aggregate
class PipelineState:
    """The next stage of the ring or slot of the queue, and the phase of its barriers."""

    index: gl.tensor
    phase: gl.tensor


@gluon.jit
def as_boxes(values, desc, COUNT: gl.constexpr):
    """Shared memory as COUNT boxes of a TMA descriptor."""
    if PUBLIC_REINTERPRET:
        return values.reinterpret(desc.dtype, [COUNT] + desc.block_shape, desc.layout)
    else:
        return values._reinterpret(desc.dtype, [COUNT] + desc.block_shape, desc.layout)


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that complete a phase after ARRIVALS arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def make_tile_queue():
    fields = gl.allocate_shared_memory(gl.int32, [QUEUE_SLOTS * FIELDS, 1], SCALAR)
    return TileQueue(fields, make_barriers(QUEUE_SLOTS, 1), make_barriers(QUEUE_SLOTS, 2))


@gluon.jit
def pipeline_start():
    """Stage or slot 0, in the first round."""
    return PipelineState(gl.to_tensor(0), gl.to_tensor(0))


@gluon.jit
def advance(state, COUNT: gl.constexpr):
    """The next stage or slot of COUNT; the phase flips after the last."""
    wraps = state.index == COUNT - 1
    index = gl.where(wraps, 0, state.index + 1)
    return PipelineState(index, gl.where(wraps, state.phase ^ 1, state.phase))


@gluon.jit
def publish_tile(queue, slot, tile):
    """Producer: pass a tile to the consumers. Returns the slot after it."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    # Wait until both consumers have read what the slot held; at first it is free.
    mbarrier.wait(queue.empty.index(slot.index), slot.phase ^ 1)
    values = (
        tile.row, tile.row_begin, tile.row_end, tile.column, tile.blocks, tile.waves, tile.group,
    )  # fmt: skip
    for i in gl.static_range(FIELDS):
        field = queue.fields.index(slot.index * FIELDS + i)
        field.store(gl.full([1], values[i], gl.int32, LANES))
    mbarrier.arrive(queue.full.index(slot.index), count=1)
    return advance(slot, QUEUE_SLOTS)


@gluon.jit
def publish_end(queue, slot):
    """Producer: tell the consumers that there are no more tiles."""
    zero = gl.to_tensor(0)
    publish_tile(queue, slot, Tile(zero, zero, zero, zero, zero - 1, zero, zero))


@gluon.jit
def receive_tile(queue, slot):
    """Consumer: the next tile, and the slot after it."""
    # Wait until the producer has filled the slot.
    mbarrier.wait(queue.full.index(slot.index), slot.phase)
    tile = Tile(
        _field(queue, slot, 0), _field(queue, slot, 1), _field(queue, slot, 2),
        _field(queue, slot, 3), _field(queue, slot, 4), _field(queue, slot, 5),
        _field(queue, slot, 6),
    )  # fmt: skip
    mbarrier.arrive(queue.empty.index(slot.index), count=1)
    return tile, advance(slot, QUEUE_SLOTS)


@gluon.jit
def _field(queue, slot, FIELD: gl.constexpr):
    # A sum over one element makes a scalar of it.
    return gl.sum(queue.fields.index(slot.index * FIELDS + FIELD).load(ROWS), 0)


@gluon.jit
def next_ticket(ticket_ptr, ticket):
    """The program's next ticket: from a counter if there is one, else every num_programs-th.

    A counter balances the load where groups make some tiles take longer than others.
    """
    if ticket_ptr is None:
        return ticket + gl.num_programs(0)
    else:
        return gl.atomic_add(ticket_ptr, 1, sem="relaxed")


@gluon.jit
def split_last_round(ticket, tiles):
    """The tile of a ticket, and its part: 2 is the whole tile, 0 and 1 are its waves.

    If the last round of tiles leaves at least half of the programs idle, its tiles are split into
    waves, one per ticket. There is no tile left if `tile >= tiles`.
    """
    rest = tiles % gl.num_programs(0)
    whole = gl.where(2 * rest <= gl.num_programs(0), tiles - rest, tiles)
    tile = gl.where(ticket < whole, ticket, whole + (ticket - whole) // 2)
    return tile, gl.where(ticket < whole, 2, (ticket - whole) % 2)


@gluon.jit
def in_bands(tile, m_tiles, n_tiles, BAND: gl.constexpr):
    """(m, n) of a group's tile: column by column within bands of BAND rows of tiles.

    Programs then work on tiles that share rows of A and columns of B, which stay in the L2 cache.
    """
    tiles_in_band = BAND * n_tiles
    band = tile // tiles_in_band
    rest = tile - band * tiles_in_band
    rows = gl.minimum(m_tiles - band * BAND, BAND)
    n = rest // rows
    return band * BAND + rest - n * rows, n


@gluon.jit
def start_product(a, b):
    """Start the asynchronous WGMMA a (64, K) times b (128, K)ᵀ, in fresh accumulators."""
    zeros = gl.zeros([64, 128], gl.float32, WAVE)
    return warpgroup_mma(a, b.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def read_scales(s_ptr, first, end, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """COUNT scales from `first` on, zeros from `end` on."""
    i = first + gl.arange(0, COUNT, LAYOUT)
    return gl.load(s_ptr + i, mask=i < end, other=0)


@gluon.jit
def scaled(wave, sa, sb):
    """A wave times the scales of its rows (ROWS) and columns (LANES)."""
    return wave * gl.expand_dims(gl.convert_layout(sb, COLUMNS), 0) * gl.expand_dims(sa, 1)


@gluon.jit
def store_wave(c, buffer, wave, tile, row, column, PENDING: gl.constexpr):
    """Store a wave to C at (row, column), but only rows that the tile may store.

    `buffer` is free once at most PENDING TMA stores are in flight, which are from other buffers.
    """
    result = wave.to(c.desc.dtype)
    if (row >= tile.row_begin) & (row + 64 <= tile.row_end):
        tma.store_wait(PENDING)
        buffer.store(result)
        fence_async_shared()
        tma_store(c.desc, [row, column], buffer)
    else:
        # PENDING counts as if every wave were stored by TMA. This one is not: wait for all stores.
        tma.store_wait(0)
        rows = row + gl.arange(0, 64, ROWS)
        may_store = (rows >= tile.row_begin) & (rows < tile.row_end)
        # N is a multiple of 16, so one predicate serves 16 columns. Constant and variable parts of
        # the address are kept apart to save registers.
        columns = gl.arange(0, 128, COLUMNS)
        inside = columns // 16 * 16 < c.N - column
        address = (c.ptr + column + rows.to(gl.int64) * c.N)[:, None] + columns[None, :]
        gl.store(address, result, mask=may_store[:, None] & inside[None, :])
