"""The rowwise GEMM kernels: fprop and dgrad M-grouped, wgrad K-grouped.

Producers, ring, tile queue and epilogue are those of the blockwise kernels (`gemm_blockwise.py`).
There are no scales per block. A consumer reads the scales of a tile, one per row and one per
column, when the tile begins, and multiplies by them in the epilogue. M-grouped consumers take no
turns. They accumulate both waves in the tensor cores (fast accumulation), with one WGMMA in flight
while the next is issued. wgrad promotes to FP32 every 128 tokens (slow accumulation).

torchtitan pads groups to multiples of 16 rows, not of 128, so tiles differ in work. A consumer
without rows in a group's last tile skips it, wgrad skips the half of a group's last block that has
no tokens, and M-grouped programs draw tickets, too. A dense product is one group whose tiles are
known in advance.
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
    Operands,
    Output,
    Ring,
    advance,
    as_boxes,
    make_barriers,
    make_tile_queue,
    pipeline_start,
    receive_tile,
    start_product,
    store_wave,
)
from titan_fp8.kernels.launch import kernel

WIDE = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 32])
)
"""Layout of the 64 x 256 accumulator that a consumer has for both waves."""
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""One column scale per thread. In the layout COLUMNS a thread would hold 32 for the whole tile."""


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
def accumulate(blocks, stage, ring, CONSUMER: gl.constexpr, WAVES: gl.constexpr):
    """One consumer's 64 rows of an M-grouped tile, WAVES x 128 columns, in one accumulator.

    One WGMMA is in flight while the next is issued, so a stage is released one block later.
    """
    LAYOUT: gl.constexpr = WIDE if WAVES == 2 else WAVE
    sums = gl.zeros([64, WAVES * 128], gl.float32, LAYOUT)
    # A new tensor, because Triton does not carry an alias of `stage` through the loop.
    before = gl.to_tensor(0)
    for i in range(blocks):
        # Wait until all bytes of the block have arrived.
        mbarrier.wait(ring.full.index(stage.index), stage.phase)
        a = ring.a.index(stage.index).slice(CONSUMER * 64, 64)
        b = ring.b.index(stage.index).slice(0, WAVES * 128)
        sums = warpgroup_mma(a, b.permute([1, 0]), sums, is_async=True)
        # The previous WGMMA has read its stage, so the producer may refill it.
        sums = warpgroup_mma_wait(1, [sums])
        mbarrier.arrive(ring.empty.index(before), count=1, pred=i > 0)
        before = stage.index
        stage = advance(stage, ring.a.shape[0])
    sums = warpgroup_mma_wait(0, [sums])
    mbarrier.arrive(ring.empty.index(before), count=1, pred=blocks > 0)
    if WAVES == 2:
        left, right = sums.reshape([64, 2, 128]).permute([0, 2, 1]).split()
        left = gl.convert_layout(left, WAVE, assert_trivial=True)
        right = gl.convert_layout(right, WAVE, assert_trivial=True)
        return left, right, stage
    else:
        return sums, sums, stage


@gluon.jit
def skip(blocks, stage, ring):
    """Release the stages of a tile in which this consumer has no rows."""
    for _ in range(blocks):
        mbarrier.wait(ring.full.index(stage.index), stage.phase)
        mbarrier.arrive(ring.empty.index(stage.index), count=1)
        stage = advance(stage, ring.a.shape[0])
    return stage


@gluon.jit
def consume_rows(c, sa_ptr, sb_ptr, ring, queue, buffers, CONSUMER: gl.constexpr):
    """A consumer warpgroup: computes and stores 64 rows of each M-grouped tile in the queue."""
    stage = pipeline_start()
    buffer = buffers.index(CONSUMER)
    tile, slot = receive_tile(queue, pipeline_start())
    while tile.blocks >= 0:
        row, column = tile.row + CONSUMER * 64, tile.column
        # Rows of no group have no blocks and read no scales, so they are zero.
        sa = read_scales(sa_ptr, row, gl.where(tile.blocks > 0, tile.row_end, 0), 64, ROWS)
        columns_end = gl.where(tile.blocks > 0, c.N, 0)
        sb = read_scales(sb_ptr + tile.group * c.N, column, columns_end, 128, LANES)
        if row >= tile.row_end:
            # The last tile of a group may have rows for the first consumer only.
            stage = skip(tile.blocks, stage, ring)
        elif tile.waves == 2:
            sb_right = read_scales(sb_ptr + tile.group * c.N, column + 128, columns_end, 128, LANES)
            left, right, stage = accumulate(tile.blocks, stage, ring, CONSUMER, 2)
            left, right = scaled(left, sa, sb), scaled(right, sa, sb_right)
            store_wave(c, buffer, left, tile, row, column, 0)
            store_wave(c, buffer, right, tile, row, column + 128, 0)
        else:
            left, right, stage = accumulate(tile.blocks, stage, ring, CONSUMER, 1)
            left = scaled(left, sa, sb)
            store_wave(c, buffer, left, tile, row, column, 0)
        tile, slot = receive_tile(queue, slot)
    # Shared memory must outlive the TMA stores that read it.
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
    # Consumers read both waves of B as one box of 256 rows; the producer fills two boxes of 128.
    ring = Ring(a_ring, None, b_ring, None, full, empty)
    halves = Ring(a_ring, None, as_boxes(b_ring, b_desc, 2 * STAGES), None, full, empty)
    products = (Operands(a_desc, None, b_desc, None),)
    c = Output(c_desc, c_ptr, N)
    sizes = (M, N, K, E, None)
    gl.warp_specialize(
        [
            (consume_rows, (c, sa_ptr, sb_ptr, ring, queue, buffers, 0)),
            (consume_rows, (c, sa_ptr, sb_ptr, ring, queue, buffers, 1)),
            (
                gemm_blockwise_fprop_dgrad.produce,
                (products, offs_ptr, ticket_ptr, sizes, halves, queue, BAND),
            ),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


@gluon.jit
def add_block(
    stage, upper, lower, ring, CONSUMER: gl.constexpr, WAVES: gl.constexpr, K: gl.constexpr
):
    """Promotes the product of the first K tokens of a block: adds it to the FP32 sums."""
    i = stage.index
    b = ring.b.index(i).slice(0, K, 1)
    a = ring.a.index(2 * i).slice(CONSUMER * 64, 64).slice(0, K, 1)
    p = warpgroup_mma_wait(0, [start_product(a, b)])
    upper += p
    if WAVES == 2:
        a = ring.a.index(2 * i + 1).slice(CONSUMER * 64, 64).slice(0, K, 1)
        p = warpgroup_mma_wait(0, [start_product(a, b)])
        # The WGMMAs have read the stage, so the producer may refill it.
        mbarrier.arrive(ring.empty.index(i), count=1)
        lower += p
    else:
        mbarrier.arrive(ring.empty.index(i), count=1)
    return upper, lower


@gluon.jit
def add_up(halves, stage, ring, CONSUMER: gl.constexpr, WAVES: gl.constexpr):
    """One consumer's rows of a K-grouped tile, WAVES x 64, promoted to FP32 block by block."""
    STAGES: gl.constexpr = ring.b.shape[0]
    upper = gl.zeros([64, 128], gl.float32, WAVE)
    lower = gl.zeros([64, 128], gl.float32, WAVE)
    for _ in range(halves // 2):
        # Wait until all bytes of the block have arrived.
        mbarrier.wait(ring.full.index(stage.index), stage.phase)
        upper, lower = add_block(stage, upper, lower, ring, CONSUMER, WAVES, 128)
        stage = advance(stage, STAGES)
    # The last block has tokens in its first half only.
    if halves % 2 == 1:
        mbarrier.wait(ring.full.index(stage.index), stage.phase)
        upper, lower = add_block(stage, upper, lower, ring, CONSUMER, WAVES, 64)
        stage = advance(stage, STAGES)
    return upper, lower, stage


@gluon.jit
def consume_columns(c, sa_ptr, sb_ptr, ring, queue, buffers, CONSUMER: gl.constexpr):
    """A consumer warpgroup: computes and stores 64 rows of each wave of the K-grouped tiles."""
    # bf16 results have an epilogue buffer for each wave (LAST is 1); FP32 waves share one (0).
    LAST: gl.constexpr = buffers.shape[0] // 2 - 1
    stage = pipeline_start()
    first = buffers.index(CONSUMER * (LAST + 1))
    last = buffers.index(CONSUMER * (LAST + 1) + LAST)
    tile, slot = receive_tile(queue, pipeline_start())
    while tile.blocks >= 0:
        row, column, halves = tile.row + CONSUMER * 64, tile.column, tile.blocks
        # The dW of an empty group is zero, whatever its scales.
        rows_end = gl.where(halves > 0, tile.row_end, 0)
        columns_end = gl.where(halves > 0, c.N, 0)
        sa = read_scales(sa_ptr, row, rows_end, 64, ROWS)
        sb = read_scales(sb_ptr + tile.group * c.N, column, columns_end, 128, LANES)
        if tile.waves == 2:
            sa_lower = read_scales(sa_ptr, row + 128, rows_end, 64, ROWS)
            upper, lower, stage = add_up(halves, stage, ring, CONSUMER, 2)
            upper, lower = scaled(upper, sa, sb), scaled(lower, sa_lower, sb)
            store_wave(c, first, upper, tile, row, column, LAST)
            store_wave(c, last, lower, tile, row + 128, column, LAST)
        else:
            upper, lower, stage = add_up(halves, stage, ring, CONSUMER, 1)
            upper = scaled(upper, sa, sb)
            store_wave(c, last, upper, tile, row, column, 0)
        tile, slot = receive_tile(queue, slot)
    # Shared memory must outlive the TMA stores that read it.
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
    """Tiles of 256 x 128: two waves of 128 rows, of which each consumer computes 64.

    `width` is the number of columns of A and B.
    """
    a_ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 128, 128], a_desc.layout)
    b_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], b_desc.layout)
    buffers = gl.allocate_shared_memory(c_desc.dtype, [2 * BUFFERS, 64, 128], c_desc.layout)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    queue = make_tile_queue()
    fence_async_shared()
    ring = Ring(a_ring, None, b_ring, None, full, empty)
    operands = Operands(a_desc, None, b_desc, None)
    c = Output(c_desc, c_ptr, K)
    sizes = (width, N, K, E, None, None)
    gl.warp_specialize(
        [
            (consume_columns, (c, sa_ptr, sb_ptr, ring, queue, buffers, 0)),
            (consume_columns, (c, sa_ptr, sb_ptr, ring, queue, buffers, 1)),
            (
                gemm_blockwise_wgrad.produce,
                (operands, offs_ptr, ticket_ptr, sizes, ring, queue, BAND),
            ),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )
