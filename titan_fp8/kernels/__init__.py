"""The kernels, a function for each op of `reference.py` and for the plugin's `places_of_tokens`.

The only room to import triton.
"""

from titan_fp8.kernels.hopper.gemm_bf16 import bf16_wgrad
from titan_fp8.kernels.hopper.gemm_blockwise import blockwise_mm, blockwise_wgrad
from titan_fp8.kernels.hopper.gemm_rowwise import rowwise_mm, rowwise_wgrad
from titan_fp8.kernels.hopper.quantize_blockwise import (
    quantize_1x128,
    quantize_1x128_128x1_t,
    quantize_128x1_t,
    quantize_128x128,
    quantize_128x128_t,
)
from titan_fp8.kernels.hopper.quantize_rowwise import (
    quantize_col_t,
    quantize_row,
    quantize_row_col_t,
    quantize_row_col_t_pair,
    quantize_weight_col_t,
)
from titan_fp8.kernels.hopper.swiglu_quantize import swiglu_1x128, swiglu_backward_1x128_128x1_t
from titan_fp8.kernels.permute import combine_rows, dot_rows, gather_rows, places_of_tokens
from titan_fp8.kernels.products import (
    blockwise_dgrad,
    blockwise_dgrad_pair,
    blockwise_fprop,
    rowwise_dgrad,
    rowwise_fprop,
)

__all__ = [
    "bf16_wgrad",
    "blockwise_dgrad",
    "blockwise_dgrad_pair",
    "blockwise_fprop",
    "blockwise_mm",
    "blockwise_wgrad",
    "combine_rows",
    "dot_rows",
    "gather_rows",
    "places_of_tokens",
    "quantize_128x1_t",
    "quantize_128x128",
    "quantize_128x128_t",
    "quantize_1x128",
    "quantize_1x128_128x1_t",
    "quantize_col_t",
    "quantize_row",
    "quantize_row_col_t",
    "quantize_row_col_t_pair",
    "quantize_weight_col_t",
    "rowwise_dgrad",
    "rowwise_fprop",
    "rowwise_mm",
    "rowwise_wgrad",
    "swiglu_1x128",
    "swiglu_backward_1x128_128x1_t",
]
