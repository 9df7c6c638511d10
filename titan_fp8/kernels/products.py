"""fprop and dgrad, of a weight in high precision: its quantiser and the GEMM, one behind the other.

The FP8 copy of a weight lives no longer than its GEMM, and the host dispatches one op for both.
"""

import torch
from torch import Tensor

from titan_fp8.kernels.gemm import blockwise_mm
from titan_fp8.kernels.quantize import quantize_128x128, quantize_128x128_t
from titan_fp8.kernels.rowwise import quantize_row, quantize_weight_col_t
from titan_fp8.kernels.rowwise_gemm import rowwise_mm


def blockwise_fprop(
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a Wᵀ for a (M, K) and W (N, K) or (E, N, K), quantised in tiles of 128x128; (M, N)."""
    return blockwise_mm(a, sa, *quantize_128x128(w.contiguous()), offs, aligned, out_dtype)


def blockwise_dgrad(
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a W for a (M, N) and W (N, K) or (E, N, K), quantised in tiles of 128x128; (M, K)."""
    return blockwise_mm(a, sa, *quantize_128x128_t(w.contiguous()), offs, aligned, out_dtype)


def rowwise_fprop(
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a Wᵀ for a (M, K) and W (N, K) or (E, N, K), quantised with a scale a row; (M, N)."""
    return rowwise_mm(a, sa, *quantize_row(w.contiguous()), offs, aligned, out_dtype)


def rowwise_dgrad(
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a W for a (M, N) and W (N, K) or (E, N, K), quantised with a scale a column; (M, K)."""
    return rowwise_mm(a, sa, *quantize_weight_col_t(w.contiguous()), offs, aligned, out_dtype)
