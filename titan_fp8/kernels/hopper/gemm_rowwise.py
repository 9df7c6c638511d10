"""The rowwise GEMMs, dense and grouped.

The kernels (gemm_rowwise_kernels.py) have the structure of the blockwise ones. A dense product has
one group of all tokens.

    rowwise_mm      fprop, dgrad   c[m] = a[m] b[e]ᵀ         M-grouped, scales per row
    rowwise_wgrad   wgrad          c[e] = a[:, e] b[:, e]ᵀ   K-grouped, scales per group and row

b[e] is the weight of the group of token m; a[:, e] are the columns of the tokens of group e.

Accumulation. fprop and dgrad use fast accumulation: the sums stay in the tensor cores, with about
14 bits. wgrad uses slow accumulation, because it sums over all tokens of a batch and its error goes
into every later step: partial sums are promoted to FP32 every 128 tokens. Both equal
`torch._scaled_mm` bit for bit, with and without `use_fast_accum`.
"""

import torch
from torch import Tensor

from titan_fp8.kernels.hopper.gemm_blockwise import (
    MM_OPTIONS,
    WGRAD_OPTIONS,
    Launch,
    mapped,
    new_ticket_counter,
    run,
)
from titan_fp8.kernels.hopper.gemm_rowwise_kernels import (
    rowwise_fprop_dgrad_kernel,
    rowwise_wgrad_kernel,
)
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
    c = a_MK.new_empty(a_MK.shape[0], b.shape[-2], dtype=out_dtype)
    if c.numel():
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
    Groups start at multiples of 128 columns, `aligned` or not.
    """
    (n, width), k = a_NM.shape, b_KM.shape[0]
    c = a_NM.new_empty(*([] if offs is None else offs.shape), n, k, dtype=out_dtype)
    if not width:
        return c.zero_()
    run(wgrad_launch(a_NM, sa, b_KM, sb, c, offs))
    return c


def mm_launch(
    a_MK: Tensor, sa: Tensor, b: Tensor, sb: Tensor, c_MN: Tensor, offs: Tensor | None
) -> Launch:
    """The launch that writes `rowwise_mm` to `c_MN`."""
    (m, k), n = a_MK.shape, b.shape[-2]
    groups = 1 if offs is None else offs.shape[0]
    assert b.shape[-1] == k and b.numel() == groups * n * k and n % 16 == 0 and k % 16 == 0
    assert sa.shape == (m,) and sb.shape == b.shape[:-1]
    ticket = None if offs is None else new_ticket_counter(c_MN)
    args = (*_operands(a_MK, sa, b, sb, c_MN), offs, ticket, m, n, k, groups)
    return rowwise_fprop_dgrad_kernel, args, MM_OPTIONS[c_MN.itemsize]


def wgrad_launch(
    a_NM: Tensor, sa: Tensor, b_KM: Tensor, sb: Tensor, c_ENK: Tensor, offs: Tensor | None
) -> Launch:
    """The launch that writes `rowwise_wgrad` to `c_ENK`, (N, K) or (E, N, K)."""
    (n, width), k = a_NM.shape, b_KM.shape[0]
    groups = 1 if offs is None else offs.shape[0]
    assert b_KM.shape[1] == width and n % 16 == 0 and k % 16 == 0
    assert width % (16 if offs is None else 128) == 0
    assert sa.numel() == groups * n and sb.numel() == groups * k
    ticket = None if offs is None else new_ticket_counter(c_ENK)
    args = (*_operands(a_NM, sa, b_KM, sb, c_ENK), offs, ticket, width, n, k, groups)
    return rowwise_wgrad_kernel, args, WGRAD_OPTIONS[c_ENK.itemsize]


def _operands(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, c: Tensor) -> tuple:
    assert a.dtype == b.dtype == E4M3 and sa.dtype == sb.dtype == torch.float32
    assert all(t.is_contiguous() for t in (a, sa, b, sb, c))
    return mapped(a), sa, mapped(b), sb, mapped(c), c
