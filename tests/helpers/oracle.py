"""The FP8 products once more, in NumPy, from the definition alone: nothing of titan_fp8 is used.

Quantizing follows the definition to the bit: e4m3 is a grid of 127 numbers and their negatives, a
value goes to the nearest, of two equally near to the one with the even code; scales are single FP32
operations. The products are FP64, of operands that FP64 holds exactly (4 bits of q times 24 of s),
so an implementation may differ by its own rounding alone; `Product.tolerance` says how much.

Blocks are described by the edges at which they begin along each dimension. Tokens keep their order
here; `transposed` lays them out as the transposed copies of the real thing are.
"""

from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 128
BLOCKWISE = ("blockwise", "blockwise_pow2")
ALIGNMENT = {"blockwise": 128, "blockwise_pow2": 128, "rowwise": 16, "rowwise_with_gw_hp": 16}

_exponent, _mantissa = np.divmod(np.arange(127), 8)
GRID = np.where(_exponent == 0, _mantissa * 2.0**-9, (8 + _mantissa) * 2.0 ** (_exponent - 10.0))
"""The values of the codes 0 to 126 (448); 127 is NaN, and 128 more is the negative."""
DECODE = np.concatenate([GRID, [np.nan], -GRID, [np.nan]])


def array(t: torch.Tensor) -> np.ndarray:
    """A bf16 or FP32 tensor as FP32, any integer one as it is."""
    t = t.detach()
    return (t.float() if t.is_floating_point() else t).numpy()


def encode(x: np.ndarray) -> np.ndarray:
    """FP32 to the codes of e4m3, to nearest even; beyond 464 there is NaN alone, as for NaN.

    Within a binade codes count the steps between its values; 16 steps are the next binade's 8.
    """
    a = np.abs(x, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        exponent = np.frexp(np.maximum(a, 2.0**-6))[1] + 6
        code = 8 * (exponent - 1) + np.rint(np.ldexp(a, 10 - exponent))
        code = np.where(a <= 464, code, 127)
    return (code + 128 * np.signbit(x)).astype(np.uint8)


def bf16(x: np.ndarray) -> np.ndarray:
    """FP32 rounded to bf16, to nearest even, and held in FP32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x).astype(np.float32)


def scale(amax: np.ndarray, recipe: str = "blockwise") -> np.ndarray:
    """max(amax, 1e-12) / 448 in FP32; for blockwise_pow2 the least power of two not below it."""
    s = np.maximum(amax, np.float32(1e-12)) / np.float32(448)
    if recipe != "blockwise_pow2":
        return s
    significand, exponent = np.frexp(s)
    with np.errstate(invalid="ignore"):
        power = np.ldexp(np.float32(1), np.where(significand == 0.5, exponent - 1, exponent))
    return np.where(np.isfinite(s), power, s).astype(np.float32)


@dataclass
class Quantized:
    """Codes in the order of the input, a scale for each block and for each element."""

    codes: np.ndarray
    block_scales: np.ndarray
    scales: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """q · s, exactly."""
        return DECODE[self.codes] * self.scales.astype(np.float64)


def _spread(s: np.ndarray, edges: list[int], size: int, axis: int) -> np.ndarray:
    return np.repeat(s, np.diff([*edges, size]), axis)


def quantize(
    x: np.ndarray, row_edges: list[int], column_edges: list[int], recipe: str
) -> Quantized:
    """x (R, C) in the blocks that begin at these rows and columns; the last may be short."""
    assert x.dtype == np.float32 and x.ndim == 2
    rows, columns = x.shape
    if not row_edges:
        s = np.zeros((0, len(column_edges)), np.float32)
        return Quantized(np.zeros(x.shape, np.uint8), s, np.zeros(x.shape, np.float32))
    amax = np.maximum.reduceat(np.abs(x), row_edges, 0)
    s = scale(np.maximum.reduceat(amax, column_edges, 1), recipe)
    full = _spread(_spread(s, row_edges, rows, 0), column_edges, columns, 1)
    with np.errstate(invalid="ignore"):
        codes = encode(x * (np.float32(1) / full))
    return Quantized(codes, s, full)


def every(step: int, stop: int, start: int = 0) -> list[int]:
    return list(range(start, stop, step))


def rows(x: np.ndarray, recipe: str) -> Quantized:
    """A left operand of fprop or dgrad: 1x128, or one scale a row."""
    width = BLOCK if recipe in BLOCKWISE else x.shape[1]
    return quantize(x, every(1, x.shape[0]), every(width, x.shape[1]), recipe)


def weight(w: np.ndarray, recipe: str, gemm: str) -> Quantized:
    """A right operand of fprop (scales along K) or dgrad (along N), w (N, K)."""
    n, k = w.shape
    if recipe in BLOCKWISE:
        return quantize(w, every(BLOCK, n), every(BLOCK, k), recipe)
    if gemm == "fprop":
        return quantize(w, every(1, n), [0], recipe)
    return quantize(w, [0], every(1, k), recipe)


def columns(x: np.ndarray, recipe: str) -> Quantized:
    """The tokens of one group as an operand of wgrad: 128x1, or one scale a column."""
    height = BLOCK if recipe in BLOCKWISE else max(1, x.shape[0])
    return quantize(x, every(height, x.shape[0]), every(1, x.shape[1]), recipe)


def groups(offs: np.ndarray | None, m: int) -> list[slice]:
    """The rows of each group; an end beyond m means m."""
    if offs is None:
        return [slice(0, m)]
    ends = [min(int(end), m) for end in offs]
    return [slice(start, end) for start, end in zip([0, *ends], ends)]


def transposed(
    x: np.ndarray, recipe: str, offs: np.ndarray | None, aligned: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Codes (K, Mt) and scales of a transposed copy, every group at a multiple of 128.

    Scales are (K, Mt/128) blockwise, (K,) or (E, K) rowwise; where no token stands codes are 0 and
    scales those of zeros.
    """
    align, (m, k) = ALIGNMENT[recipe] if offs is None else BLOCK, x.shape
    count = 1 if offs is None else len(offs)
    width = -(-m // align) * align
    if offs is not None and not aligned:
        width = (m + (align - 1) * count) // align * align
    codes = np.zeros((k, width), np.uint8)
    of_zeros = scale(np.float32(0), recipe)
    blockwise = recipe in BLOCKWISE
    s = np.full((k, width // BLOCK) if blockwise else (count, k), of_zeros, np.float32)
    column = 0
    for e, group in enumerate(groups(offs, m)):
        q = columns(x[group], recipe)
        size = len(x[group])
        if aligned:
            column = group.start
        codes[:, column : column + size] = q.codes.T
        if blockwise:
            first = column // BLOCK
            s[:, first : first + len(q.block_scales)] = q.block_scales.T
        elif size:
            s[e] = q.block_scales[0]
        column += -(-size // align) * align
    return codes, s if blockwise or offs is not None else s[0]


@dataclass
class Product:
    """An FP64 product: its value, the sum of the |a| |b| it adds up, and how many there are."""

    value: np.ndarray
    magnitude: np.ndarray
    terms: int

    def tolerance(self, dtype: torch.dtype, roundings: int = 1) -> np.ndarray:
        """How far an FP32 product, rounded to `dtype`, may be from `value`, element by element.

        With u = 2^-24: dequantizing rounds each operand once and each of the n products and n sums
        rounds once more, in whatever order, so the FP32 result is off by at most γ Σ|a||b| with
        γ = (n + 2)u / (1 - (n + 2)u) (Higham, Accuracy and Stability, §3.1). A kernel that scales
        partial sums, not operands, rounds no more often: n + 2 becomes n + 2⌈n/128⌉ at most, and
        the bound takes this. Then one rounding to `dtype`, 2^-8 of the result for bf16; more
        `roundings` where more were made. Below the normal range each step may lose 2^-149.
        """
        steps = self.terms + 2 * max(1, -(-self.terms // BLOCK))
        gamma = steps * 2.0**-24 / (1 - steps * 2.0**-24)
        unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24
        error = gamma * self.magnitude
        return error + roundings * unit * (np.abs(self.value) + error) + steps * 2.0**-149


def product(a: np.ndarray, b: np.ndarray) -> Product:
    """a (M, K) times b (K, N), FP64."""

    def matmul(a, b):
        # Through torch, whose threads a test can limit.
        return (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()

    return Product(matmul(a, b), matmul(np.abs(a), np.abs(b)), a.shape[1])


def _join(products: list[Product], join) -> Product:
    return Product(
        join([p.value for p in products]),
        join([p.magnitude for p in products]),
        max(p.terms for p in products),
    )


def layer(
    x: np.ndarray, w: np.ndarray, g: np.ndarray, recipe: str, offs: np.ndarray | None = None
) -> dict[str, Product]:
    """fprop y, dgrad dx and wgrad dW of x (M, K), w (N, K) or (E, N, K), g (M, N), by GEMM."""
    m, ws = x.shape[0], w[None] if offs is None else w
    slices = groups(offs, m)
    past = m - slices[-1].stop
    none = {"fprop": np.zeros((past, ws.shape[1])), "dgrad": np.zeros((past, ws.shape[2]))}
    y, dx, dw = [], [], []
    for group, w_e in zip(slices, ws, strict=True):
        x_e, g_e = x[group], g[group]
        y.append(product(rows(x_e, recipe).values, weight(w_e, recipe, "fprop").values.T))
        dx.append(product(rows(g_e, recipe).values, weight(w_e, recipe, "dgrad").values))
        if recipe == "rowwise_with_gw_hp":
            dw.append(product(bf16(g_e).astype(np.float64).T, bf16(x_e).astype(np.float64)))
        else:
            dw.append(product(columns(g_e, recipe).values.T, columns(x_e, recipe).values))
    y.append(Product(none["fprop"], none["fprop"], 0))
    dx.append(Product(none["dgrad"], none["dgrad"], 0))
    return {
        "fprop": _join(y, np.concatenate),
        "dgrad": _join(dx, np.concatenate),
        "wgrad": dw[0] if offs is None else _join(dw, np.stack),
    }
