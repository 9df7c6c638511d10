"""The FP8 GEMMs alone, with operands that are quantized already, on one Hopper GPU.

    python scripts/bench_gemm.py [--json FILE] [--only dense|grouped]

fprop, dgrad and wgrad of dense layers, and the M-grouped (fprop, dgrad) and K-grouped (wgrad) GEMMs
of expert layers, blockwise and rowwise. Groups end at uneven multiples of 128, or anywhere in the
rows that say so.

Columns: "of roof %" is the share of the fastest tensorwise FP8 GEMM of this run. Its operands may
stay in the L2 cache, those of the other GEMMs do not. "x bf16" and the columns to its right are our
speed divided by that of bf16 and of other libraries' FP8 GEMMs: cuBLAS with the same scales (dense
only, because PyTorch has no grouped GEMM with blockwise scales), PyTorch with rowwise scales (its
grouped wgrad needs multiples of 16), and DeepGEMM if it is installed.

A wrong result ends the benchmark.
"""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from bench_common import (
    median_us,
    parser,
    print_failure,
    randn,
    report,
    require_hopper,
    sets_beyond_l2,
)
from shapes import DENSE, GROUPED, SEED, uneven_ends
from tables import Row
from torch import Tensor

from titan_fp8 import layouts, reference
from titan_fp8.kernels import hopper

try:
    import deep_gemm
except ImportError:
    deep_gemm = None

ERROR = 2.5e-3
"""Bound on the relative error against the FP32 product of the dequantized operands. Most of it is
the rounding of the result to bf16."""
FAST_ERROR = 7168 / 32 * 2**-13
"""The same for sums that stay in the tensor cores: each of the K / 32 additions keeps about 14 bits
(K is at most 7168 here)."""
ROWS = 128
"""Rows of each result that are checked."""
ABOUT = (
    "GEMMs alone, operands quantized beforehand: speed, share of the fastest tensorwise FP8 GEMM, "
    "and ratio to bf16 and to other libraries."
)

Product = Callable[[], Tensor]
Dims = tuple[int, int, int, int]


def sets(make: Callable[[], Product], bytes_of_one: int) -> list[Product]:
    return [make() for _ in range(sets_beyond_l2(bytes_of_one))]


def flop(dims: Dims) -> int:
    _, m, n, k = dims
    return 2 * m * n * k


def tflops(products: list[Product], dims: Dims) -> float:
    return flop(dims) / median_us(products) / 1e6


def attempt(
    library: str, make: Callable[[], Product] | None, size: int, dims: Dims
) -> float | None:
    """TFLOPS of a library's product; None if it has none (`make`), or if it fails.

    The reason of a failure goes to stderr.
    """
    if make is None:
        return None
    try:
        return tflops(sets(make, size), dims)
    except Exception as reason:
        print_failure(f"{library} {dims}", reason)
        return None


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def check_mm(y: Tensor, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, offs: Tensor | None) -> bool:
    """Whether randomly drawn rows of y are close to their FP32 products."""
    rows = torch.randint(a.shape[0], (ROWS,), device="cuda")
    groups = torch.zeros_like(rows)
    if offs is not None:
        groups = torch.searchsorted(offs.long(), rows, right=True)
    left = reference.dequantize_1x128(a[rows], sa[rows])
    b, sb = b.view(-1, *b.shape[-2:]), sb.reshape(-1, *sb.shape[-2:])
    want = left.new_empty(ROWS, b.shape[1])
    for e in groups.unique().tolist():
        want[groups == e] = left[groups == e] @ reference.dequantize_128x128(b[e], sb[e]).T
    return relative(y[rows], want) < ERROR and not y.isnan().any()


def check_wgrad(dw: Tensor, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, offs: Tensor) -> bool:
    """Whether randomly drawn rows of dW, in every group, are close to their FP32 products."""
    rows = torch.randint(a.shape[0], (ROWS,), device="cuda")
    left = reference.dequantize_1x128(a[rows], sa[rows])
    errors = []
    for e, columns in enumerate(layouts.column_slices(a, offs, False)):
        first, last = columns.start // 128, columns.stop // 128
        right = reference.dequantize_1x128(b[:, columns], sb[:, first:last])
        errors.append(relative(dw[e, rows], left[:, columns] @ right.T))
    return max(errors) < ERROR and not dw.isnan().any()


def roof() -> float:
    """TFLOPS of a tensorwise FP8 GEMM, the faster of two sizes."""
    one = torch.ones((), device="cuda")
    best = 0.0
    for size in (4096, 8192):
        a, b = (randn(size, size).to(layouts.E4M3) for _ in range(2))
        product = lambda a=a, b=b: torch._scaled_mm(  # noqa: E731
            a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        best = max(best, tflops([product], (1, size, size, size)))
    return best


def row(name: str, dims: Dims, us: float, bf16: float, top: float, others: Row) -> Row:
    """A row of the table; `bf16`, `top` and the values of `others` are in TFLOPS."""
    rate = flop(dims) / us / 1e6
    return {
        "op": name,
        "E": dims[0],
        "M": dims[1],
        "N": dims[2],
        "K": dims[3],
        "us": us,
        "TFLOPS": rate,
        "of roof %": 100 * rate / top,
        "x bf16": rate / bf16,
        **{f"x {key}": rate / other if other else None for key, other in others.items()},
    }


def bf16_mm(dims: Dims, offs: Tensor | None) -> Product:
    e, m, n, k = dims
    if offs is None:
        x, w = randn(m, k), randn(n, k)
        return lambda: x @ w.T
    x, w = randn(m, k), randn(e, n, k)
    return lambda: torch._grouped_mm(x, w.mT, offs=offs)


def bf16_wgrad(dims: Dims, offs: Tensor | None) -> Product:
    _, m, n, k = dims
    g, x = randn(m, n), randn(m, k)
    if offs is None:
        return lambda: g.T @ x
    return lambda: torch._grouped_mm(g.T, x, offs=offs)


def torch_rowwise_mm(dims: Dims, offs: Tensor | None) -> Product:
    e, m, n, k = dims
    if offs is None:
        operands = *hopper.quantize_row(randn(m, k)), *hopper.quantize_row(randn(n, k))
        return lambda: hopper.rowwise_mm(*operands)
    (a, sa), (b, sb) = hopper.quantize_row(randn(m, k)), hopper.quantize_row(randn(e, n, k))
    options = {"offs": offs, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return lambda: torch._scaled_grouped_mm(a, b.mT, sa, sb, **options)


def torch_rowwise_wgrad(dims: Dims, offs: Tensor | None) -> Product:
    e, m, n, k = dims
    if offs is None:
        operands = *hopper.quantize_col_t(randn(m, n)), *hopper.quantize_col_t(randn(m, k))
        return lambda: hopper.rowwise_wgrad(*operands)
    # It needs group ends that are multiples of 16. All groups share their scales here.
    sizes = offs.diff(prepend=offs.new_zeros(1))
    ends = ((sizes + 15) // 16 * 16).cumsum(0).int()
    (a, sa), (b, sb) = (hopper.quantize_row(randn(size, int(ends[-1]))) for size in (n, k))
    options = {"offs": ends, "out_dtype": torch.bfloat16, "use_fast_accum": False}
    sa, sb = sa.repeat(e), sb.repeat(e)
    return lambda: torch._scaled_grouped_mm(a, b.t(), sa, sb, **options)


def mm_row(name: str, dims: Dims, offs: Tensor | None, top: float) -> Row:
    """Times a blockwise fprop or dgrad; `dims` are those of the product, contraction last."""
    e, m, n, k = dims
    size = m * k + e * n * k
    weight = (n, k) if offs is None else (e, n, k)

    def make() -> Product:
        operands = *hopper.quantize_1x128(randn(m, k)), *hopper.quantize_128x128(randn(*weight))
        return lambda: hopper.blockwise_mm(*operands, offs)

    def cublas() -> Product:
        a, sa = hopper.quantize_1x128(randn(m, k))
        b, sb = hopper.quantize_128x128(randn(n, k))
        sb = sb.as_strided((sb.stride(0), sb.shape[0]), (1, sb.stride(0)))
        scaling = F.ScalingType
        recipes = (scaling.BlockWise1x128, sb, scaling.BlockWise128x128)
        return lambda: F.scaled_mm(a, b.t(), sa, *recipes, output_dtype=torch.bfloat16)

    def deepgemm() -> Product:
        a, b = hopper.quantize_1x128(randn(m, k)), hopper.quantize_128x128(randn(*weight))
        y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        if offs is None:
            return lambda: deep_gemm.fp8_gemm_nt(a, b, y)
        group = torch.searchsorted(offs, torch.arange(m, device="cuda"), right=True).int()
        return lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, y, group)

    # The check runs after the timing, because it would change the clock at which that starts.
    us = median_us(sets(make, size))
    operands = *hopper.quantize_1x128(randn(m, k)), *hopper.quantize_128x128(randn(*weight))
    right = check_mm(hopper.blockwise_mm(*operands, offs), *operands, offs)
    assert right, f"{name} {dims}: wrong result"
    others = {
        "cuBLAS": attempt("cuBLAS", cublas if offs is None else None, size, dims),
        "rowwise": attempt("rowwise", lambda: torch_rowwise_mm(dims, offs), size, dims),
        "DeepGEMM": attempt("DeepGEMM", deepgemm if deep_gemm else None, size, dims),
    }
    bf16 = tflops(sets(lambda: bf16_mm(dims, offs), 2 * size), dims)
    return row(name, dims, us, bf16, top, others)


def wgrad_row(name: str, dims: Dims, offs: Tensor | None, top: float) -> Row:
    """Times a blockwise wgrad; `dims` are the layer's (E, M, N, K), and M is contracted."""
    e, m, n, k = dims
    size = m * (n + k)
    ends = offs if offs is not None else torch.tensor([m], dtype=torch.int32, device="cuda")

    def make() -> Product:
        g, x = (hopper.quantize_128x1_t(randn(m, width), offs) for width in (n, k))
        return lambda: hopper.blockwise_wgrad(*g, *x, offs)

    def cublas() -> Product:
        (a, sa), (b, sb) = (hopper.quantize_128x1_t(randn(m, width)) for width in (n, k))
        scaling = F.ScalingType.BlockWise1x128
        recipes = (scaling, sb, scaling)
        return lambda: F.scaled_mm(a, b.t(), sa, *recipes, output_dtype=torch.bfloat16)

    us = median_us(sets(make, size))
    g, x = (hopper.quantize_128x1_t(randn(m, width), offs) for width in (n, k))
    dw = hopper.blockwise_wgrad(*g, *x, offs).view(-1, n, k)
    assert check_wgrad(dw, *g, *x, ends), f"{name} {dims}: wrong result"
    others = {
        "cuBLAS": attempt("cuBLAS", cublas if offs is None else None, size, dims),
        "rowwise": attempt("rowwise", lambda: torch_rowwise_wgrad(dims, offs), size, dims),
        "DeepGEMM": None,
    }
    bf16 = tflops(sets(lambda: bf16_wgrad(dims, offs), 2 * size), dims)
    return row(name, dims, us, bf16, top, others)


def rowwise_row(name: str, dims: Dims, offs: Tensor, top: float, wgrad: bool) -> Row:
    """Times a grouped rowwise GEMM; `dims` are as in `mm_row` or in `wgrad_row`."""
    e, m, n, k = dims
    size = m * (n + k) if wgrad else m * k + e * n * k
    op, definition = (
        (hopper.rowwise_wgrad, reference.rowwise_wgrad)
        if wgrad
        else (hopper.rowwise_mm, reference.rowwise_mm)
    )

    def operands() -> tuple:
        if wgrad:
            g, x = (hopper.quantize_col_t(randn(m, width), offs) for width in (n, k))
            return *g, *x, offs
        return *hopper.quantize_row(randn(m, k)), *hopper.quantize_row(randn(e, n, k)), offs

    def make() -> Product:
        args = operands()
        return lambda: op(*args)

    us = median_us(sets(make, size))
    args = operands()
    error = relative(op(*args), definition(*args, out_dtype=torch.float32))
    assert error < (ERROR if wgrad else FAST_ERROR), f"{name} {dims}: wrong result"
    library, bf16 = (torch_rowwise_wgrad, bf16_wgrad) if wgrad else (torch_rowwise_mm, bf16_mm)
    others = {
        "cuBLAS": None,
        "rowwise": attempt("rowwise", lambda: library(dims, offs), size, dims),
        "DeepGEMM": None,
    }
    plain = tflops(sets(lambda: bf16(dims, offs), 2 * size), dims)
    return row(name, dims, us, plain, top, others)


def main() -> None:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--only", choices=["dense", "grouped"])
    args = arguments.parse_args()
    require_hopper(arguments)
    top = roof()
    rows = []
    if args.only != "grouped":
        for m, n, k in DENSE:
            rows.append(mm_row("fprop", (1, m, n, k), None, top))
            rows.append(mm_row("dgrad", (1, m, k, n), None, top))
            rows.append(wgrad_row("wgrad", (1, m, n, k), None, top))
    if args.only != "dense":
        for (e, m, n, k), alignment in itertools.product(GROUPED, (128, 1)):
            offs = uneven_ends(e, m, alignment).cuda()
            kind = "" if alignment == 128 else " any ends"
            rows.append(mm_row("M-grouped" + kind, (e, m, n, k), offs, top))
            rows.append(wgrad_row("K-grouped" + kind, (e, m, n, k), offs, top))
            rows.append(rowwise_row("M-grouped rowwise" + kind, (e, m, n, k), offs, top, False))
            rows.append(rowwise_row("K-grouped rowwise" + kind, (e, m, n, k), offs, top, True))
    facts = {"fastest tensorwise FP8": f"{top:.0f} TFLOPS", "seed of the ends": SEED}
    report(rows, args.json, "GEMMs", ABOUT, **facts)


if __name__ == "__main__":
    main()
