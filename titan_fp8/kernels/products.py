"""fprop and dgrad, of a weight in high precision: its quantiser and the GEMM, one behind the other.

The FP8 copy of a weight lives no longer than its GEMM, and the host dispatches one op for both.
"""

from collections.abc import Callable

from torch import Tensor

from titan_fp8.kernels.hopper.gemm_blockwise import blockwise_mm, blockwise_mm_pair
from titan_fp8.kernels.hopper.gemm_rowwise import rowwise_mm
from titan_fp8.kernels.hopper.quantize_blockwise import quantize_128x128, quantize_128x128_t
from titan_fp8.kernels.hopper.quantize_rowwise import quantize_row, quantize_weight_col_t


def _of_weight(mm: Callable, quantize: Callable) -> Callable:
    """The function of `reference.py` that multiplies a and its scale by w, made of these two."""

    def product(a: Tensor, sa: Tensor, w: Tensor, *rest) -> Tensor:
        return mm(a, sa, *quantize(w.contiguous()), *rest)

    return product


blockwise_fprop = _of_weight(blockwise_mm, quantize_128x128)
blockwise_dgrad = _of_weight(blockwise_mm, quantize_128x128_t)
rowwise_fprop = _of_weight(rowwise_mm, quantize_row)
rowwise_dgrad = _of_weight(rowwise_mm, quantize_weight_col_t)


def blockwise_dgrad_pair(
    a: Tensor, sa: Tensor, w: Tensor, a2: Tensor, sa2: Tensor, w2: Tensor, *rest
) -> Tensor:
    """The sum of two `blockwise_dgrad`."""
    b, b2 = (quantize_128x128_t(t.contiguous()) for t in (w, w2))
    return blockwise_mm_pair(a, sa, *b, a2, sa2, *b2, *rest)
