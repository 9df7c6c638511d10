"""The rowwise grouped kernels: fprop and dgrad M-grouped, wgrad K-grouped.

Producers, ring, tile queue and epilogue are those of the blockwise kernels (`gemm_blockwise.py`).
There are no scales per block: the scales of a tile, one per row and one per column, are read when
the tile begins and multiplied in its epilogue. M-grouped consumers take no turns. They accumulate
both waves in the tensor cores (fast accumulation), with one WGMMA in flight while the next is
issued. wgrad promotes to FP32 every 128 tokens (slow accumulation).

Groups end at multiples of 16 rows, so tiles differ in work. A consumer without rows in a group's
last tile skips it, wgrad skips the half of a group's last block that has no tokens, and M-grouped
programs draw tickets, too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from titan_fp8.kernels.hopper import gemm_blockwise_fprop_dgrad, gemm_blockwise_wgrad
from titan_fp8.kernels.hopper.gemm_schedule import (
    COLUMNS,
    ROWS,
    WAVE,
    advance,
    as_boxes,
    make_barriers,
    make_tile_queue,
    receive_tile,
    start_product,
    store_wave,
)
from titan_fp8.kernels.launch import kernel

WIDE = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 32])
)
"""The registers of both waves of one consumer, 64 x 256 results."""
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""One column scale per thread: in the layout COLUMNS it would be 32, live over a whole tile."""


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
def accumulate(blocks, stage, phase, ring, PART: gl.constexpr, WAVES: gl.constexpr):
    """One consumer's 64 rows of an M-grouped tile, WAVES x 128 columns, in one accumulator.

    One WGMMA is in flight while the next is issued, so a stage is released one block later.
    """
    a_ring, b_ring, full, empty = ring
    LAYOUT: gl.constexpr = WIDE if WAVES == 2 else WAVE
    sums = gl.zeros([64, WAVES * 128], gl.float32, LAYOUT)
    # A value of its own: Triton does not carry an alias of `stage` through the loop.
    before = gl.to_tensor(0)
    for i in range(blocks):
        mbarrier.wait(full.index(stage), phase)
        a = a_ring.index(stage).slice(PART * 64, 64)
        b = b_ring.index(stage).slice(0, WAVES * 128)
        sums = warpgroup_mma(a, b.permute([1, 0]), sums, is_async=True)
        sums = warpgroup_mma_wait(1, [sums])
        mbarrier.arrive(empty.index(before), count=1, pred=i > 0)
        before = stage
        stage, phase = advance(stage, phase, a_ring.shape[0])
    sums = warpgroup_mma_wait(0, [sums])
    mbarrier.arrive(empty.index(before), count=1, pred=blocks > 0)
    if WAVES == 2:
        left, right = sums.reshape([64, 2, 128]).permute([0, 2, 1]).split()
        left = gl.convert_layout(left, WAVE, assert_trivial=True)
        right = gl.convert_layout(right, WAVE, assert_trivial=True)
        return left, right, stage, phase
    else:
        return sums, sums, stage, phase


@gluon.jit
def skip(blocks, stage, phase, ring):
    """Release the stages of a tile in which this consumer has no rows."""
    a_ring, _, full, empty = ring
    for _ in range(blocks):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, a_ring.shape[0])
    return stage, phase


@gluon.jit
def consume_rows(c_desc, c_ptr, sa_ptr, sb_ptr, N, ring, queue, buffers, PART: gl.constexpr):
    """A consumer warpgroup: computes and stores 64 rows of each M-grouped tile in the queue."""
    zero = gl.to_tensor(0)
    stage, phase = zero, zero
    buffer = buffers.index(PART)
    row, begin, end, column, blocks, waves, group, slot, slot_phase = receive_tile(
        queue, zero, zero
    )
    while blocks >= 0:
        mine = row + PART * 64
        # Rows of no group have no blocks and read no scales, so they are zero.
        sa = read_scales(sa_ptr, mine, gl.where(blocks > 0, end, 0), 64, ROWS)
        columns_end = gl.where(blocks > 0, N, 0)
        sb = read_scales(sb_ptr + group * N, column, columns_end, 128, LANES)
        if mine >= end:
            # The last tile of a group may have rows for the first consumer only.
            stage, phase = skip(blocks, stage, phase, ring)
        elif waves == 2:
            sb_right = read_scales(sb_ptr + group * N, column + 128, columns_end, 128, LANES)
            left, right, stage, phase = accumulate(blocks, stage, phase, ring, PART, 2)
            left, right = scaled(left, sa, sb), scaled(right, sa, sb_right)
            store_wave(c_desc, c_ptr, buffer, left, mine, begin, end, column, N, 0)
            store_wave(c_desc, c_ptr, buffer, right, mine, begin, end, column + 128, N, 0)
        else:
            left, right, stage, phase = accumulate(blocks, stage, phase, ring, PART, 1)
            left = scaled(left, sa, sb)
            store_wave(c_desc, c_ptr, buffer, left, mine, begin, end, column, N, 0)
        row, begin, end, column, blocks, waves, group, slot, slot_phase = receive_tile(
            queue, slot, slot_phase
        )
    tma.store_wait(0)


@kernel(do_not_specialize=["M", "E"])
def rowwise_fprop_dgrad_kernel(
    a_desc,
    sa_ptr,
    b_desc,
    sb_ptr,
    c_desc,
    c_ptr,
    offs_ptr,
    ticket_ptr,
    M,
    N,
    K,
    E,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
):
    """Tiles of 128 x 256: two consumers of 64 rows."""
    a_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], a_desc.layout)
    b_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 256, 128], b_desc.layout)
    buffers = gl.allocate_shared_memory(c_desc.dtype, [2, 64, 128], c_desc.layout)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    queue = make_tile_queue()
    fence_async_shared()
    ring = (a_ring, b_ring, full, empty)
    halves = (a_ring, None, as_boxes(b_ring, b_desc, 2 * STAGES), None, full, empty)
    operands = (a_desc, None, b_desc, None)
    sizes = (M, N, K, E, None)
    gl.warp_specialize(
        [
            (consume_rows, (c_desc, c_ptr, sa_ptr, sb_ptr, N, ring, queue, buffers, 0)),
            (consume_rows, (c_desc, c_ptr, sa_ptr, sb_ptr, N, ring, queue, buffers, 1)),
            (
                gemm_blockwise_fprop_dgrad.produce,
                (operands, offs_ptr, ticket_ptr, sizes, halves, queue, BAND, 1),
            ),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


@gluon.jit
def add_block(stage, upper, lower, ring, PART: gl.constexpr, WAVES: gl.constexpr, K: gl.constexpr):
    """Adds the product of the first K tokens of a block."""
    a_ring, _, b_ring, _, _, empty = ring
    b = b_ring.index(stage).slice(0, K, 1)
    a = a_ring.index(2 * stage).slice(PART * 64, 64).slice(0, K, 1)
    p = warpgroup_mma_wait(0, [start_product(a, b)])
    upper += p
    if WAVES == 2:
        a = a_ring.index(2 * stage + 1).slice(PART * 64, 64).slice(0, K, 1)
        p = warpgroup_mma_wait(0, [start_product(a, b)])
        mbarrier.arrive(empty.index(stage), count=1)
        lower += p
    else:
        mbarrier.arrive(empty.index(stage), count=1)
    return upper, lower


@gluon.jit
def add_up(halves, stage, phase, ring, PART: gl.constexpr, WAVES: gl.constexpr):
    """One consumer's rows of a K-grouped tile, WAVES x 64, promoted to FP32 block by block."""
    STAGES: gl.constexpr = ring[2].shape[0]
    full = ring[4]
    upper = gl.zeros([64, 128], gl.float32, WAVE)
    lower = gl.zeros([64, 128], gl.float32, WAVE)
    for _ in range(halves // 2):
        mbarrier.wait(full.index(stage), phase)
        upper, lower = add_block(stage, upper, lower, ring, PART, WAVES, 128)
        stage, phase = advance(stage, phase, STAGES)
    if halves % 2 == 1:
        mbarrier.wait(full.index(stage), phase)
        upper, lower = add_block(stage, upper, lower, ring, PART, WAVES, 64)
        stage, phase = advance(stage, phase, STAGES)
    return upper, lower, stage, phase


@gluon.jit
def consume_columns(c_desc, c_ptr, sa_ptr, sb_ptr, K, ring, queue, buffers, PART: gl.constexpr):
    """A consumer warpgroup: computes and stores 64 rows of each wave of the K-grouped tiles."""
    LAST: gl.constexpr = buffers.shape[0] // 2 - 1
    zero = gl.to_tensor(0)
    stage, phase = zero, zero
    first = buffers.index(PART * (LAST + 1))
    last = buffers.index(PART * (LAST + 1) + LAST)
    row, begin, end, column, halves, waves, group, slot, slot_phase = receive_tile(
        queue, zero, zero
    )
    while halves >= 0:
        mine = row + PART * 64
        # The dW of an empty group is zero, whatever its scales.
        rows_end = gl.where(halves > 0, end, 0)
        columns_end = gl.where(halves > 0, K, 0)
        sa = read_scales(sa_ptr, mine, rows_end, 64, ROWS)
        sb = read_scales(sb_ptr + group * K, column, columns_end, 128, LANES)
        if waves == 2:
            sa_lower = read_scales(sa_ptr, mine + 128, rows_end, 64, ROWS)
            upper, lower, stage, phase = add_up(halves, stage, phase, ring, PART, 2)
            upper, lower = scaled(upper, sa, sb), scaled(lower, sa_lower, sb)
            store_wave(c_desc, c_ptr, first, upper, mine, begin, end, column, K, LAST)
            store_wave(c_desc, c_ptr, last, lower, mine + 128, begin, end, column, K, LAST)
        else:
            upper, lower, stage, phase = add_up(halves, stage, phase, ring, PART, 1)
            upper = scaled(upper, sa, sb)
            store_wave(c_desc, c_ptr, last, upper, mine, begin, end, column, K, 0)
        row, begin, end, column, halves, waves, group, slot, slot_phase = receive_tile(
            queue, slot, slot_phase
        )
    tma.store_wait(0)


@kernel(do_not_specialize=["width", "E"])
def rowwise_wgrad_kernel(
    a_desc,
    sa_ptr,
    b_desc,
    sb_ptr,
    c_desc,
    c_ptr,
    offs_ptr,
    ticket_ptr,
    width,
    N,
    K,
    E,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    BAND: gl.constexpr,
):
    """Tiles of 256 x 128: two waves of 128 rows, of which each consumer computes 64."""
    a_ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 128, 128], a_desc.layout)
    b_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], b_desc.layout)
    buffers = gl.allocate_shared_memory(c_desc.dtype, [2 * BUFFERS, 64, 128], c_desc.layout)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    queue = make_tile_queue()
    fence_async_shared()
    ring = (a_ring, None, b_ring, None, full, empty)
    operands = (a_desc, None, b_desc, None)
    sizes = (width, N, K, E, None, None)
    gl.warp_specialize(
        [
            (consume_columns, (c_desc, c_ptr, sa_ptr, sb_ptr, K, ring, queue, buffers, 0)),
            (consume_columns, (c_desc, c_ptr, sa_ptr, sb_ptr, K, ring, queue, buffers, 1)),
            (
                gemm_blockwise_wgrad.produce,
                (operands, offs_ptr, ticket_ptr, sizes, ring, queue, BAND),
            ),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )
