"""The blockwise wgrad kernel, K-grouped: c[e] = Σ over a group's blocks of 128 of sa sb (a bᵀ).

`gemm_blockwise.py` explains the structure.
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
    ROWS,
    WAVE,
    advance,
    in_bands,
    make_barriers,
    make_tile_queue,
    next_ticket,
    part_of,
    publish_tile,
    receive_tile,
    start_product,
    store_wave,
    tma_load,
)
from titan_fp8.kernels.hopper.group_ends import next_group
from titan_fp8.kernels.launch import kernel


@gluon.jit
def produce(operands, offs_ptr, ticket_ptr, sizes, ring, queue, BAND: gl.constexpr):
    """The producer warp: finds the program's tiles and loads their blocks as stages become free.

    Rowwise products have no descriptors of scales, and the queue counts halves of blocks.
    """
    a_desc, sa_desc, b_desc, sb_desc = operands
    width, N, K, E, lda, ldb = sizes
    a_ring, sa_ring, b_ring, sb_ring, full, empty = ring
    STAGES: gl.constexpr = b_ring.shape[0]
    SCALES: gl.constexpr = 0 if sa_desc is None else 128 * 4 + 256 * 4
    BYTES: gl.constexpr = 128 * 128 + SCALES
    n_tiles = gl.cdiv(N, 256)
    k_tiles = gl.cdiv(K, 128)
    zero = gl.to_tensor(0)
    stage, phase, slot, slot_phase, first = zero, zero, zero, zero, zero
    group, end, block, blocks, halves = next_group(zero - 1, zero, zero, zero, offs_ptr, width, E)
    ticket = next_ticket(ticket_ptr, gl.program_id(0) - gl.num_programs(0))
    tile, part = part_of(ticket, E * n_tiles * k_tiles)
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
        length = halves if sa_desc is None else blocks
        slot, slot_phase = publish_tile(
            queue, slot, slot_phase, top + row, top, top + N, column, length, waves, group
        )
        for i in range(block, block + blocks):
            # Both consumers have released the stage; in the first round nobody holds it.
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            # `full` completes when all bytes have arrived; the second wave is optional.
            mbarrier.expect(bar, BYTES + 2 * 128 * 128, pred=both)
            mbarrier.expect(bar, BYTES + 128 * 128, pred=both == 0)
            tma_load(b_desc, [column, i * 128], bar, b_ring.index(stage))
            if sa_desc is not None:
                tma_load(sb_desc, [i * ldb + column], bar, sb_ring.index(stage))
                tma_load(sa_desc, [i * lda + row], bar, sa_ring.index(stage))
            tma_load(a_desc, [row, i * 128], bar, a_ring.index(2 * stage))
            tma_load(a_desc, [row + 128, i * 128], bar, a_ring.index(2 * stage + 1), pred=both)
            stage, phase = advance(stage, phase, STAGES)
        ticket = next_ticket(ticket_ptr, ticket)
        tile, part = part_of(ticket, E * n_tiles * k_tiles)
    publish_tile(queue, slot, slot_phase, zero, zero, zero, zero, zero - 1, zero, zero)


@gluon.jit
def contract(blocks, stage, phase, ring, PART: gl.constexpr, WAVES: gl.constexpr):
    """One consumer's rows of a tile, WAVES x 64 by 128 columns, promoted block by block."""
    a_ring, sa_ring, b_ring, sb_ring, full, empty = ring
    upper = gl.zeros([64, 128], gl.float32, WAVE)
    lower = gl.zeros([64, 128], gl.float32, WAVE)
    for _ in range(blocks):
        mbarrier.wait(full.index(stage), phase)
        b = b_ring.index(stage)
        p = start_product(a_ring.index(2 * stage).slice(PART * 64, 64), b)
        # In registers for both waves: the WGMMAs need nearly all of the shared-memory bandwidth.
        sb = gl.expand_dims(sb_ring.index(stage).load(COLUMNS), 0)
        sa = sa_ring.index(stage)
        s = gl.expand_dims(sa.slice(PART * 64, 64).load(ROWS), 1)
        p = warpgroup_mma_wait(0, [p])
        upper += p * sb * s
        if WAVES == 2:
            p = start_product(a_ring.index(2 * stage + 1).slice(PART * 64, 64), b)
            s = gl.expand_dims(sa.slice(128 + PART * 64, 64).load(ROWS), 1)
            p = warpgroup_mma_wait(0, [p])
            mbarrier.arrive(empty.index(stage), count=1)
            lower += p * sb * s
        else:
            mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, b_ring.shape[0])
    return upper, lower, stage, phase


@gluon.jit
def consume(c_desc, c_ptr, K, ring, queue, buffers, PART: gl.constexpr):
    """A consumer warpgroup: computes and stores 64 rows of each wave of the tiles in the queue."""
    LAST: gl.constexpr = buffers.shape[0] // 2 - 1
    zero = gl.to_tensor(0)
    stage, phase = zero, zero
    first = buffers.index(PART * (LAST + 1))
    last = buffers.index(PART * (LAST + 1) + LAST)
    row, begin, end, column, blocks, waves, _, slot, slot_phase = receive_tile(queue, zero, zero)
    while blocks >= 0:
        mine = row + PART * 64
        if waves == 2:
            upper, lower, stage, phase = contract(blocks, stage, phase, ring, PART, 2)
            store_wave(c_desc, c_ptr, first, upper, mine, begin, end, column, K, LAST)
            store_wave(c_desc, c_ptr, last, lower, mine + 128, begin, end, column, K, LAST)
        else:
            upper, lower, stage, phase = contract(blocks, stage, phase, ring, PART, 1)
            store_wave(c_desc, c_ptr, last, upper, mine, begin, end, column, K, 0)
        row, begin, end, column, blocks, waves, _, slot, slot_phase = receive_tile(
            queue, slot, slot_phase
        )
    tma.store_wait(0)


@kernel(do_not_specialize=["width", "E", "lda", "ldb"])
def blockwise_wgrad_kernel(
    a_desc,
    sa_desc,
    b_desc,
    sb_desc,
    c_desc,
    c_ptr,
    offs_ptr,
    ticket_ptr,
    width,
    N,
    K,
    E,
    lda,
    ldb,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    BAND: gl.constexpr,
):
    """Tiles of 256 x 128: two waves of 128 rows, of which each consumer computes 64."""
    a_ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 128, 128], a_desc.layout)
    b_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], b_desc.layout)
    sa_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 256], sa_desc.layout)
    sb_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 128], sb_desc.layout)
    buffers = gl.allocate_shared_memory(c_desc.dtype, [2 * BUFFERS, 64, 128], c_desc.layout)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    queue = make_tile_queue()
    fence_async_shared()
    ring = (a_ring, sa_ring, b_ring, sb_ring, full, empty)
    operands = (a_desc, sa_desc, b_desc, sb_desc)
    sizes = (width, N, K, E, lda, ldb)
    gl.warp_specialize(
        [
            (consume, (c_desc, c_ptr, K, ring, queue, buffers, 0)),
            (consume, (c_desc, c_ptr, K, ring, queue, buffers, 1)),
            (produce, (operands, offs_ptr, ticket_ptr, sizes, ring, queue, BAND)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )
