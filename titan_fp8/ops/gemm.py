"""The FP8 GEMMs: NT products of quantized operands, dense or for groups of tokens.

    mm      fprop and dgrad: a (M, K) by b (N, K), or each group's rows by its own b of (E, N, K)
    wgrad   a (N, Mt) by b (K, Mt), over all tokens or over those of each group: (E, N, K)

a and b are e4m3, their scales sa and sb FP32. `offs` (E,) are the group ends and `aligned` says
that they are multiples of 128 (`layouts.py`). Rows of no group are zero in the result. `out_dtype`
is bfloat16 or float32.

The composite ops `*_fprop` and `*_dgrad` take a weight in high precision, cast it to `w_dtype` if
that is given, and quantize it. Or they take one in FP8, laid out as the parameter, with `w_scale`:
the scales that this GEMM reads. Then dgrad transposes it. If quantizing or transposing a weight
were an op of its own, torch.compile's partitioner would see that dgrad's copy depends on no
gradient, move it to forward and keep an FP8 copy of every weight until backward.
"""

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
    weight,
)
from titan_fp8.ops.quantize import cast_weight
from titan_fp8.ops.registry import composite, primitive


def _mm(c: Any) -> Tensor:
    return c.a.new_empty(c.a.shape[0], c.b.shape[-2], dtype=c.out_dtype)


def _wgrad(c: Any) -> Tensor:
    groups = () if c.offs is None else c.offs.shape
    return c.a.new_empty(*groups, c.a.shape[0], c.b.shape[0], dtype=c.out_dtype)


def _bf16_wgrad(c: Any) -> Tensor:
    groups = () if c.offs is None else c.offs.shape
    return c.g.new_empty(*groups, c.g.shape[1], c.x.shape[1], dtype=c.out_dtype)


_BLOCKWISE: dict[str, Any] = {
    "a": fp8(M, K),
    "sa": fp32(M, blocks(K)),
    "b": fp8(E, N, K),
    "sb": fp32(E, blocks(N), blocks(K)),
}
_SECOND: dict[str, Any] = {f"{name}2": operand for name, operand in _BLOCKWISE.items()}

primitive(reference.blockwise_mm, _mm, **_BLOCKWISE)
primitive(reference.blockwise_mm_pair, _mm, **_BLOCKWISE, **_SECOND)
primitive(
    reference.blockwise_wgrad,
    _wgrad,
    a=fp8(N, MT),
    sa=fp32(N, blocks(MT)),
    b=fp8(K, MT),
    sb=fp32(K, blocks(MT)),
)
primitive(reference.rowwise_mm, _mm, a=fp8(M, K), sa=fp32(M), b=fp8(E, N, K), sb=fp32(E, N))
primitive(
    reference.rowwise_wgrad,
    _wgrad,
    a=fp8(N, MT_ROWWISE),
    sa=fp32(E, N),
    b=fp8(K, MT_ROWWISE),
    sb=fp32(E, K),
)
primitive(reference.bf16_wgrad, _bf16_wgrad, g=bf16(M, N), x=bf16(M, K))


def _transposed(impl: Any, q: Tensor) -> Tensor:
    """q (..., N, K), transposed and contiguous; that of a `QuantizedWeight` is so already."""
    return q.mT if q.mT.is_contiguous() else impl.transpose_fp8(q)


def _columns(
    impl: Any, w: Tensor, w_scale: Tensor | None, dtype: torch.dtype | None, scale_fmt: str
) -> tuple[Tensor, Tensor]:
    """What a blockwise dgrad reads of a weight."""
    if w_scale is None:
        return impl.quantize_128x128_t(cast_weight(w, dtype), scale_fmt=scale_fmt)
    return _transposed(impl, w), w_scale


@composite(
    a=fp8(M, K),
    sa=fp32(M, blocks(K)),
    w=weight(E, N, K),
    w_scale=fp32(E, blocks(N), blocks(K)),
)
def blockwise_fprop(
    impl: Any,
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    w_dtype: torch.dtype | None = None,
    w_scale: Tensor | None = None,
    *,
    scale_fmt: str = "fp32",
) -> Tensor:
    """y = a Wᵀ for a (M, K) and W (N, K) or (E, N, K); returns (M, N)."""
    b = w, w_scale
    if w_scale is None:
        b = impl.quantize_128x128(cast_weight(w, w_dtype), scale_fmt=scale_fmt)
    return impl.blockwise_mm(a, sa, *b, offs, aligned, out_dtype)


@composite(
    a=fp8(M, N),
    sa=fp32(M, blocks(N)),
    w=weight(E, N, K),
    w_scale=fp32(E, blocks(K), blocks(N)),
)
def blockwise_dgrad(
    impl: Any,
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    w_dtype: torch.dtype | None = None,
    w_scale: Tensor | None = None,
    *,
    scale_fmt: str = "fp32",
) -> Tensor:
    """dx = a W for a (M, N) and W (N, K) or (E, N, K); returns (M, K)."""
    b = _columns(impl, w, w_scale, w_dtype, scale_fmt)
    return impl.blockwise_mm(a, sa, *b, offs, aligned, out_dtype)


@composite(
    a=fp8(M, N),
    sa=fp32(M, blocks(N)),
    w=weight(E, N, K),
    a2=fp8(M, N),
    sa2=fp32(M, blocks(N)),
    w2=weight(E, N, K, scale="w2_scale"),
    w_scale=fp32(E, blocks(K), blocks(N)),
    w2_scale=fp32(E, blocks(K), blocks(N)),
)
def blockwise_dgrad_pair(
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
    *,
    scale_fmt: str = "fp32",
) -> Tensor:
    """dx = a W + a2 W2 for operands as in `blockwise_dgrad`, rounded once; returns (M, K)."""
    b = _columns(impl, w, w_scale, w_dtype, scale_fmt)
    b2 = _columns(impl, w2, w2_scale, w_dtype, scale_fmt)
    return impl.blockwise_mm_pair(a, sa, *b, a2, sa2, *b2, offs, aligned, out_dtype)


@composite(a=fp8(M, K), sa=fp32(M), w=weight(E, N, K), w_scale=fp32(E, N))
def rowwise_fprop(
    impl: Any,
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    w_dtype: torch.dtype | None = None,
    w_scale: Tensor | None = None,
) -> Tensor:
    """y = a Wᵀ for a (M, K) and W (N, K) or (E, N, K); returns (M, N)."""
    b = impl.quantize_row(cast_weight(w, w_dtype)) if w_scale is None else (w, w_scale)
    return impl.rowwise_mm(a, sa, *b, offs, aligned, out_dtype)


@composite(a=fp8(M, N), sa=fp32(M), w=weight(E, N, K), w_scale=fp32(E, K))
def rowwise_dgrad(
    impl: Any,
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    w_dtype: torch.dtype | None = None,
    w_scale: Tensor | None = None,
) -> Tensor:
    """dx = a W for a (M, N) and W (N, K) or (E, N, K); returns (M, K)."""
    if w_scale is None:
        b = impl.quantize_weight_col_t(cast_weight(w, w_dtype))
    else:
        b = _transposed(impl, w), w_scale
    return impl.rowwise_mm(a, sa, *b, offs, aligned, out_dtype)
