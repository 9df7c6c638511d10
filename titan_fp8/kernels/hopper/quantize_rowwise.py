"""Rowwise quantisers: rows, columns written transposed, both, and columns of two tensors at once.

Rows. A program holds some whole rows, four 16-byte loads a thread: one read, one pass. Rows of more
than 32768 words (128 KiB) do not fit and are read twice.

Columns of groups. A scale stands for all tokens of a group, which no program can hold, so x is
read twice. A first kernel takes the maxima of some tokens in registers and then adds them to those
of the group by `atomic_max` on the bits of the magnitudes, whose result does not depend on the
order. A second casts and transposes (`tile.py`), last tiles first, for they are still in the L2
cache; it also writes the scales. Lanes publish neighbouring channels: a 32-byte sector takes eight
maxima at once, which made that step eight times as fast.

Columns without groups, of weights above all. One kernel, one read: a program keeps its tile, half
of it in shared memory and half in registers, publishes its column maxima, and waits until the other
programs of its stripe have published theirs. CUDA promises neither an order of programs nor that
all of a stripe fit on the GPU at once, so the wait is bounded: a program that gives up skips its
tile, and the last program of the stripe to publish casts the skipped tiles. Nobody waits for a
program that has not started, and no second launch is needed. Columns with too many tiles to be on
the GPU at once take the two kernels.

Rows and columns. The first kernel quantises whole rows as it takes the maxima: two reads for both.

Two tensors of the same groups, the gradient and the activation of wgrad, share the launches of both
kernels: the programs of the second tensor follow those of the first. With the gradient's rows they
share that of the second.

Measured on an H200 (2026-11-23, torch 2.11.0+cu130, Triton 3.6.0), (32768, 7168), us and share of
the copy bandwidth, 4180 GB/s, two reads counted for columns; see docs/log.md.

    op                     bf16 us    %    FP32 us    %
    rows                       166  101        269  104
    columns of 8 groups        285   99
    columns without groups     194  145        303  167
    rows and columns           366   92        595   95
"""

import functools
import math

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from titan_fp8.kernels.hopper.quantize_cast import (
    as_words,
    cast_columns,
    cast_rows,
    channel_bits,
    larger,
    largest,
    largest_bits,
    magnitudes,
    scale_of,
    words_of,
)
from titan_fp8.kernels.hopper.quantize_tile import (
    MAXNREG,
    PART_WORDS,
    TILE,
    TILED,
    columns_layouts,
    fetch,
    fetched,
    flip,
    group_lanes,
    layout,
    load_words,
    locate,
    store_columns,
    store_rows,
    tiles_of,
)
from titan_fp8.kernels.launch import Typed, kernel, multiprocessors
from titan_fp8.reference import E4M3, ROW_ALIGNMENT, cdiv, round_up, transposed_width

ROW_WORDS = 32768
"""The longest row that a program holds."""
ROW_COLUMN_WORDS = 8192
"""The longest beside the next row and the maxima of its columns."""
ROW_COLUMN_TOKENS = 32
"""Tokens of which a program quantises the rows and takes the maxima of the columns."""
MAXIMA_TOKENS = 256
"""Tokens of which a program takes the maxima of some columns alone."""
MAXIMA = layout((1, 4), (1, 32), (4, 1), (8, 1))
"""How it holds 32 of them."""
PEER_PARTS = 2
"""Parts of 128 tokens that a program that waits for others keeps in shared memory, and as many in
registers."""
PEER_TOKENS = 2 * PEER_PARTS * 128
"""Its tokens, PART_WORDS words of each. A stripe has no more of these programs than there are SMs,
though an SM has room for five: other kernels want some, too."""
POLLS = 128
"""Polls before a program that waits for others gives up, 0.6 us apart or more."""
SKIP = gl.constexpr(1 << 16)
"""What a program that gives up adds to its stripe's counter; more than a stripe has programs."""
PEER_MAXNREG = 96
"""For five."""
PEER = {
    "TILE": TILE,
    "FETCH": layout((1, 4), (4, 8), (4, 1), (8, 1)),
    **columns_layouts(4),
    "num_warps": 4,
}
LINE = gl.constexpr(32)
"""Numbers in a line of the L2 cache."""

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""The threads of a program wait for each other: Triton 3.9's name or 3.6's."""


@kernel(do_not_specialize=["R"])
def _row_kernel(x, q, s, R, KW, PACK: gl.constexpr, WORDS: gl.constexpr):
    row = gl.program_id(0) * WORDS.shape[0]
    words = load_words(x, row, R - row, 0, KW, WORDS)
    scale, r = scale_of(largest_bits(words, PACK))
    i = gl.arange(0, WORDS.shape[0], gl.SliceLayout(1, WORDS))
    gl.store(s + row + i, scale, mask=i < R - row)
    store_rows(q, cast_rows(words, r[:, None], PACK), None, row, R - row, 0, KW)


@kernel(do_not_specialize=["R"])
def _long_row_kernel(x, q, s, R, KW, PACK: gl.constexpr, WORDS: gl.constexpr):
    row = gl.program_id(0) * WORDS.shape[0]
    most = gl.full(WORDS.shape, 0, gl.int32, WORDS)
    for word in range(0, KW, WORDS.shape[1]):
        words = load_words(x, row, R - row, word, KW, WORDS)
        most = larger(most, magnitudes(words, PACK), PACK)
    scale, r = scale_of(largest_bits(most, PACK))
    i = gl.arange(0, WORDS.shape[0], gl.SliceLayout(1, WORDS))
    gl.store(s + row + i, scale, mask=i < R - row)
    for word in range(0, KW, WORDS.shape[1]):
        words = load_words(x, row, R - row, word, KW, WORDS)
        store_rows(q, cast_rows(words, r[:, None], PACK), None, row, R - row, word, KW)


@gluon.jit
def publish(amax, most, word, K, known, PACK: gl.constexpr):
    """Adds the maxima of some tokens to those of all of them, if there are any."""
    WORDS: gl.constexpr = most.shape[0]
    if PACK == 2:
        most = gl.join(channel_bits(most, 0, PACK), channel_bits(most, 1, PACK))
        most = gl.reshape(most, [PACK * WORDS])
    lined: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    j = gl.arange(0, PACK * WORDS, lined)
    most = gl.convert_layout(most, lined)
    inside = (j < K - word * PACK) & known
    gl.atomic_max(amax + (word * PACK + j), most, mask=inside, sem="relaxed")


@gluon.jit
def pause():
    """Lets about 0.6 us pass."""
    gl.inline_asm_elementwise(
        "nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(600)], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_maxima(amax, word, KW, known, PACK: gl.constexpr, FLIPPED: gl.constexpr):
    """Those of the first and of the last channel of some words, as the bits of FP32 numbers."""
    j = gl.arange(0, FLIPPED.shape[0], gl.SliceLayout(1, FLIPPED))
    channel = amax + (word + j) * PACK
    inside = (j < KW - word) & known
    first = gl.load(channel, mask=inside, other=0, cache_modifier=".cg")
    return first, gl.load(channel + (PACK - 1), mask=inside, other=0, cache_modifier=".cg")


@gluon.jit
def store_scales(maxima, s_t, word, KW, PACK: gl.constexpr, FLIPPED: gl.constexpr):
    """The scales of some words."""
    j = gl.arange(0, FLIPPED.shape[0], gl.SliceLayout(1, FLIPPED))
    for i in gl.static_range(PACK):
        scale, _ = scale_of(maxima[i])
        gl.store(s_t + ((word + j) * PACK + i), scale, mask=j < KW - word)


@gluon.jit
def cast_part(
    part, maxima, q_t, tokens, column, columns, word, K, MT,
    PACK: gl.constexpr, FLIPPED: gl.constexpr,
):  # fmt: skip
    """Casts 128 tokens, by their places, and some words by the maxima of their columns."""
    words = flip(part, FLIPPED)
    t = gl.arange(0, FLIPPED.shape[1], gl.SliceLayout(0, FLIPPED))
    keep = gl.where(t < tokens, -1, 0).to(gl.int8)[None, :]
    for i in gl.static_range(PACK):
        _, r = scale_of(maxima[i])
        values = cast_columns(words, r[:, None], keep, i, PACK)
        store_columns(q_t, values, column, columns, word * PACK + i, PACK, K, MT)


@kernel(do_not_specialize=["M", "E", "tiles", "blocks"])
def _maxima_kernel(
    x, amax, K, KW, x2, amax2, K2, KW2, q, s, offs, M, MT, E, tiles, blocks,
    PACK: gl.constexpr, ROWS: gl.constexpr, PAIR: gl.constexpr, TOKENS: gl.constexpr,
    GROUPS: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Column maxima of TOKENS tokens; with ROWS, q and s of their rows, too (blocks is 1 then)."""
    pid = gl.program_id(0)
    if PAIR:
        if pid >= tiles * blocks:
            pid -= tiles * blocks
            x, amax, K, KW = x2, amax2, K2, KW2
    word = pid // tiles * WORDS.shape[1]
    row, _, rows, _, group = locate(pid % tiles, offs, M, MT, E, TOKENS, GROUPS, False)
    if not ROWS:
        rows = gl.where(group < E, rows, 0)
    rows = gl.minimum(rows, TOKENS)
    x += gl.program_id(1).to(gl.int64) * M * KW
    amax += (gl.program_id(1) + group).to(gl.int64) * K
    most = gl.full(WORDS.shape, 0, gl.int32, WORDS)
    ahead = load_words(x, row, rows, word, KW, WORDS)
    for i in range(0, rows, WORDS.shape[0]):
        words = ahead
        after = i + WORDS.shape[0]
        ahead = load_words(x, row + after, rows - after, word, KW, WORDS)
        if ROWS:
            scale, r = scale_of(largest_bits(words, PACK))
            values = cast_rows(words, r[:, None], PACK)
            store_rows(q, values, None, row + i, rows - i, word, KW)
            k = gl.arange(0, WORDS.shape[0], gl.SliceLayout(1, WORDS))
            gl.store(s + (row + i) + k, scale, mask=k < rows - i)
        most = larger(most, magnitudes(words, PACK), PACK)
    publish(amax, largest(most, 0, PACK), word, K, (group < E) & (rows > 0), PACK)


@kernel(do_not_specialize=["M", "E", "tiles", "blocks"])
def _cast_kernel(
    x, amax, q_t, s_t, K, KW, x2, amax2, q_t2, s_t2, K2, KW2, offs, M, MT, E, tiles, blocks,
    PACK: gl.constexpr, PAIR: gl.constexpr, GROUPS: gl.constexpr,
    TILE: gl.constexpr, FETCH: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, FLIPPED: gl.constexpr,
):  # fmt: skip
    """Casts a tile by the column maxima of its group; tile e also writes the scales of group e."""
    pid = gl.num_programs(0) - 1 - gl.program_id(0)
    if PAIR:
        if pid >= tiles * blocks:
            pid -= tiles * blocks
            x, amax, q_t, s_t, K, KW = x2, amax2, q_t2, s_t2, K2, KW2
    WIDTH: gl.constexpr = FETCH.shape[1]
    tile = pid % tiles
    word = pid // tiles * WIDTH
    expert = gl.program_id(1).to(gl.int64)
    q_t += expert * K * MT
    amax += expert * K
    s_t += expert * K
    row, column, rows, columns, group = locate(tile, offs, M, MT, E, 128, GROUPS, False)
    tokens = gl.where(group < E, rows, 0)
    words = gl.allocate_shared_memory(gl.int32, FETCH.shape, TILE)
    fetch(words, x + expert * M * KW, 0, row, tokens, word, KW, FETCH)
    if tile < E:
        of_group = tile.to(gl.int64) * K
        for w in gl.static_range(0, WIDTH, PART_WORDS):
            maxima = load_maxima(amax + of_group, word + w, KW, True, PACK, FLIPPED)
            store_scales(maxima, s_t + of_group, word + w, KW, PACK, FLIPPED)
    amax += group.to(gl.int64) * K
    fetched()
    for w in gl.static_range(0, WIDTH, PART_WORDS):
        maxima = load_maxima(amax, word + w, KW, group < E, PACK, FLIPPED)
        cast_part(
            words.slice(w, PART_WORDS, 1).load(COLUMNS), maxima, q_t, tokens, column, columns,
            word + w, K, MT, PACK, FLIPPED,
        )  # fmt: skip


@gluon.jit
def stripe_record_size(tiles):
    """int32 numbers that a stripe has after the maxima: a counter and a flag for each tile."""
    return (tiles + LINE) // LINE * LINE


# Not inlined: addresses of this path would take registers from the path of all programs.
@gluon.jit(noinline=True)
def _cast_skipped_tiles(
    x, maxima_of, flags, q_t, tiles, word, M, MT, K, KW,
    PACK: gl.constexpr, PARTS: gl.constexpr, TILE: gl.constexpr, FETCH: gl.constexpr,
    COLUMNS: gl.constexpr, FLIPPED: gl.constexpr,
):  # fmt: skip
    """Reads the tiles of a stripe whose flag is 1 once more, 128 tokens at a time, and casts them.

    `maxima_of` and `flags` point to the stripe's maxima and flags, `x` and `q_t` to the expert's.
    """
    words = gl.allocate_shared_memory(gl.int32, [128, PART_WORDS], TILE)
    for part in range(2 * PARTS * tiles):
        skipped = gl.load(flags + part // (2 * PARTS), cache_modifier=".cg")
        if skipped != 0:
            # The factor is 1. With it, addresses depend on the iteration: computed before the loop,
            # they would not fit into registers.
            row_words = KW * skipped
            row = part * 128
            fetch(words, x, 0, row, M - row, word, row_words, FETCH)
            fetched()
            maxima = load_maxima(maxima_of, word, row_words, True, PACK, FLIPPED)
            cast_part(
                words.load(COLUMNS), maxima, q_t, M - row, row, MT - row,
                word, K, MT * skipped, PACK, FLIPPED,
            )  # fmt: skip


@kernel(do_not_specialize=["M", "tiles", "blocks"])
def _columns_kernel(
    x, amax, q_t, s_t, M, MT, K, KW, tiles, blocks,
    PACK: gl.constexpr, PARTS: gl.constexpr, POLLS: gl.constexpr,
    TILE: gl.constexpr, FETCH: gl.constexpr, COLUMNS: gl.constexpr, FLIPPED: gl.constexpr,
):  # fmt: skip
    """Maxima and casts in one kernel for a tensor without groups, with a bounded wait in between.

    The tiles of a stripe of columns share their maxima. After the maxima of all stripes, `amax` has
    a record for each stripe: a counter, and for each tile a flag that says that it was skipped. The
    counter is the number of programs that published their maxima, plus SKIP for each that gave up
    waiting. All of this starts at zero.

    The updates of a counter have one order. So for each tile one of the following is true:

    - Its program read a counter with all programs published, and casts the tile.
    - Its program added SKIP before the last program of the stripe published. That program sees
      SKIP in the counter and then the flag, and casts the tile.

    This holds in any order of programs, however few of them are on the GPU at once.
    """
    tile = gl.program_id(0) % tiles
    stripe = gl.program_id(0) // tiles
    expert = (stripe // blocks).to(gl.int64)
    word = stripe % blocks * PART_WORDS
    row = tile * (2 * PARTS * 128)
    experts = gl.num_programs(0) // (tiles * blocks)
    counter = amax + (experts * K + stripe * stripe_record_size(tiles))
    flags = counter + 1
    x += expert * M * KW
    amax += expert * K
    q_t += expert * K * MT

    # Shared memory bounds the bytes in flight. So the first half of the tile moves on to registers,
    # which are idle during the wait, and makes room for the second half.
    words = gl.allocate_shared_memory(gl.int32, [PARTS * 128, PART_WORDS], TILE)
    for i in gl.static_range(PARTS):
        fetch(words.slice(i * 128, 128), x, i * 128, row, M - row, word, KW, FETCH)
        async_copy.commit_group()
    most = gl.full([128, PART_WORDS], 0, gl.int32, COLUMNS)
    held = ()
    for i in gl.static_range(PARTS):
        async_copy.wait_group(PARTS - 1)
        part = words.slice(i * 128, 128)
        held = held + (part.load(COLUMNS),)
        fetch(part, x, (PARTS + i) * 128, row, M - row, word, KW, FETCH)
        async_copy.commit_group()
        most = larger(most, magnitudes(held[i], PACK), PACK)
    async_copy.wait_group(0)
    for i in gl.static_range(PARTS):
        most = larger(most, magnitudes(words.slice(i * 128, 128).load(COLUMNS), PACK), PACK)
    publish(amax, largest(most, 0, PACK), word, K, True, PACK)
    barrier()  # All threads have published before one of them counts the program.

    # One thread polls, with pauses: the L2 cache serves atomics on an address one after the other.
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
        count = gl.atomic_add(counter, SKIP, sem="acq_rel")  # May find all published after all.
    barrier()  # No thread reads the maxima before the polling one has seen that they are complete.

    if count % SKIP == tiles:
        maxima = load_maxima(amax, word, KW, True, PACK, FLIPPED)
        for i in gl.static_range(2 * PARTS):
            values = held[i] if i < PARTS else words.slice((i - PARTS) * 128, 128).load(COLUMNS)
            place = i * 128
            cast_part(
                values, maxima, q_t, M - row - place, row + place, MT - row - place,
                word, K, MT, PACK, FLIPPED,
            )  # fmt: skip
        if published % SKIP == tiles:  # This program was the last of its stripe to publish.
            store_scales(maxima, s_t + expert * K, word, KW, PACK, FLIPPED)
            if published > SKIP:
                _cast_skipped_tiles(
                    x, amax, flags, q_t, tiles, word, M, MT, K, KW,
                    PACK, PARTS, TILE, FETCH, COLUMNS, FLIPPED,
                )  # fmt: skip


@functools.cache
def _row_layout(words: int) -> tuple[gl.DistributedLinearLayout, int]:
    """Layout of some rows of that many words, at least four 16-byte loads a thread; its warps."""
    words = max(128, triton.next_power_of_2(words))
    across = min(32, max(1, words // 512))
    down = max(1, 4 // across)
    chunks = words // (128 * across)
    repeat = (max(1, 4 // chunks), chunks)
    return layout((1, 4), (1, 32), (down, across), repeat), down * across


def quantize_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises x (..., R, C) with one scale a row: q (..., R, C), s (..., R)."""
    q, s = torch.empty_like(x, dtype=E4M3), x.new_empty(x.shape[:-1], dtype=torch.float32)
    words, out, pack = words_of(x, q)
    rows, row_words = s.numel(), x.shape[-1] // pack
    fits = row_words <= ROW_WORDS
    tile, warps = _row_layout(row_words if fits else 2048)
    if rows:
        (_row_kernel if fits else _long_row_kernel)[(cdiv(rows, tile.shape[0]),)](
            words, out, s, rows, row_words, pack, tile, num_warps=warps
        )
    return q, s


class _Columns:
    """One tensor x (..., M, K) on its way through the two column kernels."""

    def __init__(self, x: Tensor, width: int, groups: tuple[int, ...]):
        *lead, m, k = x.shape
        self.x, self.k, self.pack = as_words(x), k, 4 // x.element_size()
        self.q_t = x.new_empty(*lead, k, width, dtype=E4M3)
        self.s_t = x.new_empty(*lead, *groups, k, dtype=torch.float32)
        self.amax = torch.zeros_like(self.s_t, dtype=torch.int32)

    def maxima_args(self) -> tuple:
        return self.x, self.amax, self.k, self.k // self.pack

    def cast_args(self) -> tuple:
        return self.x, self.amax, Typed(self.q_t, torch.int8), self.s_t, self.k, self.k // self.pack


def _quantize_all_columns(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """q_t (..., K, width) and s_t (..., K) of x (..., M, K), without groups."""
    *lead, m, k = x.shape
    pack = 4 // x.element_size()
    q_t = x.new_empty(*lead, k, width, dtype=E4M3)
    s_t = x.new_empty(*lead, k, dtype=torch.float32)
    tiles, blocks = max(1, cdiv(width, PEER_TOKENS)), cdiv(k // pack, PART_WORDS.value)
    stripes = blocks * (s_t.numel() // k)
    records = stripes * round_up(tiles + 1, LINE.value)
    maxima = torch.zeros(s_t.numel() + records, dtype=torch.int32, device=x.device)
    _columns_kernel[(tiles * stripes,)](
        as_words(x), maxima, Typed(q_t, torch.int8), s_t, m, width, k, k // pack,
        tiles, blocks, pack, PEER_PARTS, POLLS, maxnreg=PEER_MAXNREG, **PEER,
    )  # fmt: skip
    return q_t, s_t


def _quantize_columns(
    tensors: tuple[Tensor, ...], offs: Tensor | None, aligned: bool, q: Tensor | None = None
) -> tuple[Tensor, ...]:
    """q_t and s_t of one or two tensors; with `q` given, q and s of the first before them."""
    *lead, m, _ = tensors[0].shape
    width = transposed_width(m, offs, aligned, ROW_ALIGNMENT)
    if offs is None and q is None and width <= PEER_TOKENS * multiprocessors(tensors[0].device):
        return tuple(t for x in tensors for t in _quantize_all_columns(x, width))
    groups = () if offs is None else tuple(offs.shape)
    columns = [_Columns(x, width, groups) for x in tensors]
    a, b = columns[0], columns[-1]
    pack, e = a.pack, groups[0] if groups else 1
    size = group_lanes(groups[0] if groups else 0)
    rows = () if q is None else (q, q.new_empty(m, dtype=torch.float32))

    def grid(columns: list[_Columns], tiles: int, words: int) -> tuple[int, ...]:
        return tiles * sum(cdiv(c.k // pack, words) for c in columns), math.prod(lead)

    def take_maxima(columns: list[_Columns], rows: tuple[Tensor, ...]) -> None:
        a, b = columns[0], columns[-1]
        tile, warps, tokens, out, s = MAXIMA, 4, MAXIMA_TOKENS, a.x, a.s_t
        if rows:
            (tile, warps), tokens = _row_layout(a.k // pack), ROW_COLUMN_TOKENS
            out, s = Typed(rows[0], (torch.int8, torch.int16)[pack - 1]), rows[1]
        tiles = tiles_of(width, len(groups) and e, tokens)
        _maxima_kernel[grid(columns, tiles, tile.shape[1])](
            *a.maxima_args(), *b.maxima_args(), out, s, offs, m, width, e, tiles,
            cdiv(a.k // pack, tile.shape[1]), pack, bool(rows), len(columns) == 2, tokens, size,
            tile, num_warps=warps,
        )  # fmt: skip

    if m and rows:
        # A program with rows holds all channels of one tensor: the other's maxima go by themselves.
        take_maxima([a], rows)
        if b is not a:
            take_maxima([b], ())
    elif m:
        take_maxima(columns, ())
    tiles = max(e, tiles_of(width, len(groups) and e, 128))
    words = TILED[pack]["FETCH"].shape[1]
    _cast_kernel[grid(columns, tiles, words)](
        *a.cast_args(), *b.cast_args(), offs, m, width, e, tiles, cdiv(a.k // pack, words),
        pack, len(columns) == 2, size, maxnreg=MAXNREG, **TILED[pack],
    )  # fmt: skip
    return (*rows, *(t for c in columns for t in (c.q_t, c.s_t)))


def quantize_col_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantises x (M, K) with one scale a column and group, written transposed.

    q (K, Mt); s (K,), with groups (E, K). A group without tokens has the scale of zeros.
    """
    return _quantize_columns((x,), offs, aligned)


def quantize_col_t_pair(
    g: Tensor, x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_col_t` of g (M, N) and of x (M, K), of one dtype, groups in the launches of one."""
    return _quantize_columns((g, x.contiguous()), offs, aligned)


def quantize_row_col_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows and columns of x (M, K): q (M, K), s (M,), q (K, Mt), s (K,) or (E, K)."""
    if not _holds_rows(x):
        return (*quantize_row(x), *quantize_col_t(x, offs, aligned))
    return _quantize_columns((x,), offs, aligned, torch.empty_like(x, dtype=E4M3))


def quantize_row_col_t_pair(
    g: Tensor, x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows and columns of g (M, N), and columns of x (M, K), of one dtype: what backward reads."""
    if not _holds_rows(g):
        return (*quantize_row(g), *quantize_col_t_pair(g, x, offs, aligned))
    if offs is None:
        return (*quantize_row_col_t(g), *quantize_col_t(x.contiguous()))
    q = torch.empty_like(g, dtype=E4M3)
    return _quantize_columns((g, x.contiguous()), offs, aligned, q)


def _holds_rows(x: Tensor) -> bool:
    """Whether a program can hold rows of x beside the maxima of their columns."""
    return x.shape[1] * x.element_size() <= 4 * ROW_COLUMN_WORDS


def quantize_weight_col_t(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises w (..., N, K) with one scale a column, transposed: q (..., K, N), s (..., K)."""
    return _quantize_columns((w,), None, True)
