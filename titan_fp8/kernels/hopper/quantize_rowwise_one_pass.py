"""Rowwise quantizer of columns without groups (mostly of weights), which reads x once.

A scale covers all tokens of a column, far more than a program can hold. The columns are cut into
stripes of 32 words, and a stripe into tiles, one per program. A program holds its tile, half in
shared memory and half in registers, publishes the maxima of its columns in global memory, waits
until all programs of the stripe have published theirs, and casts its tile.

CUDA promises no order of programs, and other kernels may hold most SMs, so the programs of a stripe
may not be on the GPU at the same time. The wait is therefore bounded. A program that gives up skips
its tile, and the last program of the stripe to publish casts the skipped tiles. So the kernel ends
whatever else runs on the GPU, and needs no second launch. tests/kernels/test_column_protocol.py
checks the protocol in every order of steps.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from titan_fp8.kernels.hopper.quantize_cast import (
    amax_words,
    as_words,
    cast_columns,
    channel_bits,
    magnitudes,
    max_magnitudes,
    scale_of,
)
from titan_fp8.kernels.hopper.quantize_tile import (
    PART_WORDS,
    SHARED,
    TileLayouts,
    column_layouts,
    start_load,
    store_columns,
    tile_layout,
    transpose,
    wait_for_loads,
)
from titan_fp8.kernels.launch import kernel, multiprocessors
from titan_fp8.layouts import E4M3, cdiv, round_up

PARTS = 2
"""Parts of 128 tokens that a program keeps in shared memory. It keeps as many in registers."""
TILE_TOKENS = 2 * PARTS * 128
"""Tokens of a tile, of which it has PART_WORDS words each."""
LAYOUTS = TileLayouts(SHARED, tile_layout((1, 4), (4, 8), (4, 1), (8, 1)), None, *column_layouts(4))
WARPS = 4
MAXNREG = 96
"""Registers per thread with which five programs fit on an SM."""
POLLS = 128
"""Polls before a program gives up, each after a pause of about 0.6 us."""
SKIP = gl.constexpr(1 << 16)
"""What a program that gives up adds to the counter; a stripe has fewer programs than that."""
LINE = gl.constexpr(32)
"""int32 numbers in a line of the L2 cache."""

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Synchronizes the threads of a program: Triton 3.9's name or 3.6's."""


@gluon.jit
def publish_amax(amax, most, word, K, publishes, PACK: gl.constexpr):
    """If `publishes`, combines `most`, words of maxima from `word` on, into amax (K,).

    The maxima are the bits of magnitudes, so `atomic_max` on integers combines them, with the same
    result in any order. Before that, neighboring lanes get neighboring channels, so that one
    transaction serves the eight maxima of a 32-byte sector (eight times as fast).
    """
    WORDS: gl.constexpr = most.shape[0]
    if PACK == 2:
        most = gl.join(channel_bits(most, 0, PACK), channel_bits(most, 1, PACK))
        most = gl.reshape(most, [PACK * WORDS])
    coalesced: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    j = gl.arange(0, PACK * WORDS, coalesced)
    most = gl.convert_layout(most, coalesced)
    inside = (j < K - word * PACK) & publishes
    gl.atomic_max(amax + (word * PACK + j), most, mask=inside, sem="relaxed")


@gluon.jit
def load_amax(amax, word, KW, valid, PACK: gl.constexpr, TRANSPOSED: gl.constexpr):
    """The maxima of the first and of the last channel of each word, as bits; zeros unless `valid`.

    Read from the L2 cache, because the L1 cache may hold values that other programs have changed.
    """
    j = gl.arange(0, TRANSPOSED.shape[0], gl.SliceLayout(1, TRANSPOSED))
    channel = amax + (word + j) * PACK
    inside = (j < KW - word) & valid
    first = gl.load(channel, mask=inside, other=0, cache_modifier=".cg")
    return first, gl.load(channel + (PACK - 1), mask=inside, other=0, cache_modifier=".cg")


@gluon.jit
def store_scales(amax, s_t, word, KW, PACK: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Writes the scales of the channels of words, given their maxima from `load_amax`."""
    j = gl.arange(0, TRANSPOSED.shape[0], gl.SliceLayout(1, TRANSPOSED))
    for i in gl.static_range(PACK):
        scale, _ = scale_of(amax[i])
        gl.store(s_t + ((word + j) * PACK + i), scale, mask=j < KW - word)


@gluon.jit
def cast_part(
    part, amax, q_t, tokens, column, columns, word, K, MT,
    PACK: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Casts a part, 128 places by the channels of its words, from `word` on, into q_t (K, MT).

    `amax` is from `load_amax`. Writes the first `columns` columns from `column` on: the first
    `tokens` tokens, then zeros.
    """
    words = transpose(part, TRANSPOSED)
    t = gl.arange(0, TRANSPOSED.shape[1], gl.SliceLayout(0, TRANSPOSED))
    mask = gl.where(t < tokens, -1, 0).to(gl.int8)[None, :]
    for i in gl.static_range(PACK):
        _, r = scale_of(amax[i])
        values = cast_columns(words, r[:, None], mask, i, PACK)
        store_columns(q_t, values, column, columns, word * PACK + i, PACK, K, MT)


@gluon.jit
def pause():
    """Sleeps for about 0.6 us."""
    gl.inline_asm_elementwise(
        "nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(600)], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def record_size(tiles):
    """The int32 numbers in a stripe's record, a counter and a flag per tile, in whole lines."""
    return (tiles + LINE) // LINE * LINE


# Not inlined, because its addresses would take registers from all programs.
@gluon.jit(noinline=True)
def _cast_skipped_tiles(
    x, amax_of_stripe, flags, q_t, tiles, word, M, MT, K, KW,
    PACK: gl.constexpr, PARTS: gl.constexpr, LAYOUTS: gl.constexpr,
):  # fmt: skip
    """Casts the skipped tiles of a stripe (flag 1), which it loads again, 128 tokens at a time.

    `x` and `q_t` point to the expert's matrices.
    """
    LOAD: gl.constexpr = LAYOUTS.load
    TRANSPOSED: gl.constexpr = LAYOUTS.transposed
    words = gl.allocate_shared_memory(gl.int32, [128, PART_WORDS], LAYOUTS.shared)
    for part in range(2 * PARTS * tiles):
        skipped = gl.load(flags + part // (2 * PARTS), cache_modifier=".cg")
        if skipped != 0:
            # `skipped` is 1. This factor makes addresses depend on the iteration. The compiler
            # would otherwise compute all before the loop, more than fit into registers.
            row_words = KW * skipped
            row = part * 128
            start_load(words, x, 0, row, M - row, word, row_words, LOAD)
            wait_for_loads()
            amax = load_amax(amax_of_stripe, word, row_words, True, PACK, TRANSPOSED)
            cast_part(
                words.load(LAYOUTS.columns), amax, q_t, M - row, row, MT - row,
                word, K, MT * skipped, PACK, TRANSPOSED,
            )  # fmt: skip


@kernel(do_not_specialize=["M", "tiles", "blocks"])
def quantize_columns_one_pass_kernel(
    x, amax, q_t, s_t, M, MT, K, KW, tiles, blocks,
    PACK: gl.constexpr, PARTS: gl.constexpr, POLLS: gl.constexpr, LAYOUTS: gl.constexpr,
):  # fmt: skip
    """Publishes the maxima of a tile, waits for those of its stripe, casts the tile.

    After the maxima of all columns, `amax` has a record for each stripe: a counter, and for each
    tile a flag that is 1 if it was skipped. The counter is the number of programs that have
    published their maxima, plus SKIP for each that has given up waiting. All start at zero.

    All programs see the updates of a counter in one order. So each tile is in one of two cases:

    - Its program read a counter with all programs published, and casts the tile.
    - Its program added SKIP before the last program of the stripe published. That program sees
      SKIP in the counter and then the flag, and casts the tile.

    This holds in any order of programs, however few of them are on the GPU at once.
    """
    LOAD: gl.constexpr = LAYOUTS.load
    COLUMNS: gl.constexpr = LAYOUTS.columns
    TRANSPOSED: gl.constexpr = LAYOUTS.transposed
    # The programs of a stripe have consecutive numbers, so that they usually run together.
    tile = gl.program_id(0) % tiles
    stripe = gl.program_id(0) // tiles
    expert = (stripe // blocks).to(gl.int64)
    word = stripe % blocks * PART_WORDS
    row = tile * (2 * PARTS * 128)
    experts = gl.num_programs(0) // (tiles * blocks)
    counter = amax + (experts * K + stripe * record_size(tiles))
    flags = counter + 1
    x += expert * M * KW
    amax += expert * K
    q_t += expert * K * MT

    # Load the tile and take its maxima. Shared memory bounds the bytes in flight, so the first half
    # of the tile moves to registers, which are idle during the wait, to make room for the second.
    words = gl.allocate_shared_memory(gl.int32, [PARTS * 128, PART_WORDS], LAYOUTS.shared)
    for i in gl.static_range(PARTS):
        start_load(words.slice(i * 128, 128), x, i * 128, row, M - row, word, KW, LOAD)
        async_copy.commit_group()
    most = gl.full([128, PART_WORDS], 0, gl.int32, COLUMNS)
    held = ()
    for i in gl.static_range(PARTS):
        async_copy.wait_group(PARTS - 1)
        part = words.slice(i * 128, 128)
        held = held + (part.load(COLUMNS),)  # type: ignore[assignment]
        start_load(part, x, (PARTS + i) * 128, row, M - row, word, KW, LOAD)
        async_copy.commit_group()
        most = max_magnitudes(most, magnitudes(held[i], PACK), PACK)
    async_copy.wait_group(0)
    for i in gl.static_range(PARTS):
        part = words.slice(i * 128, 128).load(COLUMNS)
        most = max_magnitudes(most, magnitudes(part, PACK), PACK)
    publish_amax(amax, amax_words(most, 0, PACK), word, K, True, PACK)
    barrier()  # All threads have published before one of them counts the program.

    # Count this program, then wait for the others of the stripe. One thread polls, with pauses,
    # because the L2 cache serves atomics on an address one after the other.
    published = gl.atomic_add(counter, 1, sem="acq_rel") + 1
    count = published
    polls = 0
    while (count < tiles) & (polls < POLLS):  # Also ends when another program has added SKIP.
        pause()
        count = gl.atomic_add(counter, 0, sem="acquire")
        polls += 1
    if count % SKIP < tiles:
        gl.store(flags + tile, 1)
        barrier()  # The flag is written before the counter says so.
        count = gl.atomic_add(counter, SKIP, sem="acq_rel")  # By now all may have published.
    barrier()  # No thread reads the maxima before the polling one has seen that they are complete.

    # All programs of the stripe have published: cast the tile, part by part.
    if count % SKIP == tiles:
        maxima = load_amax(amax, word, KW, True, PACK, TRANSPOSED)
        for i in gl.static_range(2 * PARTS):
            values = held[i] if i < PARTS else words.slice((i - PARTS) * 128, 128).load(COLUMNS)
            place = i * 128
            cast_part(
                values, maxima, q_t, M - row - place, row + place, MT - row - place,
                word, K, MT, PACK, TRANSPOSED,
            )  # fmt: skip
        if published % SKIP == tiles:  # This program was the last of its stripe to publish.
            store_scales(maxima, s_t + expert * K, word, KW, PACK, TRANSPOSED)
            if published > SKIP:
                _cast_skipped_tiles(
                    x, amax, flags, q_t, tiles, word, M, MT, K, KW, PACK, PARTS, LAYOUTS
                )


def fits_one_pass(width: int, device: torch.device) -> bool:
    """Whether a stripe of `width` tokens has at most one program per SM, of the five that fit.

    So its programs are likely to run together, even beside other kernels.
    """
    return width <= TILE_TOKENS * multiprocessors(device)


def quantize_columns_in_one_pass(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Quantizes the columns of x (..., M, K), transposed: q_t (..., K, width) and s_t (..., K)."""
    *lead, m, k = x.shape
    pack = 4 // x.element_size()
    q_t = x.new_empty(*lead, k, width, dtype=E4M3)
    s_t = x.new_empty(*lead, k, dtype=torch.float32)
    tiles, blocks = max(1, cdiv(width, TILE_TOKENS)), cdiv(k // pack, PART_WORDS.value)
    stripes = blocks * (s_t.numel() // k)
    records = stripes * round_up(tiles + 1, LINE.value)
    amax = torch.zeros(s_t.numel() + records, dtype=torch.int32, device=x.device)
    quantize_columns_one_pass_kernel[(tiles * stripes,)](
        as_words(x), amax, (q_t, torch.int8), s_t, m, width, k, k // pack, tiles, blocks,
        pack, PARTS, POLLS, LAYOUTS, maxnreg=MAXNREG, num_warps=WARPS,
    )  # fmt: skip
    return q_t, s_t
