"""The blockwise fprop and dgrad kernel, M-grouped.

c[m] is the sum over blocks of 128 of sa sb (a[m] b[e]ᵀ), where e is the group of row m. The sum of
two products of the same shape is computed as one with twice the contraction. `gemm_blockwise.py`
explains the structure.
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
    ROWS,
    SCALAR_2D,
    WAVE,
    advance,
    as_boxes,
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
from titan_fp8.kernels.hopper.group_ends import group_of_tile
from titan_fp8.kernels.launch import kernel


@gluon.jit
def part_of_dense(ticket, offs_ptr, M, n_tiles):
    """`part_of` for a dense GEMM; with groups the number of tiles is unknown, and all are whole."""
    if offs_ptr is None:
        return part_of(ticket, gl.cdiv(M, 128) * n_tiles)
    else:
        return ticket, ticket * 0 + 2


@gluon.jit
def produce(
    operands, offs_ptr, ticket_ptr, sizes, ring, queue, BAND: gl.constexpr, PRODUCTS: gl.constexpr
):
    """The producer warp: finds the program's tiles and loads their blocks as stages become free.

    `operands`: the TMA descriptors of a, sa, b and sb, for each of PRODUCTS products. Rowwise
    products have no descriptors of scales.
    """
    M, N, K, E, lda = sizes
    a_ring, sa_ring, b_ring, sb_ring, full, empty = ring
    STAGES: gl.constexpr = a_ring.shape[0]
    SCALES: gl.constexpr = 0 if operands[1] is None else 128 * 4 + 2 * 16 * 4
    BYTES: gl.constexpr = 128 * 128 + SCALES
    n_tiles = gl.cdiv(N, 256)
    zero = gl.to_tensor(0)
    stage, phase, slot, slot_phase = zero, zero, zero, zero
    ticket = next_ticket(ticket_ptr, gl.program_id(0) - gl.num_programs(0))
    tile, part = part_of_dense(ticket, offs_ptr, M, n_tiles)
    group, first, row_begin, row_end = group_of_tile(
        tile, zero - 1, zero, zero, zero, offs_ptr, M, E, n_tiles
    )
    while group <= E:
        top = row_begin // 4 * 4
        m, n = in_bands(tile - first, gl.cdiv(row_end - top, 128), n_tiles, BAND)
        row = top + m * 128
        column = n * 256 + gl.where(part == 1, 128, 0)
        both = (part == 2) & (column + 128 < N)
        waves = gl.where(both, 2, 1)
        blocks = gl.where(group < E, gl.cdiv(K, 128), 0)
        slot, slot_phase = publish_tile(
            queue, slot, slot_phase,
            row, row_begin, row_end, column, PRODUCTS * blocks, waves, group,
        )  # fmt: skip
        b_row = group * N + column
        sb_row = group * gl.cdiv(N, 128) + column // 128
        for i in gl.static_range(PRODUCTS):
            a_desc, sa_desc = operands[4 * i], operands[4 * i + 1]
            b_desc, sb_desc = operands[4 * i + 2], operands[4 * i + 3]
            for k in range(blocks):
                # Both consumers have released the stage; in the first round nobody holds it.
                mbarrier.wait(empty.index(stage), phase ^ 1)
                bar = full.index(stage)
                # `full` completes when all bytes have arrived; the second wave is optional.
                mbarrier.expect(bar, BYTES + 2 * 128 * 128, pred=both)
                mbarrier.expect(bar, BYTES + 128 * 128, pred=both == 0)
                tma_load(a_desc, [row, k * 128], bar, a_ring.index(stage))
                if sa_desc is not None:
                    tma_load(sa_desc, [k * lda + row], bar, sa_ring.index(stage))
                    tma_load(sb_desc, [sb_row, k // 16 * 16], bar, sb_ring.index(stage))
                tma_load(b_desc, [b_row, k * 128], bar, b_ring.index(2 * stage))
                tma_load(
                    b_desc, [b_row + 128, k * 128], bar, b_ring.index(2 * stage + 1), pred=both
                )
                stage, phase = advance(stage, phase, STAGES)
        ticket = next_ticket(ticket_ptr, ticket)
        tile, part = part_of_dense(ticket, offs_ptr, M, n_tiles)
        group, first, row_begin, row_end = group_of_tile(
            tile, group, first, row_begin, row_end, offs_ptr, M, E, n_tiles
        )
    publish_tile(queue, slot, slot_phase, zero, zero, zero, zero, zero - 1, zero, zero)


@gluon.jit
def multiply(a, b, turn, turn_phase, PART: gl.constexpr):
    """One WGMMA of a wave, issued after the other consumer has issued its own.

    `turn` has a barrier for each consumer, at which the other one arrives when it has issued a
    WGMMA. So the tensor cores alternate, and one consumer promotes while the other's WGMMA runs.
    """
    mbarrier.wait(turn.index(PART), turn_phase)
    p = start_product(a, b)
    mbarrier.arrive(turn.index(1 - PART), count=1)
    return warpgroup_mma_wait(0, [p]), turn_phase ^ 1


@gluon.jit
def contract(
    blocks, stage, phase, turn_phase, ring, sb_values, turn,
    PART: gl.constexpr, WAVES: gl.constexpr, PRODUCTS: gl.constexpr,
):  # fmt: skip
    """One consumer's 64 rows of a tile, WAVES x 128 columns, promoted block by block."""
    a_ring, sa_ring, b_ring, _, full, empty = ring
    left = gl.zeros([64, 128], gl.float32, WAVE)
    right = gl.zeros([64, 128], gl.float32, WAVE)
    for k in range(blocks):
        mbarrier.wait(full.index(stage), phase)
        a = a_ring.index(stage).slice(PART * 64, 64)
        sa = sa_ring.index(stage).slice(PART * 64, 64)
        if PRODUCTS == 1:
            place = stage * 32 + k % 16
        else:
            place = stage * 32 + (k - gl.where(k < blocks // 2, 0, blocks // 2)) % 16
        s = gl.expand_dims(sa.load(ROWS), 1) * sb_values.index(place).load(WAVE)
        p, turn_phase = multiply(a, b_ring.index(2 * stage), turn, turn_phase, PART)
        left += p * s
        if WAVES == 2:
            # Loading sa again is cheaper than a register that is live across the first wave.
            s = gl.expand_dims(sa.load(ROWS), 1) * sb_values.index(place + 16).load(WAVE)
            p, turn_phase = multiply(a, b_ring.index(2 * stage + 1), turn, turn_phase, PART)
            mbarrier.arrive(empty.index(stage), count=1)
            right += p * s
        else:
            mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, a_ring.shape[0])
    return left, right, stage, phase, turn_phase


@gluon.jit
def consume(
    c_desc, c_ptr, N, ring, sb_values, queue, turn, buffers,
    PART: gl.constexpr, PRODUCTS: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: computes and stores 64 rows of each tile in the queue."""
    zero = gl.to_tensor(0)
    stage, phase = zero, zero
    turn_phase = gl.to_tensor(1 - PART)
    buffer = buffers.index(PART)
    row, begin, end, column, blocks, waves, _, slot, slot_phase = receive_tile(queue, zero, zero)
    while blocks >= 0:
        mine = row + PART * 64
        if waves == 2:
            left, right, stage, phase, turn_phase = contract(
                blocks, stage, phase, turn_phase, ring, sb_values, turn, PART, 2, PRODUCTS
            )
            store_wave(c_desc, c_ptr, buffer, left, mine, begin, end, column, N, 0)
            store_wave(c_desc, c_ptr, buffer, right, mine, begin, end, column + 128, N, 0)
        else:
            left, right, stage, phase, turn_phase = contract(
                blocks, stage, phase, turn_phase, ring, sb_values, turn, PART, 1, PRODUCTS
            )
            store_wave(c_desc, c_ptr, buffer, left, mine, begin, end, column, N, 0)
        row, begin, end, column, blocks, waves, _, slot, slot_phase = receive_tile(
            queue, slot, slot_phase
        )
    tma.store_wait(0)


@kernel(do_not_specialize=["M", "E", "lda"])
def blockwise_fprop_dgrad_kernel(
    a_desc,
    sa_desc,
    b_desc,
    sb_desc,
    a2_desc,
    sa2_desc,
    b2_desc,
    sb2_desc,
    c_desc,
    c_ptr,
    offs_ptr,
    M,
    N,
    K,
    E,
    lda,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
):
    """Tiles of 128 x 256: two consumers of 64 rows each, two waves of 128 columns.

    a2_desc to sb2_desc are the operands of a second product, or None.
    """
    a_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], a_desc.layout)
    b_ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 128, 128], b_desc.layout)
    sa_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 128], sa_desc.layout)
    sb_values = gl.allocate_shared_memory(gl.float32, [STAGES * 32, 1, 1], SCALAR_2D)
    sb_ring = as_boxes(sb_values, sb_desc, STAGES)
    buffers = gl.allocate_shared_memory(c_desc.dtype, [2, 64, 128], c_desc.layout)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    turn = make_barriers(2, 1)
    queue = make_tile_queue()
    fence_async_shared()
    ring = (a_ring, sa_ring, b_ring, sb_ring, full, empty)
    PRODUCTS: gl.constexpr = 1 if a2_desc is None else 2
    operands = (a_desc, sa_desc, b_desc, sb_desc, a2_desc, sa2_desc, b2_desc, sb2_desc)
    sizes = (M, N, K, E, lda)
    gl.warp_specialize(
        [
            (consume, (c_desc, c_ptr, N, ring, sb_values, queue, turn, buffers, 0, PRODUCTS)),
            (consume, (c_desc, c_ptr, N, ring, sb_values, queue, turn, buffers, 1, PRODUCTS)),
            (produce, (operands, offs_ptr, None, sizes, ring, queue, BAND, PRODUCTS)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )
