"""What the FP8 GEMM kernels share; `gemm_blockwise.py` explains the whole.

A kernel has three warp-specialised partitions: a producer warp and two consumer warpgroups. Two
structures in shared memory connect them, both guarded by pairs of mbarriers:

    ring        STAGES stages, each with one block of 128 along the contraction and its scales. The
                producer waits on `empty`, issues TMA loads that complete on `full`, and moves on.
                Each consumer waits on `full` and arrives at `empty`, which takes two arrivals.
    tile queue  QUEUE_SLOTS slots, each with one tile as seven integers, and the same two barriers.

A stage or slot is used again and again, so a barrier alternates between phases 0 and 1, and
whoever waits keeps the phase that it waits for. `full` is waited for in phase 0 first. `empty` is
waited for with the phase flipped, so the first round finds every stage empty.
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
"""The registers of a consumer's 64 x 128 results of a wave."""
ROWS = gl.constexpr(gl.SliceLayout(1, WAVE.value))
COLUMNS = gl.constexpr(gl.SliceLayout(0, WAVE.value))
VECTOR = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1))
SCALAR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SCALAR_2D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
FIELDS = gl.constexpr(7)
"""Of a tile: its row, the first and the end row that may be stored, its column, the blocks to
contract (rowwise wgrad: halves of blocks), its waves and its group."""
QUEUE_SLOTS = gl.constexpr(2)


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
    """The tile queue: its slots, and their barriers `full` and `empty`."""
    queue = gl.allocate_shared_memory(gl.int32, [QUEUE_SLOTS * FIELDS, 1], SCALAR)
    return queue, make_barriers(QUEUE_SLOTS, 1), make_barriers(QUEUE_SLOTS, 2)


@gluon.jit
def advance(stage, phase, COUNT: gl.constexpr):
    """The next stage or slot of COUNT, and the phase of its barriers: flipped after the last."""
    wraps = stage == COUNT - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def publish_tile(queue, slot, phase, row, row_begin, row_end, column, blocks, waves, group):
    """Producer: pass a tile to the consumers; negative `blocks` ends their loops."""
    values, full, empty = queue
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(empty.index(slot), phase ^ 1)
    fields = (row, row_begin, row_end, column, blocks, waves, group)
    for i in gl.static_range(FIELDS):
        values.index(slot * FIELDS + i).store(gl.full([1], fields[i], gl.int32, LANES))
    mbarrier.arrive(full.index(slot), count=1)
    return advance(slot, phase, QUEUE_SLOTS)


@gluon.jit
def receive_tile(queue, slot, phase):
    """Consumer: the next tile, and the slot after it."""
    values, full, empty = queue
    mbarrier.wait(full.index(slot), phase)
    row = _field(values, slot, 0)
    row_begin = _field(values, slot, 1)
    row_end = _field(values, slot, 2)
    column = _field(values, slot, 3)
    blocks = _field(values, slot, 4)
    waves = _field(values, slot, 5)
    group = _field(values, slot, 6)
    mbarrier.arrive(empty.index(slot), count=1)
    slot, phase = advance(slot, phase, QUEUE_SLOTS)
    return row, row_begin, row_end, column, blocks, waves, group, slot, phase


@gluon.jit
def _field(values, slot, FIELD: gl.constexpr):
    return gl.sum(values.index(slot * FIELDS + FIELD).load(ROWS), 0)


@gluon.jit
def next_ticket(ticket_ptr, ticket):
    """The program's next ticket: from a shared counter, or without one in turns of all programs.

    Groups make tiles of different length, which a counter balances.
    """
    if ticket_ptr is None:
        return ticket + gl.num_programs(0)
    else:
        return gl.atomic_add(ticket_ptr, 1, sem="relaxed")


@gluon.jit
def part_of(ticket, tiles):
    """The tile of a ticket, and its part: 2 is the whole tile, 0 and 1 are its waves.

    If the last round of tiles leaves half of the programs idle, its tiles are split into waves.
    There is no tile left if `tile >= tiles`.
    """
    rest = tiles % gl.num_programs(0)
    whole = gl.where(2 * rest <= gl.num_programs(0), tiles - rest, tiles)
    tile = gl.where(ticket < whole, ticket, whole + (ticket - whole) // 2)
    return tile, gl.where(ticket < whole, 2, (ticket - whole) % 2)


@gluon.jit
def in_bands(tile, m_tiles, n_tiles, BAND: gl.constexpr):
    """(m, n) of a group's tile: column by column within bands of BAND rows of tiles.

    The tiles in flight then share rows of A and columns of B in the L2 cache.
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
def store_wave(
    c_desc, c_ptr, buffer, wave, row, row_begin, row_end, column, N, PENDING: gl.constexpr
):
    """Store a wave to C at (row, column), but no rows outside [row_begin, row_end): other tiles'.

    PENDING: the number of later TMA stores, from other buffers, that may still be in flight.
    """
    result = wave.to(c_desc.dtype)
    if (row >= row_begin) & (row + 64 <= row_end):
        tma.store_wait(PENDING)
        buffer.store(result)
        fence_async_shared()
        tma_store(c_desc, [row, column], buffer)
    else:
        # The next TMA store counts on PENDING stores at most, whichever way this one goes.
        tma.store_wait(0)
        rows = row + gl.arange(0, 64, ROWS)
        mine = (rows >= row_begin) & (rows < row_end)
        # N is a multiple of 16, so one predicate serves 16 columns. Constant and variable parts of
        # the address are kept apart to save registers.
        columns = gl.arange(0, 128, COLUMNS)
        inside = columns // 16 * 16 < N - column
        address = (c_ptr + column + rows.to(gl.int64) * N)[:, None] + columns[None, :]
        gl.store(address, result, mask=mine[:, None] & inside[None, :])
