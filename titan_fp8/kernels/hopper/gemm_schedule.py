"""What the FP8 GEMM kernels are built of; `gemm.py` tells how they work.

A kernel has three partitions, and two things connect them. The ring is the data: STAGES places in
shared memory, each for one block of 128 along the contraction and its scales, if it has any, filled
by TMA and emptied by both consumers. The notes are the schedule: the producer alone works out which
tile comes next and where its group ends, and leaves the consumers a note of seven integers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

# Renamed after Triton 3.6, as was `shared_memory_descriptor._reinterpret`.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

WAVE = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
)
"""Who holds what of a wave, 64 x 128 results of one consumer."""
ROWS = gl.constexpr(gl.SliceLayout(1, WAVE.value))
COLUMNS = gl.constexpr(gl.SliceLayout(0, WAVE.value))
VECTOR = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1))
SCALAR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SCALAR_2D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
FIELDS = gl.constexpr(7)
"""Of a note: row, first and end row of what may be stored, column, blocks to contract (for rowwise
wgrad halves of them), waves and group."""
NOTES = gl.constexpr(2)


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
def make_notes():
    """The notes with their barriers: left by the producer, read by both consumers."""
    notes = gl.allocate_shared_memory(gl.int32, [NOTES * FIELDS, 1], SCALAR)
    return notes, make_barriers(NOTES, 1), make_barriers(NOTES, 2)


@gluon.jit
def advance(place, phase, COUNT: gl.constexpr):
    """The next place of a ring of COUNT, and the phase its barriers are in."""
    wraps = place == COUNT - 1
    return gl.where(wraps, 0, place + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def leave_note(notes, slot, phase, row, row_begin, row_end, column, blocks, waves, group):
    """Producer: tell the consumers of a tile; negative `blocks`: there is none left."""
    values, full, empty = notes
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(empty.index(slot), phase ^ 1)
    fields = (row, row_begin, row_end, column, blocks, waves, group)
    for i in gl.static_range(FIELDS):
        values.index(slot * FIELDS + i).store(gl.full([1], fields[i], gl.int32, LANES))
    mbarrier.arrive(full.index(slot), count=1)
    return advance(slot, phase, NOTES)


@gluon.jit
def read_note(notes, slot, phase):
    """Consumer: the next tile (row, row_begin, row_end, column, blocks, waves, group)."""
    values, full, empty = notes
    mbarrier.wait(full.index(slot), phase)
    row = _field(values, slot, 0)
    row_begin = _field(values, slot, 1)
    row_end = _field(values, slot, 2)
    column = _field(values, slot, 3)
    blocks = _field(values, slot, 4)
    waves = _field(values, slot, 5)
    group = _field(values, slot, 6)
    mbarrier.arrive(empty.index(slot), count=1)
    slot, phase = advance(slot, phase, NOTES)
    return row, row_begin, row_end, column, blocks, waves, group, slot, phase


@gluon.jit
def _field(values, slot, FIELD: gl.constexpr):
    return gl.sum(values.index(slot * FIELDS + FIELD).load(ROWS), 0)


@gluon.jit
def next_ticket(ticket_ptr, ticket):
    """Tiles that differ in length, those of groups, are given to whoever asks; others in turn."""
    if ticket_ptr is None:
        return ticket + gl.num_programs(0)
    else:
        return gl.atomic_add(ticket_ptr, 1, sem="relaxed")


@gluon.jit
def part_of(ticket, tiles):
    """The tile that a ticket stands for, and how much of it: 2 is all, 0 and 1 are its waves.

    Where the last round would leave half of the programs idle, its tiles are given out as waves.
    No tile is left once `tile >= tiles`.
    """
    rest = tiles % gl.num_programs(0)
    whole = gl.where(2 * rest <= gl.num_programs(0), tiles - rest, tiles)
    tile = gl.where(ticket < whole, ticket, whole + (ticket - whole) // 2)
    return tile, gl.where(ticket < whole, 2, (ticket - whole) % 2)


@gluon.jit
def in_bands(tile, m_tiles, n_tiles, BAND: gl.constexpr):
    """(m, n) of a group's tile, column by column within bands of BAND rows, so that the tiles in
    flight share what they read in the L2 cache."""
    tiles_in_band = BAND * n_tiles
    band = tile // tiles_in_band
    rest = tile - band * tiles_in_band
    rows = gl.minimum(m_tiles - band * BAND, BAND)
    n = rest // rows
    return band * BAND + rest - n * rows, n


@gluon.jit
def start_product(a, b):
    """Sets the tensor cores to a (64, K) times b (128, K)^T, in fresh accumulators."""
    zeros = gl.zeros([64, 128], gl.float32, WAVE)
    return warpgroup_mma(a, b.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def store_wave(
    c_desc, c_ptr, buffer, wave, row, row_begin, row_end, column, N, PENDING: gl.constexpr
):
    """A wave to C at (row, column); rows outside [row_begin, row_end) belong to somebody else.

    PENDING: TMA stores that may still be reading other buffers than this one.
    """
    result = wave.to(c_desc.dtype)
    if (row >= row_begin) & (row + 64 <= row_end):
        tma.store_wait(PENDING)
        buffer.store(result)
        fence_async_shared()
        tma_store(c_desc, [row, column], buffer)
    else:
        # So that the next TMA store need not know whether this one was one.
        tma.store_wait(0)
        rows = row + gl.arange(0, 64, ROWS)
        mine = (rows >= row_begin) & (rows < row_end)
        # By 16 columns, and constants apart from what varies: few registers live over a tile.
        columns = gl.arange(0, 128, COLUMNS)
        inside = columns // 16 * 16 < N - column
        address = (c_ptr + column + rows.to(gl.int64) * N)[:, None] + columns[None, :]
        gl.store(address, result, mask=mine[:, None] & inside[None, :])
