"""The FP8 GEMMs: NT products of quantized operands, dense or for groups of tokens.

    mm      fprop and dgrad: a (M, K) by b (N, K), or each group's rows by its own b of (E, N, K)
    wgrad   a (N, Mt) by b (K, Mt), over all tokens or over those of each group: (E, N, K)

a and b are e4m3, their scales sa and sb FP32. `offs` (E,) are the group ends and `aligned` says
that they are multiples of 128 (`layouts.py`). Rows of no group are zero in the result. `out_dtype`
is bfloat16 or float32.

The composite ops `*_fprop` and `*_dgrad` take the weight in high precision, cast it to `w_dtype` if
that is given, and quantize it themselves. If quantizing a weight were an op of its own,
torch.compile's partitioner would see that dgrad's copy depends on no gradient, move it to forward
and keep an FP8 copy of every weight until backward.
"""

import torch
from torch import Tensor

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
    high,
)
from titan_fp8.ops.quantize import cast_weight
from titan_fp8.ops.registry import composite, implementation, primitive

_X = fp8(M, K), fp32(M, blocks(K))
_W = fp8(E, N, K), fp32(E, blocks(N), blocks(K))
_G = fp8(M, N), fp32(M, blocks(N))
"""A quantized x, W or g, and its scale."""


@primitive(a=_X[0], sa=_X[1], b=_W[0], sb=_W[1])
def blockwise_mm(
    a: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    emulate: bool = False,
) -> Tensor:
    """1x128 by 128x128: a (M, K), b (N, K) or (E, N, K); returns (M, N).

    sa (M, ⌈K/128⌉); sb (⌈N/128⌉, ⌈K/128⌉), with groups (E, ⌈N/128⌉, ⌈K/128⌉).
    """
    return a.new_empty(a.shape[0], b.shape[-2], dtype=out_dtype)


@primitive(
    a=_X[0],
    sa=_X[1],
    b=_W[0],
    sb=_W[1],
    a2=_X[0],
    sa2=_X[1],
    b2=_W[0],
    sb2=_W[1],
)
def blockwise_mm_pair(
    a: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    a2: Tensor,
    sa2: Tensor,
    b2: Tensor,
    sb2: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    emulate: bool = False,
) -> Tensor:
    """The sum of two `blockwise_mm` of the same shapes, rounded once; returns (M, N)."""
    return a.new_empty(a.shape[0], b.shape[-2], dtype=out_dtype)


@primitive(a=fp8(N, MT), sa=fp32(N, blocks(MT)), b=fp8(K, MT), sb=fp32(K, blocks(MT)))
def blockwise_wgrad(
    a: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    emulate: bool = False,
) -> Tensor:
    """1x128 by 1x128 along the tokens: a (N, Mt), b (K, Mt); returns (N, K) or (E, N, K).

    sa (N, Mt/128), sb (K, Mt/128).
    """
    groups = () if offs is None else (offs.shape[0],)
    return a.new_empty(*groups, a.shape[0], b.shape[0], dtype=out_dtype)


@primitive(a=fp8(M, K), sa=fp32(M), b=fp8(E, N, K), sb=fp32(E, N))
def rowwise_mm(
    a: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    emulate: bool = False,
) -> Tensor:
    """One scale per row: a (M, K), b (N, K) or (E, N, K); returns (M, N).

    sa (M,); sb (N,), with groups (E, N).
    """
    return a.new_empty(a.shape[0], b.shape[-2], dtype=out_dtype)


@primitive(a=fp8(N, MT_ROWWISE), sa=fp32(E, N), b=fp8(K, MT_ROWWISE), sb=fp32(E, K))
def rowwise_wgrad(
    a: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    emulate: bool = False,
) -> Tensor:
    """One scale per row and group: a (N, Mt), b (K, Mt); returns (N, K) or (E, N, K).

    sa (N,), sb (K,), with groups (E, N), (E, K).
    """
    groups = () if offs is None else (offs.shape[0],)
    return a.new_empty(*groups, a.shape[0], b.shape[0], dtype=out_dtype)


@primitive(g=bf16(M, N), x=bf16(M, K))
def bf16_wgrad(
    g: Tensor,
    x: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    emulate: bool = False,
) -> Tensor:
    """gᵀ x in bf16, for `rowwise_with_gw_hp`: g (M, N), x (M, K); returns (N, K) or (E, N, K)."""
    groups = () if offs is None else (offs.shape[0],)
    return g.new_empty(*groups, g.shape[1], x.shape[1], dtype=out_dtype)


@composite(a=_X[0], sa=_X[1], w=high(E, N, K))
def blockwise_fprop(
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    w_dtype: torch.dtype | None = None,
    *,
    scale_fmt: str = "fp32",
    emulate: bool = False,
) -> Tensor:
    """y = a Wᵀ for a (M, K) and W (N, K) or (E, N, K) in high precision; returns (M, N)."""
    impl = implementation(a, emulate)
    b = impl.quantize_128x128(cast_weight(impl, w, w_dtype), scale_fmt=scale_fmt)
    return impl.blockwise_mm(a, sa, *b, offs, aligned, out_dtype)


@composite(a=_G[0], sa=_G[1], w=high(E, N, K))
def blockwise_dgrad(
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    w_dtype: torch.dtype | None = None,
    *,
    scale_fmt: str = "fp32",
    emulate: bool = False,
) -> Tensor:
    """dx = a W for a (M, N) and W (N, K) or (E, N, K) in high precision; returns (M, K)."""
    impl = implementation(a, emulate)
    b = impl.quantize_128x128_t(cast_weight(impl, w, w_dtype), scale_fmt=scale_fmt)
    return impl.blockwise_mm(a, sa, *b, offs, aligned, out_dtype)


@composite(a=_G[0], sa=_G[1], w=high(E, N, K), a2=_G[0], sa2=_G[1], w2=high(E, N, K))
def blockwise_dgrad_pair(
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
    *,
    scale_fmt: str = "fp32",
    emulate: bool = False,
) -> Tensor:
    """dx = a W + a2 W2 for operands as in `blockwise_dgrad`, rounded once; returns (M, K)."""
    impl = implementation(a, emulate)
    b = impl.quantize_128x128_t(cast_weight(impl, w, w_dtype), scale_fmt=scale_fmt)
    b2 = impl.quantize_128x128_t(cast_weight(impl, w2, w_dtype), scale_fmt=scale_fmt)
    return impl.blockwise_mm_pair(a, sa, *b, a2, sa2, *b2, offs, aligned, out_dtype)


@composite(a=fp8(M, K), sa=fp32(M), w=high(E, N, K))
def rowwise_fprop(
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    w_dtype: torch.dtype | None = None,
    *,
    emulate: bool = False,
) -> Tensor:
    """y = a Wᵀ for a (M, K) and W (N, K) or (E, N, K) in high precision; returns (M, N)."""
    impl = implementation(a, emulate)
    b = impl.quantize_row(cast_weight(impl, w, w_dtype))
    return impl.rowwise_mm(a, sa, *b, offs, aligned, out_dtype)


@composite(a=fp8(M, N), sa=fp32(M), w=high(E, N, K))
def rowwise_dgrad(
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    w_dtype: torch.dtype | None = None,
    *,
    emulate: bool = False,
) -> Tensor:
    """dx = a W for a (M, N) and W (N, K) or (E, N, K) in high precision; returns (M, K)."""
    impl = implementation(a, emulate)
    b = impl.quantize_weight_col_t(cast_weight(impl, w, w_dtype))
    return impl.rowwise_mm(a, sa, *b, offs, aligned, out_dtype)
