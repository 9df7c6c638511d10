"""The quantizers: bfloat16 or float32 in, e4m3 (q) and FP32 scales (s) out.

Names give the block that shares a scale, (rows x columns) of the input; `_t` says that the output
is written transposed. The last dimension of inputs is a multiple of 16. `layouts.py` explains Mt,
`offs` and `aligned`, `reference.py` what each of them computes. `scale_fmt` is the format of
scales: "fp32", or "ue8m0" for powers of two.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from titan_fp8 import reference
from titan_fp8.layouts import BLOCK, E4M3, ROW_ALIGNMENT, cdiv, round_up, transposed_width
from titan_fp8.ops.operands import H, K, M, N, R, fp8, fp32, high
from titan_fp8.ops.registry import primitive


def new_fp8(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=E4M3)


def new_scale(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


def _transposed(shape: Sequence[int]) -> tuple[int, ...]:
    *lead, n, k = shape
    return *lead, k, n


def _rows_1x128(x: Tensor, shape: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """q and scales (rows, ⌈columns/128⌉), stride 1 along the rows, padded to a multiple of 4."""
    rows, columns = shape or x.shape
    s = new_scale(x, cdiv(columns, BLOCK), round_up(rows, 4))
    return new_fp8(x, rows, columns), s[:, :rows].t()


def _columns_1x128(x: Tensor, offs: Tensor | None, aligned: bool) -> tuple[Tensor, Tensor]:
    return _rows_1x128(x, (x.shape[1], transposed_width(x.shape[0], offs, aligned, BLOCK)))


def _blocks_128x128(w: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """q and scales (..., ⌈n/128⌉, ⌈k/128⌉), the last dimension padded to a multiple of 4."""
    *lead, n, k = shape
    s = new_scale(w, *lead, cdiv(n, BLOCK), round_up(cdiv(k, BLOCK), 4))
    return new_fp8(w, *shape), s[..., : cdiv(k, BLOCK)]


def _rows(x: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    return new_fp8(x, *shape), new_scale(x, *shape[:-1])


def _columns(x: Tensor, offs: Tensor | None, aligned: bool) -> tuple[Tensor, Tensor]:
    k, width = x.shape[1], transposed_width(x.shape[0], offs, aligned, ROW_ALIGNMENT)
    return new_fp8(x, k, width), new_scale(x, *(() if offs is None else offs.shape), k)


def _swiglu_backward(c: Any) -> tuple[Tensor, ...]:
    columns = [_columns_1x128(c.a, c.offs, c.aligned) for _ in range(3)]
    return *_rows_1x128(c.a), *columns[0], *_rows_1x128(c.a), *columns[1], *columns[2]


# Blockwise

primitive(reference.quantize_1x128, lambda c: _rows_1x128(c.x), x=high(M, K))
primitive(
    reference.quantize_128x1_t, lambda c: _columns_1x128(c.x, c.offs, c.aligned), x=high(M, K)
)
primitive(
    reference.quantize_1x128_128x1_t,
    lambda c: (*_rows_1x128(c.x), *_columns_1x128(c.x, c.offs, c.aligned)),
    x=high(M, K),
)
primitive(reference.quantize_128x128, lambda c: _blocks_128x128(c.w, c.w.shape), w=high(..., R, K))
primitive(
    reference.quantize_128x128_t,
    lambda c: _blocks_128x128(c.w, _transposed(c.w.shape)),
    w=high(..., R, K),
)
primitive(
    reference.swiglu_1x128,
    lambda c: _rows_1x128(c.a),
    a=high(M, H),
    b=high(M, H, as_first=True),
)
primitive(
    reference.swiglu_backward_1x128_128x1_t,
    _swiglu_backward,
    dh=high(M, H),
    a=high(M, H, as_first=True),
    b=high(M, H, as_first=True),
)

# Rowwise

primitive(reference.quantize_row, lambda c: _rows(c.x, c.x.shape), x=high(..., K))
primitive(reference.quantize_col_t, lambda c: _columns(c.x, c.offs, c.aligned), x=high(M, K))
primitive(
    reference.quantize_row_col_t,
    lambda c: (*_rows(c.x, c.x.shape), *_columns(c.x, c.offs, c.aligned)),
    x=high(M, K),
)
primitive(
    reference.quantize_weight_col_t,
    lambda c: _rows(c.w, _transposed(c.w.shape)),
    w=high(..., R, K),
)

# Rowwise, of a rank's shard of a weight that FSDP2 gathers in FP8

primitive(
    reference.quantize_shard_row,
    lambda c: (*_rows(c.x, c.x.shape), new_scale(c.x, *c.x.shape[:-2], c.x.shape[-1])),
    x=high(..., R, K),
)
primitive(
    reference.quantize_shard_col,
    lambda c: new_fp8(c.x, *c.x.shape),
    x=high(..., R, K),
    amax=fp32(..., K),
)

# Of weights that are in FP8 already

primitive(
    reference.transpose_fp8, lambda c: new_fp8(c.q, *_transposed(c.q.shape)), q=fp8(..., N, K)
)


def cast_weight(w: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A weight as quantizers read it: of this dtype, by default its own, and contiguous.

    Autocast casts weights. Ops cast them here, because an observer knows a layer by the memory of
    the parameter that its ops are given.
    """
    return w.to(dtype or w.dtype).contiguous()
