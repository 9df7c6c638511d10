"""The wgrad kernel, K-grouped, for blockwise and for rowwise scales.

    blockwise   c[e] = Σ over a group's blocks of 128 of sa sb (a bᵀ)
    rowwise     c[e] = sa sb Σ a bᵀ over a group's tokens, promoted to FP32 every 128 of them

`gemm.py` explains the structure.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from titan_fp8.kernels.hopper.gemm_schedule import (
    COLUMNS,
    LANES,
    ROWS,
    WAVE,
    Operands,
    Output,
    Ring,
    Tile,
    advance,
    in_bands,
    make_barriers,
    make_tile_queue,
    next_ticket,
    pipeline_start,
    publish_end,
    publish_tile,
    read_scales,
    receive_tile,
    scaled,
    split_last_round,
    start_product,
    store_wave,
    tma_load,
)
from titan_fp8.kernels.hopper.group_ends import next_group
from titan_fp8.kernels.launch import kernel


@gluon.jit
def produce(operands, offs_ptr, ticket_ptr, sizes, ring, queue, BAND: gl.constexpr):
    """The producer warp: finds the program's tiles and loads their blocks as stages become free.

    Rowwise products have no scales per block, and their tiles count halves of blocks. `sizes`: the
    columns of A and B, N, K, E, and the strides between the blocks of A's and of B's scales.
    """
    width, N, K, E, lda, ldb = sizes
    STAGES: gl.constexpr = ring.b.shape[0]
    SCALES: gl.constexpr = 0 if ring.sa is None else 128 * 4 + 256 * 4
    BYTES: gl.constexpr = 128 * 128 + SCALES
    n_tiles = gl.cdiv(N, 256)
    k_tiles = gl.cdiv(K, 128)
    zero = gl.to_tensor(0)
    stage, slot = pipeline_start(), pipeline_start()
    first = zero
    group, end, block, blocks, halves = next_group(zero - 1, zero, zero, zero, offs_ptr, width, E)
    ticket = next_ticket(ticket_ptr, gl.program_id(0) - gl.num_programs(0))
    tile, part = split_last_round(ticket, E * n_tiles * k_tiles)
    while tile < E * n_tiles * k_tiles:
        while tile >= first + n_tiles * k_tiles:
            first += n_tiles * k_tiles
            group, end, block, blocks, halves = next_group(
                group, end, block, blocks, offs_ptr, width, E
            )
        n, k = in_bands(tile - first, n_tiles, k_tiles, BAND)
        row = n * 256 + gl.where(part == 1, 128, 0)
        column = k * 128
        both = (part == 2) & (row + 128 < N)
        waves = gl.where(both, 2, 1)
        top = group * N
        length = halves if ring.sa is None else blocks
        # dW (E, N, K) is stored as one matrix of E * N rows.
        slot = publish_tile(
            queue, slot, Tile(top + row, top, top + N, column, length, waves, group)
        )
        for i in range(block, block + blocks):
            s = stage.index
            # Wait until both consumers have released the stage; at first it is free.
            mbarrier.wait(ring.empty.index(s), stage.phase ^ 1)
            bar = ring.full.index(s)
            # `full` completes when all these bytes have arrived; wave 1 of A is optional.
            mbarrier.expect(bar, BYTES + 2 * 128 * 128, pred=both)
            mbarrier.expect(bar, BYTES + 128 * 128, pred=both == 0)
            tma_load(operands.b, [column, i * 128], bar, ring.b.index(s))
            if ring.sa is not None:
                # In memory the scales of block i of all rows are followed by those of block i + 1.
                tma_load(operands.sb, [i * ldb + column], bar, ring.sb.index(s))
                tma_load(operands.sa, [i * lda + row], bar, ring.sa.index(s))
            tma_load(operands.a, [row, i * 128], bar, ring.a.index(2 * s))
            tma_load(operands.a, [row + 128, i * 128], bar, ring.a.index(2 * s + 1), pred=both)
            stage = advance(stage, STAGES)
        ticket = next_ticket(ticket_ptr, ticket)
        tile, part = split_last_round(ticket, E * n_tiles * k_tiles)
    publish_end(queue, slot)


@gluon.jit
def add_block(
    stage, upper, lower, ring, CONSUMER: gl.constexpr, WAVES: gl.constexpr, K: gl.constexpr
):
    """Promotes the product of the first K tokens of a block: adds it to the FP32 sums."""
    BLOCKWISE: gl.constexpr = ring.sa is not None
    i = stage.index
    b = ring.b.index(i).slice(0, K, 1)
    p = start_product(ring.a.index(2 * i).slice(CONSUMER * 64, 64).slice(0, K, 1), b)
    if BLOCKWISE:
        # Read once for both waves: the WGMMAs need nearly all of the shared-memory bandwidth.
        sb = gl.expand_dims(ring.sb.index(i).load(COLUMNS), 0)
        sa = ring.sa.index(i)
        s = gl.expand_dims(sa.slice(CONSUMER * 64, 64).load(ROWS), 1)
    p = warpgroup_mma_wait(0, [p])
    upper += p * sb * s if BLOCKWISE else p
    if WAVES == 2:
        p = start_product(ring.a.index(2 * i + 1).slice(CONSUMER * 64, 64).slice(0, K, 1), b)
        if BLOCKWISE:
            s = gl.expand_dims(sa.slice(128 + CONSUMER * 64, 64).load(ROWS), 1)
        p = warpgroup_mma_wait(0, [p])
        # The WGMMAs have read the stage, and its scales are in registers: the producer may refill
        # it while this consumer promotes.
        mbarrier.arrive(ring.empty.index(i), count=1)
        lower += p * sb * s if BLOCKWISE else p
    else:
        mbarrier.arrive(ring.empty.index(i), count=1)
    return upper, lower


@gluon.jit
def contract(length, stage, ring, CONSUMER: gl.constexpr, WAVES: gl.constexpr):
    """One consumer's rows of a tile, WAVES x 64 by 128 columns, promoted block by block.

    `length`: the number of blocks, rowwise of halves of blocks.
    """
    STAGES: gl.constexpr = ring.b.shape[0]
    ROWWISE: gl.constexpr = ring.sa is None
    upper = gl.zeros([64, 128], gl.float32, WAVE)
    lower = gl.zeros([64, 128], gl.float32, WAVE)
    for _ in range(length // 2 if ROWWISE else length):
        # Wait until all bytes of the block have arrived.
        mbarrier.wait(ring.full.index(stage.index), stage.phase)
        upper, lower = add_block(stage, upper, lower, ring, CONSUMER, WAVES, 128)
        stage = advance(stage, STAGES)
    if ROWWISE:
        # The last block has tokens in its first half only.
        if length % 2 == 1:
            mbarrier.wait(ring.full.index(stage.index), stage.phase)
            upper, lower = add_block(stage, upper, lower, ring, CONSUMER, WAVES, 64)
            stage = advance(stage, STAGES)
    return upper, lower, stage


@gluon.jit
def consume(c, scales, ring, queue, buffers, CONSUMER: gl.constexpr):
    """A consumer warpgroup: computes and stores 64 rows of each wave of the tiles in the queue.

    `scales`: rowwise, where those of the rows and of the columns of C are; else the ring has them.
    """
    ROWWISE: gl.constexpr = ring.sa is None
    # bf16 results have an epilogue buffer for each wave (LAST is 1); FP32 waves share one (0).
    LAST: gl.constexpr = buffers.shape[0] // 2 - 1
    stage = pipeline_start()
    first = buffers.index(CONSUMER * (LAST + 1))
    last = buffers.index(CONSUMER * (LAST + 1) + LAST)
    tile, slot = receive_tile(queue, pipeline_start())
    while tile.blocks >= 0:
        row, column = tile.row + CONSUMER * 64, tile.column
        if ROWWISE:
            sa_ptr, sb_ptr = scales
            # The dW of an empty group is zero, whatever its scales.
            rows_end = gl.where(tile.blocks > 0, tile.row_end, 0)
            columns_end = gl.where(tile.blocks > 0, c.N, 0)
            sa = read_scales(sa_ptr, row, rows_end, 64, ROWS)
            sb = read_scales(sb_ptr + tile.group * c.N, column, columns_end, 128, LANES)
        if tile.waves == 2:
            if ROWWISE:
                sa_lower = read_scales(sa_ptr, row + 128, rows_end, 64, ROWS)
            upper, lower, stage = contract(tile.blocks, stage, ring, CONSUMER, 2)
            if ROWWISE:
                upper, lower = scaled(upper, sa, sb), scaled(lower, sa_lower, sb)
            store_wave(c, first, upper, tile, row, column, LAST)
            store_wave(c, last, lower, tile, row + 128, column, LAST)
        else:
            upper, lower, stage = contract(tile.blocks, stage, ring, CONSUMER, 1)
            if ROWWISE:
                upper = scaled(upper, sa, sb)
            store_wave(c, last, upper, tile, row, column, 0)
        tile, slot = receive_tile(queue, slot)
    # Shared memory must outlive the TMA stores that read it.
    tma.store_wait(0)


@kernel(do_not_specialize=["width", "E", "lda", "ldb"])
def wgrad_kernel(
    a_desc, sa, b_desc, sb, c_desc, c_ptr, offs_ptr, ticket_ptr, width, N, K, E, lda, ldb,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Tiles of 256 x 128: two waves of 128 rows, of which each consumer computes 64.

    `width` is the number of columns of A and B. sa and sb are TMA descriptors, and lda and ldb the
    strides between their blocks. Rowwise they are addresses, and lda and ldb None.
    """
    a_ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 128, 128], a_desc.layout)
    b_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], b_desc.layout)
    sa_ring = None
    sb_ring = None
    if lda is not None:
        sa_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 256], sa.layout)
        sb_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 128], sb.layout)
    buffers = gl.allocate_shared_memory(c_desc.dtype, [2 * BUFFERS, 64, 128], c_desc.layout)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    queue = make_tile_queue()
    fence_async_shared()
    ring = Ring(a_ring, sa_ring, b_ring, sb_ring, full, empty)
    operands = Operands(a_desc, None if lda is None else sa, b_desc, None if lda is None else sb)
    scales = (sa, sb) if lda is None else ()
    c = Output(c_desc, c_ptr, K)
    sizes = (width, N, K, E, lda, ldb)
    gl.warp_specialize(
        [
            (consume, (c, scales, ring, queue, buffers, 0)),
            (consume, (c, scales, ring, queue, buffers, 1)),
            (produce, (operands, offs_ptr, ticket_ptr, sizes, ring, queue, BAND)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )
