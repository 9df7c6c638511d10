"""GEMMs alone, operands quantized beforehand: speed, share of the fastest tensorwise FP8 GEMM, and
ratio to bf16 and to other libraries.

fprop, dgrad and wgrad of dense layers, and the M-grouped (fprop, dgrad) and K-grouped (wgrad) GEMMs
of expert layers, blockwise and rowwise. Groups end at uneven multiples of 128, or anywhere in the
rows that say so.

Columns: "of roof %" is the share of the fastest tensorwise FP8 GEMM of this run. Its operands may
stay in the L2 cache, those of the other GEMMs do not. "x bf16" and the columns to its right are our
speed divided by that of bf16 and of other libraries' FP8 GEMMs: cuBLAS with the same scales (dense
only, because PyTorch has no grouped GEMM with blockwise scales), and PyTorch with rowwise scales
(its grouped wgrad needs multiples of 16).

A wrong result ends the benchmark.
"""

import functools
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from bench.common import Result, median_us, randn, sets_beyond_l2
from bench.shapes import DENSE, GROUPED, uneven_ends
from tables import Row
from torch import Tensor

from titan_fp8 import layouts, reference
from titan_fp8.kernels import hopper

ERROR = 2.5e-3
"""Bound on the relative error against the FP32 product of the dequantized operands. Most of it is
the rounding of the result to bf16."""
FAST_ERROR = 7168 / 32 * 2**-13
"""The same for sums that stay in the tensor cores, those of rowwise_mm: each of the K / 32
additions keeps about 14 bits (K is at most 7168 here)."""
TITLE = "GEMMs"
QUANTIZERS = {
    "blockwise_mm": ("quantize_1x128", "quantize_128x128"),
    "blockwise_wgrad": ("quantize_128x1_t", "quantize_128x1_t"),
    "rowwise_mm": ("quantize_row", "quantize_row"),
    "rowwise_wgrad": ("quantize_col_t", "quantize_col_t"),
}
"""Those of both operands of each op."""

Product = Callable[[], Tensor]
Maker = Callable[[], Product]
Dims = tuple[int, int, int, int]
"""(E, M, N, K): of an mm those of the product, whose contraction is last; of a wgrad those of the
layer."""


def sets(make: Maker, bytes_of_one: int) -> list[Product]:
    return [make() for _ in range(sets_beyond_l2(bytes_of_one))]


def flop(dims: Dims) -> int:
    _, m, n, k = dims
    return 2 * m * n * k


def tflops(products: list[Product], dims: Dims) -> float:
    return flop(dims) / median_us(products) / 1e6


def roof() -> float:
    """TFLOPS of a tensorwise FP8 GEMM, the faster of two sizes."""
    one = torch.ones((), device="cuda")
    best = 0.0
    for size in (4096, 8192):
        a, b = (randn(size, size).to(layouts.E4M3) for _ in range(2))
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        product = functools.partial(torch._scaled_mm, a, b.t(), one, one, **options)
        best = max(best, tflops([product], (1, size, size, size)))
    return best


def operands(op: str, dims: Dims, offs: Tensor | None, aligned: bool = False) -> tuple:
    """Arguments of an op: both operands with their scales, the group ends, and `aligned`."""
    e, m, n, k = dims
    left, right = (getattr(hopper, name) for name in QUANTIZERS[op])
    if op.endswith("wgrad"):
        columns = *left(randn(m, n), offs, aligned), *right(randn(m, k), offs, aligned)
        return *columns, offs, aligned
    weight = (n, k) if offs is None else (e, n, k)
    return *left(randn(m, k)), *right(randn(*weight)), offs, aligned


def ours(op: str, dims: Dims, offs: Tensor | None, aligned: bool = False) -> Product:
    return functools.partial(getattr(hopper, op), *operands(op, dims, offs, aligned))


def is_right(op: str, dims: Dims, offs: Tensor | None) -> bool:
    args = operands(op, dims, offs)
    got = getattr(hopper, op)(*args).float()
    want = getattr(reference, op)(*args, out_dtype=torch.float32)
    error = (got - want).norm() / want.norm()
    return bool(error < (FAST_ERROR if op == "rowwise_mm" else ERROR))


def in_bf16(wgrad: bool, dims: Dims, offs: Tensor | None) -> Product:
    e, m, n, k = dims
    if wgrad:
        left, right = randn(m, n).T, randn(m, k)
    else:
        left, right = randn(m, k), randn(*([] if offs is None else [e]), n, k).mT
    return lambda: left @ right if offs is None else torch._grouped_mm(left, right, offs=offs)


def torch_rowwise(wgrad: bool, dims: Dims, offs: Tensor | None) -> Product:
    e, _, n, k = dims
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": not wgrad}
    a, sa, b, sb, *_ = operands("rowwise_wgrad" if wgrad else "rowwise_mm", dims, offs)
    if offs is None:
        return lambda: torch._scaled_mm(a, b.t(), sa[:, None], sb[None], **options)
    if not wgrad:
        return lambda: torch._scaled_grouped_mm(a, b.mT, sa, sb, offs=offs, **options)
    # It needs group ends that are multiples of 16. All groups share their scales here.
    sizes = offs.diff(prepend=offs.new_zeros(1))
    ends = ((sizes + 15) // 16 * 16).cumsum(0).int()
    (a, sa), (b, sb) = (hopper.quantize_row(randn(size, int(ends[-1]))) for size in (n, k))
    sa, sb = sa.repeat(e), sb.repeat(e)
    return lambda: torch._scaled_grouped_mm(a, b.t(), sa, sb, offs=ends, **options)


def cublas(wgrad: bool, dims: Dims) -> Product:
    a, sa, b, sb, *_ = operands("blockwise_wgrad" if wgrad else "blockwise_mm", dims, None)
    scaling = F.ScalingType
    recipes = (scaling.BlockWise1x128, sb, scaling.BlockWise1x128)
    if not wgrad:
        sb = sb.as_strided((sb.stride(0), sb.shape[0]), (1, sb.stride(0)))
        recipes = (scaling.BlockWise1x128, sb, scaling.BlockWise128x128)
    return lambda: F.scaled_mm(a, b.t(), sa, *recipes, output_dtype=torch.bfloat16)


def row_of(name: str, op: str, dims: Dims, offs: Tensor | None, top: float) -> Row:
    """Times an op and what other libraries have in its place; `top` is the roof in TFLOPS."""
    e, m, n, k = dims
    wgrad, blockwise = op.endswith("wgrad"), op.startswith("blockwise")
    size = m * (n + k) if wgrad else m * k + e * n * k
    us = median_us(sets(lambda: ours(op, dims, offs), size))
    # After the timing, because the check would change the clock at which that starts.
    assert is_right(op, dims, offs), f"{name} {dims}: wrong result"
    makers: dict[str, Maker | None] = {
        "cuBLAS": (lambda: cublas(wgrad, dims)) if blockwise and offs is None else None,
        "rowwise": lambda: torch_rowwise(wgrad, dims, offs),
    }
    others = {
        library: tflops(sets(make, size), dims) if make else None
        for library, make in makers.items()
    }
    bf16 = tflops(sets(lambda: in_bf16(wgrad, dims, offs), 2 * size), dims)
    rate = flop(dims) / us / 1e6
    row = {"op": name, "E": e, "M": m, "N": n, "K": k, "us": us, "TFLOPS": rate}
    row |= {"of roof %": 100 * rate / top, "x bf16": rate / bf16}
    return row | {f"x {key}": rate / other if other else None for key, other in others.items()}


def measure() -> Result:
    top = roof()
    rows = []
    for m, n, k in DENSE:
        rows.append(row_of("fprop", "blockwise_mm", (1, m, n, k), None, top))
        rows.append(row_of("dgrad", "blockwise_mm", (1, m, k, n), None, top))
        rows.append(row_of("wgrad", "blockwise_wgrad", (1, m, n, k), None, top))
    for (e, m, n, k), alignment in itertools.product(GROUPED, (128, 1)):
        offs = uneven_ends(e, m, alignment).cuda()
        ends = "" if alignment == 128 else " any ends"
        for op in QUANTIZERS:
            name = "K-grouped" if op.endswith("wgrad") else "M-grouped"
            name += " rowwise" if op.startswith("rowwise") else ""
            rows.append(row_of(name + ends, op, (e, m, n, k), offs, top))
    return rows, {"fastest tensorwise FP8": f"{top:.0f} TFLOPS"}
