"""The K-grouped kernel, wgrad: c[e] = sum over a group's blocks of 128 of sa sb (a . b^T)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from titan_fp8.kernels.pipeline import (
    COLUMNS,
    ROWS,
    WAVE,
    advance,
    in_bands,
    leave_note,
    make_barriers,
    make_notes,
    multiply,
    read_note,
    store_wave,
    tma_load,
)


@gluon.jit
def next_group(group, end, block, blocks, offs_ptr, width, E):
    """From a group, its end token and where its blocks are, to those of the group after it.

    Each group begins at a fresh block of 128 columns. An end behind the last token is cut to the
    width of the operands, in which the columns that no token fills are zero.
    """
    block += blocks
    group += 1
    begin = end
    end = width
    if offs_ptr is not None:  # noqa: SIM102, decided while compiling
        if group < E:
            end = gl.maximum(begin, gl.minimum(gl.load(offs_ptr + group), width))
    blocks = gl.minimum(gl.cdiv(end - begin, 128), width // 128 - block)
    return group, end, block, blocks


@gluon.jit
def produce(
    a_desc,
    sa_desc,
    b_desc,
    sb_desc,
    offs_ptr,
    width,
    N,
    K,
    E,
    lda,
    ldb,
    ring,
    notes,
    BAND: gl.constexpr,
):
    """Works out the tiles, and loads their blocks as places in the ring become free."""
    a_ring, sa_ring, b_ring, sb_ring, full, empty = ring
    STAGES: gl.constexpr = b_ring.shape[0]
    BYTES: gl.constexpr = 128 * 128 + 128 * 4 + 256 * 4
    n_tiles = gl.cdiv(N, 256)
    k_tiles = gl.cdiv(K, 128)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    slot_phase = gl.to_tensor(0)
    zero = gl.to_tensor(0)
    tile = gl.program_id(0)
    group, end, block, blocks = next_group(zero - 1, zero, zero, zero, offs_ptr, width, E)
    while group < E:
        while tile < n_tiles * k_tiles:
            n, k = in_bands(tile, n_tiles, k_tiles, BAND)
            row = n * 256
            column = k * 128
            slot, slot_phase = leave_note(
                notes, slot, slot_phase, group * N + row, zero, group * N + N, column, blocks
            )
            both = row + 128 < N
            for i in range(block, block + blocks):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                bar = full.index(stage)
                mbarrier.expect(bar, BYTES + 2 * 128 * 128, pred=both)
                mbarrier.expect(bar, BYTES + 128 * 128, pred=both == 0)
                tma_load(b_desc, [column, i * 128], bar, b_ring.index(stage))
                tma_load(sb_desc, [i * ldb + column], bar, sb_ring.index(stage))
                tma_load(sa_desc, [i * lda + row], bar, sa_ring.index(stage))
                tma_load(a_desc, [row, i * 128], bar, a_ring.index(2 * stage))
                tma_load(a_desc, [row + 128, i * 128], bar, a_ring.index(2 * stage + 1), pred=both)
                stage, phase = advance(stage, phase, STAGES)
            tile += gl.num_programs(0)
        tile -= n_tiles * k_tiles
        group, end, block, blocks = next_group(group, end, block, blocks, offs_ptr, width, E)
    leave_note(notes, slot, slot_phase, zero, zero, zero, zero, zero - 1)


@gluon.jit
def contract(blocks, stage, phase, turn_phase, ring, turn, PART: gl.constexpr, WAVES: gl.constexpr):
    """A consumer's half of a tile: WAVES of 64 rows, 128 columns, promoted block by block."""
    a_ring, sa_ring, b_ring, sb_ring, full, empty = ring
    upper = gl.zeros([64, 128], gl.float32, WAVE)
    lower = gl.zeros([64, 128], gl.float32, WAVE)
    for _ in range(blocks):
        mbarrier.wait(full.index(stage), phase)
        a = a_ring.index(2 * stage).slice(PART * 64, 64)
        b = b_ring.index(stage)
        sa = sa_ring.index(stage)
        # Held in registers over both waves: the tensor cores want all that shared memory gives.
        sb = gl.expand_dims(sb_ring.index(stage).load(COLUMNS), 0)
        s = gl.expand_dims(sa.slice(PART * 64, 64).load(ROWS), 1)
        p, turn_phase = multiply(a, b, turn, turn_phase, PART)
        upper += p * sb * s
        if WAVES == 2:
            a = a_ring.index(2 * stage + 1).slice(PART * 64, 64)
            s = gl.expand_dims(sa.slice(128 + PART * 64, 64).load(ROWS), 1)
            p, turn_phase = multiply(a, b, turn, turn_phase, PART)
            mbarrier.arrive(empty.index(stage), count=1)
            lower += p * sb * s
        else:
            mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, b_ring.shape[0])
    return upper, lower, stage, phase, turn_phase


@gluon.jit
def consume(c_desc, c_ptr, N, K, E, ring, notes, turn, buffers, PART: gl.constexpr):
    """Computes and stores two waves of 64 rows of each tile of which there is a note."""
    BUFFERS: gl.constexpr = buffers.shape[0] // 2
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn_phase = gl.to_tensor(1 - PART)
    buffer = buffers.index(PART * BUFFERS)
    other = buffers.index(PART * BUFFERS + BUFFERS - 1)
    row, row_begin, row_end, column, blocks, slot, slot_phase = read_note(notes, stage, phase)
    while blocks >= 0:
        row += PART * 64
        if row - PART * 64 + 128 < row_end:
            upper, lower, stage, phase, turn_phase = contract(
                blocks, stage, phase, turn_phase, ring, turn, PART, 2
            )
            store_wave(
                c_desc, c_ptr, buffer, upper, row, row_begin, row_end, column, K, BUFFERS - 1
            )
            store_wave(
                c_desc, c_ptr, other, lower, row + 128, row_begin, row_end, column, K, BUFFERS - 1
            )
        else:
            upper, lower, stage, phase, turn_phase = contract(
                blocks, stage, phase, turn_phase, ring, turn, PART, 1
            )
            store_wave(c_desc, c_ptr, other, upper, row, row_begin, row_end, column, K, 0)
        row, row_begin, row_end, column, blocks, slot, slot_phase = read_note(
            notes, slot, slot_phase
        )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["width", "E", "lda", "ldb"])
def k_grouped_kernel(
    a_desc,
    sa_desc,
    b_desc,
    sb_desc,
    c_desc,
    c_ptr,
    offs_ptr,
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
    """Tiles of 256 x 128: two waves of 128 rows, of which each consumer has 64."""
    a_ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 128, 128], a_desc.layout)
    b_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], b_desc.layout)
    sa_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 256], sa_desc.layout)
    sb_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 128], sb_desc.layout)
    buffers = gl.allocate_shared_memory(c_desc.dtype, [2 * BUFFERS, 64, 128], c_desc.layout)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    turn = make_barriers(2, 1)
    notes = make_notes()
    fence_async_shared()
    ring = (a_ring, sa_ring, b_ring, sb_ring, full, empty)
    gl.warp_specialize(
        [
            (consume, (c_desc, c_ptr, N, K, E, ring, notes, turn, buffers, 0)),
            (consume, (c_desc, c_ptr, N, K, E, ring, notes, turn, buffers, 1)),
            (
                produce,
                (
                    a_desc,
                    sa_desc,
                    b_desc,
                    sb_desc,
                    offs_ptr,
                    width,
                    N,
                    K,
                    E,
                    lda,
                    ldb,
                    ring,
                    notes,
                    BAND,
                ),
            ),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )
