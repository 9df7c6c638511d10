"""The FP8 GEMMs: NT products of quantized operands, dense or for groups of tokens.

    mm      fprop and dgrad: a (M, K) by b (N, K), or each group's rows by its own b of (E, N, K)
    wgrad   a (N, Mt) by b (K, Mt), over all tokens or over those of each group: (E, N, K)

a and b are e4m3, their scales sa and sb FP32. `offs` (E,) are the group ends and `aligned` says
that they are multiples of 128 (`layouts.py`). Rows of no group are zero in the result. `out_dtype`
is bfloat16 or float32.

The composite ops `*_fprop` and `*_dgrad` take a weight (N, K) or (E, N, K) in high precision, cast
it to `w_dtype` if that is given, and quantize it. Or they take one in FP8, laid out as the
parameter, with `w_scale`: the scales that this GEMM reads. Then dgrad transposes it. If quantizing
or transposing a weight were an op of its own, torch.compile's partitioner would see that dgrad's
copy depends on no gradient, move it to forward and keep an FP8 copy of every weight until backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titan_fp8 import reference
from titan_fp8.ops.operands import (
    MT,
    MT_ROWWISE,
    E,
    K,
    M,
    N,
    bf16,
    blocks,
    fp8,
    fp32,
    product,
    weight,
)
from titan_fp8.ops.quantize import cast_weight
from titan_fp8.ops.registry import composite, primitive

_BLOCKWISE: dict[str, Any] = {
    "a": fp8(M, K),
    "sa": fp32(M, blocks(K)),
    "b": fp8(E, N, K),
    "sb": fp32(E, blocks(N), blocks(K)),
}
_SECOND: dict[str, Any] = {f"{name}2": operand for name, operand in _BLOCKWISE.items()}
_MN, _MK, _ENK = product(M, N), product(M, K), product(E, N, K)

primitive(reference.blockwise_mm, _MN, **_BLOCKWISE)
primitive(reference.blockwise_mm_pair, _MN, **_BLOCKWISE, **_SECOND)
primitive(
    reference.blockwise_wgrad,
    _ENK,
    a=fp8(N, MT),
    sa=fp32(N, blocks(MT)),
    b=fp8(K, MT),
    sb=fp32(K, blocks(MT)),
)
primitive(reference.rowwise_mm, _MN, a=fp8(M, K), sa=fp32(M), b=fp8(E, N, K), sb=fp32(E, N))
primitive(
    reference.rowwise_wgrad,
    _ENK,
    a=fp8(N, MT_ROWWISE),
    sa=fp32(E, N),
    b=fp8(K, MT_ROWWISE),
    sb=fp32(E, K),
)
primitive(reference.bf16_wgrad, _ENK, g=bf16(M, N), x=bf16(M, K))


def _weight(
    impl: Any, quantizer: str, w: Tensor, w_scale: Tensor | None, dtype: Any, options: dict
) -> tuple[Tensor, Tensor]:
    """q and the scales of a weight as a GEMM reads them, transposed if `quantizer` is a `*_t`."""
    if w_scale is None:
        return getattr(impl, quantizer)(cast_weight(w, dtype), **options)
    # The transpose of a `QuantizedWeight` is contiguous already.
    if not quantizer.endswith("_t") or w.mT.is_contiguous():
        return w.mT if quantizer.endswith("_t") else w, w_scale
    return impl.transpose_fp8(w), w_scale


def _multiply(mm: str, quantizer: str) -> Callable[..., Tensor]:
    """The body of an op: `mm` of a and of a weight, which `quantizer` quantizes."""

    def body(
        impl: Any,
        a: Tensor,
        sa: Tensor,
        w: Tensor,
        offs: Tensor | None = None,
        aligned: bool = False,
        out_dtype: torch.dtype = torch.bfloat16,
        w_dtype: torch.dtype | None = None,
        w_scale: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        b = _weight(impl, quantizer, w, w_scale, w_dtype, options)
        return getattr(impl, mm)(a, sa, *b, offs, aligned, out_dtype)

    return body


def _dgrad_pair(
    impl: Any,
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    a2: Tensor,
    sa2: Tensor,
    w2: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    w_dtype: torch.dtype | None = None,
    w_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """dx = a W + a2 W2 for operands as of `blockwise_dgrad`, rounded once; returns (M, K)."""
    b = _weight(impl, "quantize_128x128_t", w, w_scale, w_dtype, options)
    b2 = _weight(impl, "quantize_128x128_t", w2, w2_scale, w_dtype, options)
    return impl.blockwise_mm_pair(a, sa, *b, a2, sa2, *b2, offs, aligned, out_dtype)


_G: dict[str, Any] = {"a": fp8(M, N), "sa": fp32(M, blocks(N))}
_W = weight(E, N, K)
_W_SCALE = fp32(E, blocks(K), blocks(N))

# fprop: y (M, N) = a Wᵀ for a (M, K). dgrad: dx (M, K) = a W for a (M, N).
composite(
    "blockwise_fprop",
    _multiply("blockwise_mm", "quantize_128x128"),
    _MN,
    a=fp8(M, K),
    sa=fp32(M, blocks(K)),
    w=_W,
    w_scale=fp32(E, blocks(N), blocks(K)),
)
composite(
    "blockwise_dgrad",
    _multiply("blockwise_mm", "quantize_128x128_t"),
    _MK,
    **_G,
    w=_W,
    w_scale=_W_SCALE,
)
composite(
    "blockwise_dgrad_pair",
    _dgrad_pair,
    _MK,
    **_G,
    w=_W,
    a2=_G["a"],
    sa2=_G["sa"],
    w2=weight(E, N, K, scale="w2_scale"),
    w_scale=_W_SCALE,
    w2_scale=_W_SCALE,
)
composite(
    "rowwise_fprop",
    _multiply("rowwise_mm", "quantize_row"),
    _MN,
    scaled=False,
    a=fp8(M, K),
    sa=fp32(M),
    w=_W,
    w_scale=fp32(E, N),
)
composite(
    "rowwise_dgrad",
    _multiply("rowwise_mm", "quantize_weight_col_t"),
    _MK,
    scaled=False,
    a=fp8(M, N),
    sa=fp32(M),
    w=_W,
    w_scale=fp32(E, K),
)
