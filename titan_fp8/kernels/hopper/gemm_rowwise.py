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

import torch
from torch import Tensor

from titan_fp8.kernels.hopper.gemm_blockwise import BAND, OPTIONS, Launch, matrix, run
from titan_fp8.kernels.hopper.gemm_rowwise_grouped import (
    rowwise_fprop_dgrad_kernel,
    rowwise_wgrad_kernel,
)
from titan_fp8.reference import E4M3


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
    assert b.shape[2] == k and a_MK.is_contiguous() and b.is_contiguous()
    assert a_MK.dtype == b.dtype == E4M3 and n % 16 == 0 and k % 16 == 0
    assert sa.shape == (m,) and sb.shape == (groups, n)
    args = (
        matrix(a_MK, (128, 128)),
        _scales(sa),
        matrix(b, (128, 128)),
        _scales(sb),
        matrix(c_MN, (64, 128)),
        c_MN,
        offs,
        _first_ticket(c_MN),
        *(m, n, k, groups),
    )
    # FP32 results need an epilogue buffer twice as large, in place of one stage.
    return (
        rowwise_fprop_dgrad_kernel,
        args,
        {"STAGES": 5 - c_MN.itemsize // 2, "BAND": BAND, **OPTIONS},
    )


def wgrad_launch(
    a_NM: Tensor, sa: Tensor, b_KM: Tensor, sb: Tensor, c_ENK: Tensor, offs: Tensor
) -> Launch:
    """The launch that writes the grouped `rowwise_wgrad` to `c_ENK`."""
    (n, width), k, groups = a_NM.shape, b_KM.shape[0], offs.shape[0]
    assert b_KM.shape[1] == width and width % 128 == 0 and n % 16 == 0 and k % 16 == 0
    assert a_NM.dtype == b_KM.dtype == E4M3 and a_NM.is_contiguous() and b_KM.is_contiguous()
    assert sa.shape == (groups, n) and sb.shape == (groups, k)
    args = (
        matrix(a_NM, (128, 128)),
        _scales(sa),
        matrix(b_KM, (128, 128)),
        _scales(sb),
        matrix(c_ENK, (64, 128)),
        c_ENK,
        offs,
        _first_ticket(c_ENK),
        *(width, n, k, groups),
    )
    buffers = 4 // c_ENK.itemsize
    return rowwise_wgrad_kernel, args, {"STAGES": 3, "BUFFERS": buffers, "BAND": BAND, **OPTIONS}


def _first_ticket(c: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=c.device)


def _scales(s: Tensor) -> Tensor:
    assert s.dtype == torch.float32 and s.is_contiguous()
    return s


def _scaled_mm(
    a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    scales = {"scale_a": sa[:, None], "scale_b": sb[None, :]}
    y = torch._scaled_mm(a, b.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return y.to(out_dtype)
