"""Arithmetic of the quantizer kernels: absolute maxima, scales, casts to FP8.

Kernels read tensors as 32-bit words: one FP32 channel or two bf16 channels, the even one in the low
half (PACK = 1 or 2 channels per word). From the maxima to the casts a thread keeps its words packed
in registers and unpacks them anew for each cast. The casts are inline PTX, which keeps unpack,
multiply and convert of a value together. Without it the compiler unpacks the whole tile first and
needs 100 more registers per thread.

Maxima are taken over the bits of |x| as integers, two bf16 values at a time. Integers have the
order of the magnitudes, with NaN above Inf, so a NaN wins without a special case. `max.NaN` would
also work, but Triton lowers it incorrectly beside transposed byte stores (triton#11111).

s = amax / 448 and r = 1 / s are correctly rounded: an approximation and one fused correction each,
as in `div.rn`, without its slow path, which amax >= 1e-12 never needs. Inf and NaN skip the
correction. tests/gpu/test_quantize.py compares every significand with the true quotient. For
power-of-two scales ("ue8m0") s is rounded up to the next power of two.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

AMAX_MIN = gl.constexpr(0x2B8CBCCC)
"""The bits of 1e-12."""
INF = gl.constexpr(0x7F800000)
"""The bits of Inf."""


SCALE_FMTS = {"fp32": 0, "ue8m0": 1}
"""Scale format -> SCALE_FMT, a constexpr of the kernels. The ops check the format.

A number, because the launcher compares strings by address, and every call of an op may bring a new
string object.
"""
FP32 = gl.constexpr(SCALE_FMTS["fp32"])
UE8M0 = gl.constexpr(SCALE_FMTS["ue8m0"])


def _cast_ptx(unpack: str, reciprocals: str, last: str = "") -> gl.constexpr:
    """PTX that casts four values to four bytes in $0.

    `unpack` puts the values as FP32 into x0 to x3. `reciprocals` names the operands with the
    factors of the four; `last` runs at the end.
    """
    scaled = "".join(f"mul.rn.f32 x{i}, x{i}, {r};" for i, r in enumerate(reciprocals.split()))
    return gl.constexpr(
        f"{{ .reg .b32 x<4>; .reg .b16 low, high; {unpack} {scaled}"
        "cvt.rn.satfinite.e4m3x2.f32 low, x1, x0; cvt.rn.satfinite.e4m3x2.f32 high, x3, x2;"
        f"mov.b32 $0, {{low, high}}; {last} }}"
    )


def _for_each_word(op: str, operand: str = "") -> str:
    """`op` for each of the four words $1 to $4."""
    return "".join(f"{op} x{i}, ${i + 1}{operand};" for i in range(4))


_RECIPROCALS = "$5 $6 $7 $8"
_MASK = "and.b32 $0, $0, $9;"
ROWS_FP32 = _cast_ptx(_for_each_word("mov.b32"), _RECIPROCALS)
# Unpacked by prmt, because the casts of columns shift and mask the same words: with the same
# instructions here, ptxas would share the results and keep them in registers.
ROWS_BF16 = _cast_ptx(
    "".join(f"prmt.b32 x{i}, ${i // 2 + 1}, 0, {(0x1044, 0x3244)[i % 2]};" for i in range(4)),
    "$3 $3 $4 $4",
)
COLUMNS_FP32 = _cast_ptx(_for_each_word("mov.b32"), _RECIPROCALS, _MASK)
COLUMNS_EVEN = _cast_ptx(_for_each_word("shl.b32", ", 16"), _RECIPROCALS, _MASK)
COLUMNS_ODD = _cast_ptx(_for_each_word("and.b32", ", 0xffff0000"), _RECIPROCALS, _MASK)


@gluon.jit
def _max_fp32(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _max_bf16x2(a, b):
    return gl.inline_asm_elementwise(
        "max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def max_magnitudes(a, b, PACK: gl.constexpr):
    """The maxima of two words of magnitudes, channel by channel."""
    if PACK == 2:
        return _max_bf16x2(a, b)
    else:
        return _max_fp32(a, b)


@gluon.jit
def magnitudes(words, PACK: gl.constexpr):
    """The words with the sign bits cleared."""
    return words & (0x7FFF7FFF if PACK == 2 else 0x7FFFFFFF)


@gluon.jit
def amax_words(words, axis: gl.constexpr, PACK: gl.constexpr):
    """The largest magnitudes along an axis, as words: the channels of a word stay apart."""
    if PACK == 2:
        return gl.reduce(magnitudes(words, PACK), axis, _max_bf16x2)
    else:
        return gl.reduce(magnitudes(words, PACK), axis, _max_fp32)


@gluon.jit
def channel_bits(word, i: gl.constexpr, PACK: gl.constexpr):
    """Channel i of a word, as the bits of an FP32 number."""
    if PACK == 1:
        return word
    elif i == 0:
        return word << 16
    else:
        return word & -65536


@gluon.jit
def row_amax(words, PACK: gl.constexpr):
    """The largest magnitude of each row of words, as the bits of an FP32 number."""
    word = amax_words(words, 1, PACK)
    return gl.maximum(channel_bits(word, 0, PACK), channel_bits(word, PACK - 1, PACK))


@gluon.jit
def scale_of(amax, SCALE_FMT: gl.constexpr = FP32):
    """The scale s and r = 1 / s of a block, from the bits of its absolute maximum."""
    gl.static_assert((SCALE_FMT == FP32) | (SCALE_FMT == UE8M0), "scale_fmt: fp32 or ue8m0")
    amax = gl.maximum(amax, AMAX_MIN)
    finite = amax < INF
    if SCALE_FMT == UE8M0:
        # 448 is 1.75 · 2^8. The sum carries into the exponent if the significand is above 1.75.
        # Then the exponent drops by 8. Rounding amax / 448 to FP32 first, as the reference does,
        # gives the same: no quotient above a power of two is rounded down to it.
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
        return s, r  # For powers of two the approximation is exact; GPU tests check each of them.
    else:
        return s, gl.where(finite, gl.fma(gl.fma(-s, r, 1.0), r, r), r)


@gluon.jit
def cast_rows(words, r, PACK: gl.constexpr):
    """Words (tokens, words) times r, cast to FP8: PACK bytes for each word."""
    if PACK == 2:
        return gl.inline_asm_elementwise(
            ROWS_BF16, "=r,r,r,f,f", [words, r], dtype=gl.int16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            ROWS_FP32, "=r,r,r,r,r,f,f,f,f", [words, r], dtype=gl.int8, is_pure=True, pack=4
        )


@gluon.jit
def cast_columns(words, r, mask, i: gl.constexpr, PACK: gl.constexpr):
    """Channel i of words (words, tokens) times r, cast to FP8.

    `mask` holds a byte for each result: -1 to keep it, 0 to make it zero.
    """
    bf16_asm: gl.constexpr = COLUMNS_EVEN if i == 0 else COLUMNS_ODD
    asm: gl.constexpr = COLUMNS_FP32 if PACK == 1 else bf16_asm
    return gl.inline_asm_elementwise(
        asm, "=r,r,r,r,r,f,f,f,f,r", [words, r, mask], dtype=gl.int8, is_pure=True, pack=4
    )


FP8_WORDS = {2: torch.int16, 1: torch.int8}
"""PACK -> the integer type that holds as many FP8 values."""


def as_words(x: Tensor) -> tuple[Tensor, torch.dtype]:
    """x (contiguous) as int32 words; a copy of x if it starts between two words."""
    return (x.clone() if x.data_ptr() % 4 else x), torch.int32


def words_of(
    x: Tensor, q: Tensor
) -> tuple[tuple[Tensor, torch.dtype], tuple[Tensor, torch.dtype], int]:
    """The kernel arguments for x, as int32 words, and for its FP8 copy q, and PACK.

    An element of q as a kernel argument is an integer with the FP8 values of one word.
    """
    pack = 4 // x.itemsize
    return as_words(x), (q, FP8_WORDS[pack]), pack
