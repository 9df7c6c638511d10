"""The kernel for fprop and dgrad, M-grouped, for blockwise and for rowwise scales.

    blockwise   c[m] = Σ over blocks of 128 of sa sb (a[m] b[e]ᵀ)
    rowwise     c[m] = sa sb Σ a[m] b[e]ᵀ, which the tensor cores sum

e is the group of row m. The sum of two blockwise products of the same shape is computed as one
product with twice as many blocks. `gemm.py` explains the structure.
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

from titan_fp8.kernels.hopper.gemm_schedule import (
    LANES,
    ROWS,
    SCALAR_2D,
    WAVE,
    Operands,
    Output,
    Ring,
    Tile,
    advance,
    as_boxes,
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
from titan_fp8.kernels.hopper.group_ends import group_of_tile
from titan_fp8.kernels.launch import kernel

WIDE = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 32])
)
"""Layout of the 64 x 256 accumulator that a rowwise consumer has for both waves."""


@gluon.jit
def tile_of_ticket(ticket, offs_ptr, M, n_tiles):
    """The tile of a ticket and its part, as `split_last_round` returns them.

    With groups the number of tiles is unknown until all group ends are read, so no tile is split.
    """
    if offs_ptr is None:
        return split_last_round(ticket, gl.cdiv(M, 128) * n_tiles)
    else:
        return ticket, ticket * 0 + 2


@gluon.jit
def produce(products, offs_ptr, ticket_ptr, sizes, ring, queue, BAND: gl.constexpr):
    """The producer warp: finds the program's tiles and loads their blocks as stages become free.

    `products`: the `Operands` of one product, or of two that are added up. `sizes`: M, N, K, E, and
    the stride between the blocks of A's scales.
    """
    M, N, K, E, lda = sizes
    STAGES: gl.constexpr = ring.a.shape[0]
    PRODUCTS: gl.constexpr = len(products)
    SCALES: gl.constexpr = 0 if ring.sa is None else 128 * 4 + 2 * 16 * 4
    BYTES: gl.constexpr = 128 * 128 + SCALES
    n_tiles = gl.cdiv(N, 256)
    zero = gl.to_tensor(0)
    stage, slot = pipeline_start(), pipeline_start()
    ticket = next_ticket(ticket_ptr, gl.program_id(0) - gl.num_programs(0))
    tile, part = tile_of_ticket(ticket, offs_ptr, M, n_tiles)
    group, first, row_begin, row_end = group_of_tile(
        tile, zero - 1, zero, zero, zero, offs_ptr, M, E, n_tiles
    )
    # Group E has the rows of no group, which become zero; past it there are no tiles.
    while group <= E:
        # TMA loads of a scale vector must start at a multiple of 16 bytes, which is 4 rows. The
        # epilogue does not store the rows before row_begin.
        top = row_begin // 4 * 4
        m, n = in_bands(tile - first, gl.cdiv(row_end - top, 128), n_tiles, BAND)
        row = top + m * 128
        column = n * 256 + gl.where(part == 1, 128, 0)
        both = (part == 2) & (column + 128 < N)
        waves = gl.where(both, 2, 1)
        blocks = gl.where(group < E, gl.cdiv(K, 128), 0)
        slot = publish_tile(
            queue, slot, Tile(row, row_begin, row_end, column, PRODUCTS * blocks, waves, group)
        )
        b_row = group * N + column
        sb_row = group * gl.cdiv(N, 128) + column // 128
        for i in gl.static_range(PRODUCTS):
            x = products[i]
            for k in range(blocks):
                s = stage.index
                # Wait until both consumers have released the stage; at first it is free.
                mbarrier.wait(ring.empty.index(s), stage.phase ^ 1)
                bar = ring.full.index(s)
                # `full` completes when all these bytes have arrived; wave 1 of B is optional.
                mbarrier.expect(bar, BYTES + 2 * 128 * 128, pred=both)
                mbarrier.expect(bar, BYTES + 128 * 128, pred=both == 0)
                tma_load(x.a, [row, k * 128], bar, ring.a.index(s))
                if ring.sa is not None:
                    tma_load(x.sa, [k * lda + row], bar, ring.sa.index(s))
                    # 2 x 16 scales of B: a row for each wave, and in it 16 blocks that include
                    # block k, because a TMA load must start at a multiple of 16 bytes.
                    tma_load(x.sb, [sb_row, k // 16 * 16], bar, ring.sb.index(s))
                tma_load(x.b, [b_row, k * 128], bar, ring.b.index(2 * s))
                tma_load(x.b, [b_row + 128, k * 128], bar, ring.b.index(2 * s + 1), pred=both)
                stage = advance(stage, STAGES)
        ticket = next_ticket(ticket_ptr, ticket)
        tile, part = tile_of_ticket(ticket, offs_ptr, M, n_tiles)
        group, first, row_begin, row_end = group_of_tile(
            tile, group, first, row_begin, row_end, offs_ptr, M, E, n_tiles
        )
    publish_end(queue, slot)


@gluon.jit
def multiply(a, b, turn, turn_phase, CONSUMER: gl.constexpr):
    """One WGMMA of a wave, issued after the other consumer has issued its own.

    `turn` has a barrier for each consumer, at which the other one arrives when it has issued a
    WGMMA. So the consumers alternate, and one promotes while the other's WGMMA runs.
    """
    mbarrier.wait(turn.index(CONSUMER), turn_phase)
    p = start_product(a, b)
    mbarrier.arrive(turn.index(1 - CONSUMER), count=1)
    return warpgroup_mma_wait(0, [p]), turn_phase ^ 1


@gluon.jit
def contract(
    blocks, stage, turn_phase, ring, sb_values, turn,
    CONSUMER: gl.constexpr, WAVES: gl.constexpr, PRODUCTS: gl.constexpr,
):  # fmt: skip
    """One consumer's 64 rows of a tile, WAVES x 128 columns, promoted block by block."""
    left = gl.zeros([64, 128], gl.float32, WAVE)
    right = gl.zeros([64, 128], gl.float32, WAVE)
    for k in range(blocks):
        i = stage.index
        # Wait until all bytes of the block have arrived.
        mbarrier.wait(ring.full.index(i), stage.phase)
        a = ring.a.index(i).slice(CONSUMER * 64, 64)
        sa = ring.sa.index(i).slice(CONSUMER * 64, 64)
        # Of the 2 x 16 scales of B in a stage, this is wave 0's for block k; wave 1's comes 16
        # later. The second product counts its blocks from 0 again.
        if PRODUCTS == 1:
            sb = i * 32 + k % 16
        else:
            sb = i * 32 + (k - gl.where(k < blocks // 2, 0, blocks // 2)) % 16
        s = gl.expand_dims(sa.load(ROWS), 1) * sb_values.index(sb).load(WAVE)
        p, turn_phase = multiply(a, ring.b.index(2 * i), turn, turn_phase, CONSUMER)
        left += p * s
        if WAVES == 2:
            # Loading sa again is cheaper than keeping it in registers across the first wave.
            s = gl.expand_dims(sa.load(ROWS), 1) * sb_values.index(sb + 16).load(WAVE)
            p, turn_phase = multiply(a, ring.b.index(2 * i + 1), turn, turn_phase, CONSUMER)
            # The WGMMAs have read the stage, and its scales are in registers: the producer may
            # refill it while this consumer promotes.
            mbarrier.arrive(ring.empty.index(i), count=1)
            right += p * s
        else:
            mbarrier.arrive(ring.empty.index(i), count=1)
        stage = advance(stage, ring.a.shape[0])
    return left, right, stage, turn_phase


@gluon.jit
def consume(
    c, ring, sb_values, queue, turn, buffers, CONSUMER: gl.constexpr, PRODUCTS: gl.constexpr
):
    """A consumer warpgroup: computes and stores 64 rows of each tile in the queue."""
    stage = pipeline_start()
    # Consumer 0 goes first: waiting for phase 1 of a fresh barrier succeeds at once. Consumer 1
    # waits for phase 0, which completes when consumer 0 has issued its first WGMMA.
    turn_phase = gl.to_tensor(1 - CONSUMER)
    buffer = buffers.index(CONSUMER)
    tile, slot = receive_tile(queue, pipeline_start())
    while tile.blocks >= 0:
        row = tile.row + CONSUMER * 64
        if tile.waves == 2:
            left, right, stage, turn_phase = contract(
                tile.blocks, stage, turn_phase, ring, sb_values, turn, CONSUMER, 2, PRODUCTS
            )
            store_wave(c, buffer, left, tile, row, tile.column, 0)
            store_wave(c, buffer, right, tile, row, tile.column + 128, 0)
        else:
            left, right, stage, turn_phase = contract(
                tile.blocks, stage, turn_phase, ring, sb_values, turn, CONSUMER, 1, PRODUCTS
            )
            store_wave(c, buffer, left, tile, row, tile.column, 0)
        tile, slot = receive_tile(queue, slot)
    # Shared memory must outlive the TMA stores that read it.
    tma.store_wait(0)


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
def consume_rowwise(c, sa_ptr, sb_ptr, ring, queue, buffers, CONSUMER: gl.constexpr):
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


@kernel(do_not_specialize=["M", "E", "lda"])
def fprop_dgrad_kernel(
    a_desc, sa, b_desc, sb, a2_desc, sa2_desc, b2_desc, sb2_desc, c_desc, c_ptr,
    offs_ptr, ticket_ptr, M, N, K, E, lda,
    STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 x 256: two consumers of 64 rows each, two waves of 128 columns.

    sa and sb are TMA descriptors, and `lda` is the stride between the blocks of sa. Rowwise they
    are addresses, and `lda` is None. a2_desc to sb2_desc are the operands of a second blockwise
    product, or None. `launcher.c` takes tensors and numbers only, so the kernel takes operands one
    by one and makes aggregates of them.
    """
    ROWWISE: gl.constexpr = lda is None
    # Rowwise consumers read both waves of B as one box of 256 rows; the producer fills two of 128.
    B_BOXES: gl.constexpr = [STAGES, 256, 128] if ROWWISE else [2 * STAGES, 128, 128]
    a_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], a_desc.layout)
    b_ring = gl.allocate_shared_memory(gl.float8e4nv, B_BOXES, b_desc.layout)
    if not ROWWISE:
        sa_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 128], sa.layout)
        sb_values = gl.allocate_shared_memory(gl.float32, [STAGES * 32, 1, 1], SCALAR_2D)
        sb_ring = as_boxes(sb_values, sb, STAGES)
    buffers = gl.allocate_shared_memory(c_desc.dtype, [2, 64, 128], c_desc.layout)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    if not ROWWISE:
        turn = make_barriers(2, 1)
    queue = make_tile_queue()
    fence_async_shared()
    c = Output(c_desc, c_ptr, N)
    sizes = (M, N, K, E, lda)
    first = Operands(a_desc, None if ROWWISE else sa, b_desc, None if ROWWISE else sb)
    second = None if a2_desc is None else Operands(a2_desc, sa2_desc, b2_desc, sb2_desc)
    products = (first,) if a2_desc is None else (first, second)
    if ROWWISE:
        ring = Ring(a_ring, None, b_ring, None, full, empty)
        halves = Ring(a_ring, None, as_boxes(b_ring, b_desc, 2 * STAGES), None, full, empty)
        gl.warp_specialize(
            [
                (consume_rowwise, (c, sa, sb, ring, queue, buffers, 0)),
                (consume_rowwise, (c, sa, sb, ring, queue, buffers, 1)),
                (produce, (products, offs_ptr, ticket_ptr, sizes, halves, queue, BAND)),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[240, 24],
        )
    else:
        PRODUCTS: gl.constexpr = len(products)
        ring = Ring(a_ring, sa_ring, b_ring, sb_ring, full, empty)
        gl.warp_specialize(
            [
                (consume, (c, ring, sb_values, queue, turn, buffers, 0, PRODUCTS)),
                (consume, (c, ring, sb_values, queue, turn, buffers, 1, PRODUCTS)),
                (produce, (products, offs_ptr, ticket_ptr, sizes, ring, queue, BAND)),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[240, 24],
        )
