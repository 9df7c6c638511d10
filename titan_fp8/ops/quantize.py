"""The quantizers: bfloat16 or float32 in, e4m3 (q) and FP32 scales (s) out.

Names give the block that shares a scale, (rows x columns) of the input; `_t` says that the output
is written transposed. The last dimension of inputs is a multiple of 16. `layouts.py` explains Mt,
`offs` and `aligned`, `reference.py` what each of them computes. `scale_fmt` is the format of
scales: "fp32", or "ue8m0" for powers of two.
"""

from titan_fp8 import reference
from titan_fp8.ops.operands import (
    MT_OF_M,
    MT_ROWWISE_OF_M,
    C,
    E,
    H,
    K,
    M,
    N,
    R,
    blocks,
    fp8,
    fp32,
    high,
    int32,
)
from titan_fp8.ops.registry import primitive

# Blockwise

_ROWS = fp8(M, K), fp32(M, blocks(K))
_COLUMNS = fp8(K, MT_OF_M), fp32(K, blocks(MT_OF_M))
_ROWS_OF_H = fp8(M, H), fp32(M, blocks(H))
_COLUMNS_OF_H = fp8(H, MT_OF_M), fp32(H, blocks(MT_OF_M))
_AS_FIRST = high(M, H, as_first=True)

primitive(reference.quantize_1x128, *_ROWS, x=high(M, K))
primitive(reference.quantize_128x1_t, *_COLUMNS, x=high(M, K))
primitive(reference.quantize_1x128_128x1_t, *_ROWS, *_COLUMNS, x=high(M, K))
primitive(
    reference.quantize_128x128,
    fp8(..., R, K),
    fp32(..., blocks(R), blocks(K)),
    w=high(..., R, K),
)
primitive(
    reference.quantize_128x128_t,
    fp8(..., K, R),
    fp32(..., blocks(K), blocks(R)),
    w=high(..., R, K),
)
primitive(reference.swiglu_1x128, *_ROWS_OF_H, a=high(M, H), b=_AS_FIRST)
primitive(
    reference.swiglu_backward_1x128_128x1_t,
    *(_ROWS_OF_H + _COLUMNS_OF_H) * 2,
    *_COLUMNS_OF_H,
    dh=high(M, H),
    a=_AS_FIRST,
    b=_AS_FIRST,
)
primitive(
    reference.swiglu_dscores,
    fp32(M),
    dh=high(M, H),
    a=_AS_FIRST,
    b=_AS_FIRST,
    scores=fp32(M),
)

# Blockwise, of rows that have been quantized before they were sent to their experts

primitive(
    reference.gather_1x128_128x1_t,
    *(fp8(C, K), fp32(C, blocks(K))),
    *(fp8(K, C), fp32(K, blocks(C))),
    q=fp8(R, K),
    s=fp32(R, blocks(K)),
    index=int32(C),
    weight=fp32(C),
)

# Rowwise

_ROWS_OF_K = fp8(..., K), fp32(...)
_COLUMNS_OF_K = fp8(K, MT_ROWWISE_OF_M), fp32(E, K)

primitive(reference.quantize_row, *_ROWS_OF_K, x=high(..., K))
primitive(reference.quantize_col_t, *_COLUMNS_OF_K, x=high(M, K))
primitive(reference.quantize_row_col_t, fp8(M, K), fp32(M), *_COLUMNS_OF_K, x=high(M, K))
primitive(reference.quantize_weight_col_t, fp8(..., K, R), fp32(..., K), w=high(..., R, K))

# Of weights that are in FP8 already

primitive(reference.transpose_fp8, fp8(..., K, N), q=fp8(..., N, K))
