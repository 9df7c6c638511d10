"""The rowwise GEMMs: PyTorch's for dense layers, our kernels for groups.

Dense products run as `torch._scaled_mm` (CUTLASS). With 64 groups, wgrad by
`torch._scaled_grouped_mm` takes more than 3 times as long as our blockwise one, and fprop and dgrad
up to 1.4 times. So grouped products have kernels of their own (gemm_rowwise_grouped.py), with the
structure of the blockwise ones:

    rowwise_mm      fprop, dgrad   c[m] = a[m] b[e]ᵀ         M-grouped, scales per row
    rowwise_wgrad   wgrad          c[e] = a[:, e] b[:, e]ᵀ   K-grouped, scales per group and row

Accumulation. fprop and dgrad use fast accumulation (`use_fast_accum` for dense ones): the sums stay
in the tensor cores, with about 14 bits. wgrad uses slow accumulation, because it sums over all
tokens of a batch and its error goes into every later step: partial sums are promoted to FP32, in
the grouped kernel every 128 tokens.
"""

import functools

import torch
from torch import Tensor

from titan_fp8.kernels.hopper.gemm_blockwise import (
    MM_OPTIONS,
    WGRAD_OPTIONS,
    Launch,
    first_ticket,
    matrix,
    run,
)
from titan_fp8.kernels.hopper.gemm_rowwise_grouped import (
    rowwise_fprop_dgrad_kernel,
    rowwise_wgrad_kernel,
)
from titan_fp8.kernels.launch import CACHED_SHAPES, TensorMap
from titan_fp8.layouts import E4M3


def rowwise_mm(
    a_MK: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """fprop and dgrad: a (M, K) by b (N, K), or each group's rows by its own b of (E, N, K).

    One scale per row: sa (M,), sb (N,) or (E, N). Fast accumulation. Returns (M, N); rows of no
    group are zero. Groups may start at any row, so `aligned` makes no difference.
    """
    m, n = a_MK.shape[0], b.shape[-2]
    if offs is None and m:
        return _scaled_mm(a_MK, sa, b, sb, out_dtype, fast=True)
    c = a_MK.new_empty(m, n, dtype=out_dtype)
    if m:
        assert offs is not None
        run(mm_launch(a_MK, sa, b, sb, c, offs))
    return c


def rowwise_wgrad(
    a_NM: Tensor,
    sa: Tensor,
    b_KM: Tensor,
    sb: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """wgrad: the transposed copies a (N, Mt) by b (K, Mt), over all tokens or those of each group.

    One scale per row, or per group and row: sa (N,) or (E, N), sb (K,) or (E, K). Slow accumulation
    (with groups, FP32 every 128 tokens). Returns (N, K), or (E, N, K) with zeros for empty groups.
    The columns at which groups start follow from `offs`, `aligned` or not.
    """
    (n, width), k = a_NM.shape, b_KM.shape[0]
    if offs is None and width:
        return _scaled_mm(a_NM, sa, b_KM, sb, out_dtype, fast=False)
    c = a_NM.new_empty(*([] if offs is None else offs.shape), n, k, dtype=out_dtype)
    if not width:
        return c.zero_()
    assert offs is not None
    run(wgrad_launch(a_NM, sa, b_KM, sb, c, offs))
    return c


def mm_launch(
    a_MK: Tensor, sa: Tensor, b: Tensor, sb: Tensor, c_MN: Tensor, offs: Tensor
) -> Launch:
    """The launch that writes the grouped `rowwise_mm` to `c_MN`."""
    (m, k), (groups, n, _) = a_MK.shape, b.shape
    assert b.shape[2] == k and n % 16 == 0 and k % 16 == 0
    assert sa.shape == (m,) and sb.shape == (groups, n)
    maps = _maps(m, groups * n, k, m, n, c_MN.itemsize)
    args = (*_operands(a_MK, sa, b, sb, c_MN, maps), offs, first_ticket(c_MN), m, n, k, groups)
    return rowwise_fprop_dgrad_kernel, args, MM_OPTIONS[c_MN.itemsize]


def wgrad_launch(
    a_NM: Tensor, sa: Tensor, b_KM: Tensor, sb: Tensor, c_ENK: Tensor, offs: Tensor
) -> Launch:
    """The launch that writes the grouped `rowwise_wgrad` to `c_ENK`."""
    (n, width), k, groups = a_NM.shape, b_KM.shape[0], offs.shape[0]
    assert b_KM.shape[1] == width and width % 128 == 0 and n % 16 == 0 and k % 16 == 0
    assert sa.shape == (groups, n) and sb.shape == (groups, k)
    maps = _maps(n, k, width, groups * n, k, c_ENK.itemsize)
    args = _operands(a_NM, sa, b_KM, sb, c_ENK, maps)
    args = (*args, offs, first_ticket(c_ENK), width, n, k, groups)
    return rowwise_wgrad_kernel, args, WGRAD_OPTIONS[c_ENK.itemsize]


@functools.lru_cache(CACHED_SHAPES)
def _maps(
    a_rows: int, b_rows: int, contracted: int, c_rows: int, c_columns: int, itemsize: int
) -> tuple[TensorMap, TensorMap, TensorMap]:
    return (
        matrix(a_rows, contracted, 1),
        matrix(b_rows, contracted, 1),
        matrix(c_rows, c_columns, itemsize),
    )


def _operands(
    a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, c: Tensor, maps: tuple[TensorMap, ...]
) -> tuple:
    assert a.dtype == b.dtype == E4M3 and sa.dtype == sb.dtype == torch.float32
    assert all(t.is_contiguous() for t in (a, sa, b, sb, c))
    return (a, maps[0]), sa, (b, maps[1]), sb, (c, maps[2]), c


def _scaled_mm(
    a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    scales = sa[:, None], sb[None, :]
    y = torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return y if out_dtype == torch.bfloat16 else y.to(out_dtype)
