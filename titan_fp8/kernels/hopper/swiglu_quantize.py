"""SwiGLU and its gradient, quantized where they are computed: h, da and db are never written.

h = silu(a) · b, da and db are those of the reference, rounded once to bf16, except that 2^x and 1/x
are the GPU's approximations. Their relative error stays below 2^-16, and half a bf16 ulp is more
than 2^-9, so h, da and db are at most one bf16 ulp from the reference. This holds for da even where
the slope of silu crosses zero, because at the nearest bf16 it is 0.0028. Where e^-a is below 2^-25,
σ = 1 / (1 + e^-a) is exactly 1, as in the reference. The kernels compute a quarter of 1 + e^-a,
because the approximate reciprocal of numbers above 2^126 is 0, and σ may be smaller than 2^-126.

Backward takes as long to compute as to move its data: 50 instructions and 11 bytes per element. So
it evaluates σ once. The tile's dh, a and b are loaded to shared memory. Part by part, rows of them
are replaced by h, da and db, and the rows of da and db are quantized at once. Then the columns of
all three are quantized from shared memory. Few values are in registers at a time, so 128 registers
per thread suffice. Shared memory has room for two programs of 8 warps on an SM: one computes while
the other waits for memory.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from titan_fp8 import reference
from titan_fp8.kernels.hopper.group_ends import group_lanes, locate, tiles_of
from titan_fp8.kernels.hopper.quantize_blockwise import (
    ROWS,
    quantize_1x128,
    quantize_1x128_128x1_t,
    quantize_128x1_t,
    quantize_columns,
    quantize_rows,
    scales_1x128,
)
from titan_fp8.kernels.hopper.quantize_cast import SCALE_FMTS, as_words
from titan_fp8.kernels.hopper.quantize_tile import (
    TileLayouts,
    column_layouts,
    load_words,
    start_load,
    tile_layout,
)
from titan_fp8.kernels.launch import kernel
from titan_fp8.layouts import BLOCK, E4M3, cdiv, transposed_width

# PTX for one channel in FP32. 2^x and 1/x are instructions: e^-a is 2^(-a / ln 2). 0fBFB8AA3B is
# -1 / ln 2, 0f3E800000 is 1/4, 0f3F800000 is 1.
_SWIGLU = (
    "mul.rn.f32 sigma, a{i}, 0fBFB8AA3B; ex2.approx.ftz.f32 sigma, sigma;"
    "fma.rn.f32 sigma, sigma, 0f3E800000, 0f3E800000; rcp.approx.ftz.f32 sigma, sigma;"
    "mul.rn.f32 sigma, sigma, 0f3E800000;"
    "mul.rn.f32 silu, a{i}, sigma; mul.rn.f32 h{i}, silu, b{i};"
)
# The slope of silu is σ (1 + a (1 - σ)).
_GRADIENT = (
    "mul.rn.f32 db{i}, g{i}, silu; mul.rn.f32 da{i}, g{i}, b{i};"
    "sub.rn.f32 slope, 0f3F800000, sigma; fma.rn.f32 slope, a{i}, slope, 0f3F800000;"
    "mul.rn.f32 slope, sigma, slope; mul.rn.f32 da{i}, da{i}, slope;"
)


def _on_words(channel: str, inputs: list[str], outputs: list[str]) -> gl.constexpr:
    """PTX that unpacks words of two bf16 channels, runs `channel` for both, and packs the results.

    `inputs` and `outputs` are the names in `channel`; the operands of the outputs come first.
    """
    registers = ".reg .f32 sigma, silu, slope;"
    registers += "".join(f".reg .f32 {name}<2>;" for name in inputs + outputs)
    unpack = "".join(
        f"shl.b32 {name}0, ${i}, 16; and.b32 {name}1, ${i}, 0xffff0000;"
        for i, name in enumerate(inputs, len(outputs))
    )
    pack = "".join(f"cvt.rn.bf16x2.f32 ${i}, {name}1, {name}0;" for i, name in enumerate(outputs))
    channels = channel.format(i=0) + channel.format(i=1)
    return gl.constexpr(f"{{ {registers} {unpack} {channels} {pack} }}")


SWIGLU = _on_words(_SWIGLU, ["a", "b"], ["h"])
BACKWARD = _on_words(_SWIGLU + _GRADIENT, ["g", "a", "b"], ["h", "da", "db"])

PART = tile_layout((1, 8), (4, 8), (8, 1))
"""Layout of a part of a tile, 8 words per thread. The lanes of a row are neighbors, so that its
maximum takes few shuffles."""
# As `quantize_tile.SHARED`, but in the second half of each row neighboring 16-byte units are
# exchanged, so that the 8 lanes of a row in PART read from 8 different banks.
_SHARED = gl.SharedLinearLayout(
    [
        *([0, 1 << i] for i in range(5)),
        [0, 36],
        *([1 << i, 4 << i] for i in range(3)),
        *([8 << i, 0] for i in range(4)),
    ]
)
LAYOUTS = TileLayouts(
    _SHARED, tile_layout((1, 4), (2, 16), (8, 1), (2, 1)), PART, *column_layouts(8, 64)
)
"""For backward. Each warp loads whole lines."""
MAXNREG = 128
DSCORES = tile_layout((1, 4), (1, 32), (4, 1), (4, 1))
"""Layout of a tile of 16 rows, of which the gradients of scores are sums."""
PACK = gl.constexpr(2)


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
def swiglu_forward_kernel(
    a, b, q, s, M, KW, S, blocks, SCALE_FMT: gl.constexpr, WORDS: gl.constexpr
):
    """Some rows of h in one block of 128 channels."""
    block = gl.program_id(0) % blocks
    row = gl.program_id(0) // blocks * WORDS.shape[0]
    word = block * WORDS.shape[1]
    words = _swiglu(
        load_words(a, row, M - row, word, KW, WORDS),
        load_words(b, row, M - row, word, KW, WORDS),
    )
    quantize_rows(words, None, q, s, row, M - row, block, KW, S, PACK, SCALE_FMT, True)


@kernel(do_not_specialize=["M", "S", "E", "blocks"])
def swiglu_backward_kernel(
    dh, a, b, da_q, da_s, da_q_t, da_s_t, db_q, db_s, db_q_t, db_s_t, h_q_t, h_s_t, offs,
    M, K, KW, MT, S, E, blocks,
    SCALE_FMT: gl.constexpr, GROUPS: gl.constexpr, ALIGNED: gl.constexpr, LAYOUTS: gl.constexpr,
):  # fmt: skip
    """Rows and columns of da and db, and columns of h, of a tile of 128 tokens by 128 channels."""
    LOAD: gl.constexpr = LAYOUTS.load
    TRANSPOSED: gl.constexpr = LAYOUTS.transposed
    tile = gl.program_id(0) // blocks
    block = gl.program_id(0) % blocks
    row, column, rows, columns, group = locate(tile, offs, M, MT, E, 128, GROUPS, ALIGNED)
    # Tokens of no group have rows but no columns.
    tokens = rows if GROUPS == 0 else gl.where(group < E, rows, 0)
    word = block * LAYOUTS.columns.shape[1]
    dh_to_h = gl.allocate_shared_memory(gl.int32, LAYOUTS.columns.shape, LAYOUTS.shared)
    a_to_da = gl.allocate_shared_memory(gl.int32, LAYOUTS.columns.shape, LAYOUTS.shared)
    b_to_db = gl.allocate_shared_memory(gl.int32, LAYOUTS.columns.shape, LAYOUTS.shared)

    # Start to load all parts, each as one commit group, and compute each when it has arrived.
    T: gl.constexpr = LAYOUTS.rows.shape[0]
    for t in gl.static_range(0, 128, T):
        start_load(dh_to_h.slice(t, T), dh, t, row, rows, word, KW, LOAD)
        start_load(a_to_da.slice(t, T), a, t, row, rows, word, KW, LOAD)
        start_load(b_to_db.slice(t, T), b, t, row, rows, word, KW, LOAD)
        async_copy.commit_group()
    for t in gl.static_range(0, 128, T):
        async_copy.wait_group((128 - t) // T - 1)
        h, da, db = _swiglu_backward(
            dh_to_h.slice(t, T).load(LAYOUTS.rows),
            a_to_da.slice(t, T).load(LAYOUTS.rows),
            b_to_db.slice(t, T).load(LAYOUTS.rows),
        )
        # Each thread overwrites only what it has read itself, so this needs no barrier.
        dh_to_h.slice(t, T).store(h)
        a_to_da.slice(t, T).store(da)
        b_to_db.slice(t, T).store(db)
        quantize_rows(da, t, da_q, da_s, row, rows, block, KW, S, PACK, SCALE_FMT, False)
        quantize_rows(db, t, db_q, db_s, row, rows, block, KW, S, PACK, SCALE_FMT, False)
    quantize_columns(
        dh_to_h.load(LAYOUTS.columns), h_q_t, h_s_t, column, group < E, tokens, columns, word,
        K, KW, MT, PACK, SCALE_FMT, GROUPS > 0, TRANSPOSED,
    )  # fmt: skip
    quantize_columns(
        a_to_da.load(LAYOUTS.columns), da_q_t, da_s_t, column, group < E, tokens, columns, word,
        K, KW, MT, PACK, SCALE_FMT, GROUPS > 0, TRANSPOSED,
    )  # fmt: skip
    quantize_columns(
        b_to_db.load(LAYOUTS.columns), db_q_t, db_s_t, column, group < E, tokens, columns, word,
        K, KW, MT, PACK, SCALE_FMT, GROUPS > 0, TRANSPOSED,
    )  # fmt: skip


@gluon.jit
def _dot(x, y):
    """The products of two words of two bf16 channels, added, in FP32."""
    low = (x << 16).to(gl.float32, bitcast=True) * (y << 16).to(gl.float32, bitcast=True)
    high = (x & -65536).to(gl.float32, bitcast=True) * (y & -65536).to(gl.float32, bitcast=True)
    return low + high


@kernel(do_not_specialize=["M"])
def swiglu_dscores_kernel(dh, a, b, scores, out, M, KW, BEFORE: gl.constexpr, WORDS: gl.constexpr):
    """The gradients of the scores of some rows, as in the reference."""
    row = gl.program_id(0) * WORDS.shape[0]
    i = gl.arange(0, WORDS.shape[0], gl.SliceLayout(1, WORDS))
    products = gl.full(WORDS.shape, 0.0, gl.float32, WORDS)
    for word in range(0, KW, WORDS.shape[1]):
        g = load_words(dh, row, M - row, word, KW, WORDS)
        a_words = load_words(a, row, M - row, word, KW, WORDS)
        h, da, _ = _swiglu_backward(g, a_words, load_words(b, row, M - row, word, KW, WORDS))
        products += _dot(g, h)
        if BEFORE:
            products += _dot(da, a_words)
    total = gl.sum(products, 1)
    score = gl.load(scores + row + i, mask=i < M - row, other=0)
    gl.store(out + row + i, gl.where(score == 0, 0.0, total / score), mask=i < M - row)


def _words(x: Tensor) -> tuple[Tensor, torch.dtype]:
    return as_words(x.contiguous())


def swiglu_1x128(a: Tensor, b: Tensor, *, scale_fmt: str = "fp32") -> tuple[Tensor, Tensor]:
    """See `reference.swiglu_1x128`. For FP32 PyTorch computes h first."""
    if not a.dtype == b.dtype == torch.bfloat16:
        return quantize_1x128(reference.swiglu(a, b), scale_fmt=scale_fmt)
    m, k = a.shape
    q, s = a.new_empty(m, k, dtype=E4M3), scales_1x128(a, m, k)
    blocks = s.shape[1]
    layout, warps = ROWS[PACK.value]
    if m:
        swiglu_forward_kernel[(cdiv(m, layout.shape[0]) * blocks,)](
            _words(a), _words(b), (q, torch.int16), s, m, k // 2, s.stride(1), blocks,
            SCALE_FMTS[scale_fmt], layout, num_warps=warps,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See the reference. For FP32 PyTorch computes da, db and h first."""
    if not dh.dtype == a.dtype == b.dtype == torch.bfloat16:
        da, db = reference.swiglu_backward(dh, a, b)
        h = reference.swiglu(a, b)
        return (
            *quantize_1x128_128x1_t(da, offs, aligned, scale_fmt=scale_fmt),
            *quantize_1x128_128x1_t(db, offs, aligned, scale_fmt=scale_fmt),
            *quantize_128x1_t(h, offs, aligned, scale_fmt=scale_fmt),
        )
    m, k = a.shape
    width = transposed_width(m, offs, aligned, BLOCK)
    blocks = cdiv(k, BLOCK)
    da_q, db_q = (a.new_empty(m, k, dtype=E4M3) for _ in range(2))
    da_s, db_s = (scales_1x128(a, m, k) for _ in range(2))
    da_q_t, db_q_t, h_q_t = (a.new_empty(k, width, dtype=E4M3) for _ in range(3))
    da_s_t, db_s_t, h_s_t = (scales_1x128(a, k, width) for _ in range(3))
    groups = 0 if offs is None else offs.shape[0]
    # Tokens of no group need tiles too, in addition to the tiles that fill `width`.
    tiles = tiles_of(width, 0 if aligned else groups, BLOCK)
    if tiles:
        swiglu_backward_kernel[(tiles * blocks,)](
            _words(dh), _words(a), _words(b),
            (da_q, torch.int16), da_s, (da_q_t, torch.int8), da_s_t,
            (db_q, torch.int16), db_s, (db_q_t, torch.int8), db_s_t,
            (h_q_t, torch.int8), h_s_t, offs,
            m, k, k // 2, width, da_s.stride(1), groups, blocks,
            SCALE_FMTS[scale_fmt], group_lanes(groups), aligned, LAYOUTS,
            num_warps=8, maxnreg=MAXNREG,
        )  # fmt: skip
    return da_q, da_s, da_q_t, da_s_t, db_q, db_s, db_q_t, db_s_t, h_q_t, h_s_t


def swiglu_dscores(dh: Tensor, a: Tensor, b: Tensor, scores: Tensor, before: bool) -> Tensor:
    """See `reference.swiglu_dscores`, which computes FP32."""
    if not dh.dtype == a.dtype == b.dtype == torch.bfloat16:
        return reference.swiglu_dscores(dh, a, b, scores, before)
    m, k = a.shape
    out = torch.empty_like(scores)
    if m:
        swiglu_dscores_kernel[(cdiv(m, DSCORES.shape[0]),)](
            _words(dh), _words(a), _words(b), scores, out, m, k // 2, before, DSCORES, num_warps=4
        )
    return out
