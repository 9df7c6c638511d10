"""SwiGLU and its gradient, quantised where they are computed: h, da and db never lie in memory.

Arithmetic. h, da and db are what the reference says, each rounded once to bf16, but for the
machine's approximations of 2^x and 1 / x. Their relative error stays below 2^-16, half an ulp of
bf16 is more than 2^-9, so that h, da and db are at most one bf16 ulp from the reference's; da even
where silu's slope crosses zero, for at the nearest bf16 it is 0.0028. Where e^-a is below
2^-25, σ is 1 exactly, as in the reference. 1 + e^-a is taken a quarter of, because the approximate
reciprocal of more than 2^126 is 0, and σ may be smaller than that.

Backward computes as much as it moves, 50 instructions for each element's 11 bytes. So σ is
evaluated once: the tile's dh, a and b come to shared memory; a part of the rows at a time becomes
h, da and db in their place, and the rows of da and db are quantised on the way; then the columns of
all three. Little of a tile is in registers at any time, so that 128 do, and the two programs of 8
warps for which shared memory has room keep a multiprocessor busy: one computes while the other
waits for memory.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from titan_fp8 import reference
from titan_fp8.kernels.hopper import quantize_blockwise as quantize
from titan_fp8.kernels.hopper.quantize_blockwise import (
    ROWS,
    quantize_columns,
    quantize_rows,
    scales_1x128,
    scales_128x1_t,
)
from titan_fp8.kernels.hopper.quantize_cast import SCALE_FMTS, as_words
from titan_fp8.kernels.hopper.quantize_tile import (
    columns_layouts,
    fetch,
    group_lanes,
    layout,
    load_words,
    locate,
    tiles_of,
)
from titan_fp8.kernels.launch import Typed, kernel
from titan_fp8.reference import BLOCK, E4M3, cdiv, transposed_width

# One channel, in FP32. Powers of e as those of 2: 0fBFB8AA3B is -1 / ln 2, 0f3E800000 a quarter.
_SWIGLU = (
    "mul.rn.f32 sigma, a{i}, 0fBFB8AA3B; ex2.approx.ftz.f32 sigma, sigma;"
    "fma.rn.f32 sigma, sigma, 0f3E800000, 0f3E800000; rcp.approx.ftz.f32 sigma, sigma;"
    "mul.rn.f32 sigma, sigma, 0f3E800000;"
    "mul.rn.f32 silu, a{i}, sigma; mul.rn.f32 h{i}, silu, b{i};"
)
_GRADIENT = (
    "mul.rn.f32 db{i}, g{i}, silu; mul.rn.f32 da{i}, g{i}, b{i};"
    "sub.rn.f32 slope, 0f3F800000, sigma; fma.rn.f32 slope, a{i}, slope, 0f3F800000;"
    "mul.rn.f32 slope, sigma, slope; mul.rn.f32 da{i}, da{i}, slope;"
)


def _of_words(channel: str, inputs: str, outputs: str) -> gl.constexpr:
    """PTX from words of two bf16 channels to such words: `channel` for both."""
    inputs, outputs = inputs.split(), outputs.split()
    registers = ".reg .f32 sigma, silu, slope;"
    registers += "".join(f".reg .f32 {name}<2>;" for name in inputs + outputs)
    unpack = "".join(
        f"shl.b32 {name}0, ${i}, 16; and.b32 {name}1, ${i}, 0xffff0000;"
        for i, name in enumerate(inputs, len(outputs))
    )
    pack = "".join(f"cvt.rn.bf16x2.f32 ${i}, {name}1, {name}0;" for i, name in enumerate(outputs))
    channels = channel.format(i=0) + channel.format(i=1)
    return gl.constexpr(f"{{ {registers} {unpack} {channels} {pack} }}")


SWIGLU = _of_words(_SWIGLU, "a b", "h")
BACKWARD = _of_words(_SWIGLU + _GRADIENT, "g a b", "h da db")

PART = layout((1, 8), (4, 8), (8, 1))
"""A part of a tile: 8 words a thread. Maxima of rows ask for lanes that lie side by side."""
FETCH = layout((1, 4), (2, 16), (8, 1), (2, 1))
"""A part on its way from memory: whole lines a warp."""
STAGED = gl.SharedLinearLayout(
    [
        *([0, 1 << i] for i in range(5)),
        [0, 36],
        *([1 << i, 4 << i] for i in range(3)),
        *([8 << i, 0] for i in range(4)),
    ]
)
"""A tile in shared memory, as in `tile.TILE`; and in the second half of a row neighbouring 16 bytes
are exchanged, so that the 8 lanes that share a row of PART find 8 distinct banks."""
REGISTERS = 128


@gluon.jit
def _swiglu(a, b):
    """Words of h."""
    return gl.inline_asm_elementwise(SWIGLU, "=r,r,r", [a, b], gl.int32, is_pure=True, pack=1)


@gluon.jit
def _swiglu_backward(dh, a, b):
    """Words of h, da and db."""
    return gl.inline_asm_elementwise(
        BACKWARD, "=r,=r,=r,r,r,r", [dh, a, b], (gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip


@kernel(do_not_specialize=["M", "S", "blocks"])
def _forward_kernel(a, b, q, s, M, KW, S, blocks, SCALE_FMT: gl.constexpr, WORDS: gl.constexpr):
    block = gl.program_id(0) % blocks
    row = gl.program_id(0) // blocks * WORDS.shape[0]
    word = block * WORDS.shape[1]
    words = _swiglu(
        load_words(a, row, M - row, word, KW, WORDS),
        load_words(b, row, M - row, word, KW, WORDS),
    )
    quantize_rows(words, None, q, s, row, M - row, block, KW, S, 2, SCALE_FMT, True)


@kernel(do_not_specialize=["M", "S", "E", "blocks"])
def _backward_kernel(
    dh, a, b, da_q, da_s, da_q_t, da_s_t, db_q, db_s, db_q_t, db_s_t, h_q_t, h_s_t, offs,
    M, K, KW, MT, S, E, blocks,
    SCALE_FMT: gl.constexpr, GROUPS: gl.constexpr, ALIGNED: gl.constexpr,
    STAGED: gl.constexpr, FETCH: gl.constexpr, PART: gl.constexpr,
    COLUMNS: gl.constexpr, FLIPPED: gl.constexpr,
):  # fmt: skip
    tile = gl.program_id(0) // blocks
    block = gl.program_id(0) % blocks
    row, column, rows, columns, group = locate(tile, offs, M, MT, E, 128, GROUPS, ALIGNED)
    tokens = rows if GROUPS == 0 else gl.where(group < E, rows, 0)
    word = block * COLUMNS.shape[1]
    dh_to_h = gl.allocate_shared_memory(gl.int32, COLUMNS.shape, STAGED)
    a_to_da = gl.allocate_shared_memory(gl.int32, COLUMNS.shape, STAGED)
    b_to_db = gl.allocate_shared_memory(gl.int32, COLUMNS.shape, STAGED)
    T: gl.constexpr = PART.shape[0]
    for t in gl.static_range(0, 128, T):
        fetch(dh_to_h.slice(t, T), dh, t, row, rows, word, KW, FETCH)
        fetch(a_to_da.slice(t, T), a, t, row, rows, word, KW, FETCH)
        fetch(b_to_db.slice(t, T), b, t, row, rows, word, KW, FETCH)
        async_copy.commit_group()
    for t in gl.static_range(0, 128, T):
        async_copy.wait_group((128 - t) // T - 1)
        h, da, db = _swiglu_backward(
            dh_to_h.slice(t, T).load(PART),
            a_to_da.slice(t, T).load(PART),
            b_to_db.slice(t, T).load(PART),
        )
        dh_to_h.slice(t, T).store(h)
        a_to_da.slice(t, T).store(da)
        b_to_db.slice(t, T).store(db)
        quantize_rows(da, t, da_q, da_s, row, rows, block, KW, S, 2, SCALE_FMT, False)
        quantize_rows(db, t, db_q, db_s, row, rows, block, KW, S, 2, SCALE_FMT, False)
    quantize_columns(
        dh_to_h.load(COLUMNS), h_q_t, h_s_t, column, group < E, tokens, columns, word,
        K, KW, MT, 2, SCALE_FMT, GROUPS > 0, FLIPPED,
    )  # fmt: skip
    quantize_columns(
        a_to_da.load(COLUMNS), da_q_t, da_s_t, column, group < E, tokens, columns, word,
        K, KW, MT, 2, SCALE_FMT, GROUPS > 0, FLIPPED,
    )  # fmt: skip
    quantize_columns(
        b_to_db.load(COLUMNS), db_q_t, db_s_t, column, group < E, tokens, columns, word,
        K, KW, MT, 2, SCALE_FMT, GROUPS > 0, FLIPPED,
    )  # fmt: skip


def _in_bf16(**tensors: Tensor) -> bool:
    """Whether all are bf16; ValueError unless their shapes are the same."""
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"swiglu: shapes {shapes}: must be the same")
    return all(x.dtype == torch.bfloat16 for x in tensors.values())


def _words(x: Tensor) -> Typed:
    return as_words(x.contiguous())


def swiglu_1x128(a: Tensor, b: Tensor, *, scale_fmt: str = "fp32") -> tuple[Tensor, Tensor]:
    """`quantize_1x128` of h = silu(a) · b for a, b (M, H): q (M, H), s (M, ⌈H/128⌉).

    One kernel in bf16; any other dtype computes h first.
    """
    if not _in_bf16(a=a, b=b):
        return quantize.quantize_1x128(reference.swiglu(a, b), scale_fmt=scale_fmt)
    m, k = a.shape
    q, s = a.new_empty(m, k, dtype=E4M3), scales_1x128(a, m, k)
    blocks = s.shape[1]
    tile, warps = ROWS[2]
    if m:
        _forward_kernel[(cdiv(m, tile.shape[0]) * blocks,)](
            _words(a), _words(b), Typed(q, torch.int16), s, m, k // 2, s.stride(1), blocks,
            SCALE_FMTS[scale_fmt], tile, num_warps=warps,
        )  # fmt: skip
    return q, s


def swiglu_backward_1x128_128x1_t(
    dh: Tensor,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    *,
    scale_fmt: str = "fp32",
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """What backward reads of a SwiGLU of a, b (M, H), given dh (M, H).

    `quantize_1x128_128x1_t` of da (4 tensors) and of db (4), `quantize_128x1_t` of h (2). One
    kernel in bf16; any other dtype computes da, db and h first.
    """
    if not _in_bf16(dh=dh, a=a, b=b):
        da, db = reference.swiglu_backward(dh, a, b)
        return (
            *quantize.quantize_1x128_128x1_t(da, offs, aligned, scale_fmt=scale_fmt),
            *quantize.quantize_1x128_128x1_t(db, offs, aligned, scale_fmt=scale_fmt),
            *quantize.quantize_128x1_t(reference.swiglu(a, b), offs, aligned, scale_fmt=scale_fmt),
        )
    m, k = a.shape
    width = transposed_width(m, offs, aligned, BLOCK)
    blocks = cdiv(k, BLOCK)
    qs = [a.new_empty(m, k, dtype=E4M3) for _ in range(2)]
    ss = [scales_1x128(a, m, k) for _ in range(2)]
    qs_t = [a.new_empty(k, width, dtype=E4M3) for _ in range(3)]
    ss_t = [scales_128x1_t(a, k, width) for _ in range(3)]
    groups = 0 if offs is None else offs.shape[0]
    tiles = tiles_of(width, 0 if aligned else groups, BLOCK)
    if tiles:
        rows = [(Typed(q, torch.int16), s) for q, s in zip(qs, ss, strict=True)]
        columns = [(Typed(q, torch.int8), s) for q, s in zip(qs_t, ss_t, strict=True)]
        _backward_kernel[(tiles * blocks,)](
            _words(dh), _words(a), _words(b), *rows[0], *columns[0], *rows[1], *columns[1],
            *columns[2], offs, m, k, k // 2, width, ss[0].stride(1), groups, blocks,
            SCALE_FMTS[scale_fmt], group_lanes(groups), aligned,
            STAGED, FETCH, PART, **columns_layouts(8, 64), num_warps=8, maxnreg=REGISTERS,
        )  # fmt: skip
    da, db = zip(qs, ss, qs_t[:2], ss_t[:2], strict=True)
    return (*da, *db, qs_t[2], ss_t[2])
