"""What the quantiser kernels compute: maxima of magnitudes, scales, casts to FP8.

Words. A tensor is read as 32-bit words: an FP32 channel, or a pair of bf16 channels, the even one
in the low half (PACK = 1 or 2). The words of a tile are all that stays in registers from the maxima
to the casts, which each unpack them again. The casts are PTX because only there do unpack, multiply
and convert stay together: left to itself the compiler unpacks the whole tile at once and keeps it,
100 registers more a thread.

Maxima are taken on the bits of |x| as integers, bf16 two at a time. Their order is that of the
magnitudes with NaN above Inf, so a NaN wins without a special case (and without `max.NaN`, which
Triton mis-lowers beside transposed byte stores, triton#11111).

Scales. s = amax / 448 and r = 1 / s are correctly rounded: an approximation and one fused
correction each, as `div.rn` does, less its slow path for arguments that amax >= 1e-12 rules out.
Inf and NaN skip the correction. Tests hold every significand against the true division.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.launch import Typed

AMAX_MIN = gl.constexpr(0x2B8CBCCC)
"""The bits of 1e-12."""
INF = gl.constexpr(0x7F800000)
"""The bits of Inf."""

SCALE_FMTS = {"fp32": 0, "ue8m0": 1}
"""Name of a scale format -> the constexpr SCALE_FMT of the kernels.

A number, because `launcher.c` tells strings apart by their address, and the same name may arrive as
another string object at each call.
"""
FP32 = gl.constexpr(SCALE_FMTS["fp32"])
UE8M0 = gl.constexpr(SCALE_FMTS["ue8m0"])


def _cast(unpack: str, scales: str, last: str = "") -> gl.constexpr:
    """PTX from words to four bytes: what `unpack` leaves in x0..x3, times `scales`, converted."""
    scaled = "".join(f"mul.rn.f32 x{i}, x{i}, {r};" for i, r in enumerate(scales.split()))
    return gl.constexpr(
        f"{{ .reg .b32 x<4>; .reg .b16 low, high; {unpack} {scaled}"
        "cvt.rn.satfinite.e4m3x2.f32 low, x1, x0; cvt.rn.satfinite.e4m3x2.f32 high, x3, x2;"
        f"mov.b32 $0, {{low, high}}; {last} }}"
    )


def _each(op: str, operand: str = "") -> str:
    """One instruction for each of four words."""
    return "".join(f"{op} x{i}, ${i + 1}{operand};" for i in range(4))


_SCALES = "$5 $6 $7 $8"
_KEEP = "and.b32 $0, $0, $9;"
ROWS_FP32 = _cast(_each("mov.b32"), _SCALES)
# By prmt, lest ptxas keep the values for the columns, which shift and mask the same words.
ROWS_BF16 = _cast(
    "".join(f"prmt.b32 x{i}, ${i // 2 + 1}, 0, {(0x1044, 0x3244)[i % 2]};" for i in range(4)),
    "$3 $3 $4 $4",
)
COLUMNS_FP32 = _cast(_each("mov.b32"), _SCALES, _KEEP)
COLUMNS_EVEN = _cast(_each("shl.b32", ", 16"), _SCALES, _KEEP)
COLUMNS_ODD = _cast(_each("and.b32", ", 0xffff0000"), _SCALES, _KEEP)


@gluon.jit
def _larger_fp32(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _larger_bf16(a, b):
    return gl.inline_asm_elementwise(
        "max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def larger(a, b, PACK: gl.constexpr):
    """The larger of two words of magnitudes, channel by channel."""
    if PACK == 2:
        return _larger_bf16(a, b)
    else:
        return _larger_fp32(a, b)


@gluon.jit
def magnitudes(words, PACK: gl.constexpr):
    """The words without their signs."""
    return words & (0x7FFF7FFF if PACK == 2 else 0x7FFFFFFF)


@gluon.jit
def largest(words, axis: gl.constexpr, PACK: gl.constexpr):
    """The largest magnitudes of words along an axis, a word of them: bf16 channels stay apart."""
    if PACK == 2:
        return gl.reduce(magnitudes(words, PACK), axis, _larger_bf16)
    else:
        return gl.reduce(magnitudes(words, PACK), axis, _larger_fp32)


@gluon.jit
def channel_bits(word, i: gl.constexpr, PACK: gl.constexpr):
    """Channel i of a word, as the bits of an FP32."""
    if PACK == 1:
        return word
    elif i == 0:
        return word << 16
    else:
        return word & -65536


@gluon.jit
def largest_bits(words, PACK: gl.constexpr):
    """The largest magnitude of each row of words, as the bits of an FP32."""
    word = largest(words, 1, PACK)
    return gl.maximum(channel_bits(word, 0, PACK), channel_bits(word, PACK - 1, PACK))


@gluon.jit
def scale_of(amax, SCALE_FMT: gl.constexpr = FP32):
    """The scale s of a block and 1 / s, from the bits of its absolute maximum."""
    gl.static_assert((SCALE_FMT == FP32) | (SCALE_FMT == UE8M0), "scale_fmt: fp32 or ue8m0")
    amax = gl.maximum(amax, AMAX_MIN)
    finite = amax < INF
    if SCALE_FMT == UE8M0:
        # 448 is 1.75 · 2^8: a significand above 1.75 carries into the exponent, which then drops by
        # 8. The quotient amax / 448 rounds to a power of two only where it is not above one.
        power = ((amax + 0x1FFFFF) & 0x7F800000) - (8 << 23)
        s = gl.where(finite, power, amax).to(gl.float32, bitcast=True)
    else:
        amax = amax.to(gl.float32, bitcast=True)
        s = amax * (1.0 / 448.0)
        s = gl.where(finite, gl.fma(gl.fma(s, -448.0, amax), 1.0 / 448.0, s), s)
    r = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [s], dtype=gl.float32, is_pure=True, pack=1
    )
    if SCALE_FMT == UE8M0:
        return s, r  # Of a power of two the approximation is exact; GPU tests check each of them.
    else:
        return s, gl.where(finite, gl.fma(gl.fma(-s, r, 1.0), r, r), r)


@gluon.jit
def cast_rows(words, r, PACK: gl.constexpr):
    """Words (tokens, words) times r in FP8, PACK bytes for each word."""
    if PACK == 2:
        return gl.inline_asm_elementwise(
            ROWS_BF16, "=r,r,r,f,f", [words, r], dtype=gl.int16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            ROWS_FP32, "=r,r,r,r,r,f,f,f,f", [words, r], dtype=gl.int8, is_pure=True, pack=4
        )


@gluon.jit
def cast_columns(words, r, keep, i: gl.constexpr, PACK: gl.constexpr):
    """Channel i of words (words, tokens) times r in FP8; zero where the byte `keep` is."""
    if PACK == 1:
        asm: gl.constexpr = COLUMNS_FP32
    elif i == 0:
        asm: gl.constexpr = COLUMNS_EVEN
    else:
        asm: gl.constexpr = COLUMNS_ODD
    return gl.inline_asm_elementwise(
        asm, "=r,r,r,r,r,f,f,f,f,r", [words, r, keep], dtype=gl.int8, is_pure=True, pack=4
    )


def as_words(x: Tensor) -> Typed:
    """x, contiguous, as 32-bit words; of a copy where it begins between two."""
    return Typed(x.clone() if x.data_ptr() % 4 else x, torch.int32)


def words_of(x: Tensor, q: Tensor) -> tuple[Typed, Typed, int]:
    """x as 32-bit words; q, FP8 in the layout of x, as the bytes of each; the channels of each."""
    pack = 4 // x.element_size()
    return as_words(x), Typed(q, (torch.int8, torch.int16)[pack - 1]), pack
