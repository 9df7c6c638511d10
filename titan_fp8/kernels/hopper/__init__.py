"""The Hopper kernels (compute capability 9.0), in Gluon: a function for each primitive op."""

from titan_fp8.kernels.hopper.gather import gather_1x128_128x1_t
from titan_fp8.kernels.hopper.gemm import (
    blockwise_mm,
    blockwise_mm_pair,
    blockwise_wgrad,
    rowwise_mm,
    rowwise_wgrad,
)
from titan_fp8.kernels.hopper.gemm_bf16 import bf16_wgrad
from titan_fp8.kernels.hopper.quantize_blockwise import (
    quantize_1x128,
    quantize_1x128_128x1_t,
    quantize_128x1_t,
    quantize_128x128,
    quantize_128x128_t,
)
from titan_fp8.kernels.hopper.quantize_rowwise import quantize_row
from titan_fp8.kernels.hopper.quantize_rowwise_columns import (
    quantize_col_t,
    quantize_row_col_t,
    quantize_weight_col_t,
)
from titan_fp8.kernels.hopper.swiglu_quantize import (
    swiglu_1x128,
    swiglu_backward_1x128_128x1_t,
    swiglu_dscores,
)
from titan_fp8.kernels.hopper.transpose import transpose_fp8
