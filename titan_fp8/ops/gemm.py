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
    for_kernels,
    fp8,
    fp32,
    high,
    output,
)
from titan_fp8.ops.registry import composite, primitive

_BLOCKWISE: dict[str, Any] = {
    "a": fp8(M, K),
    "sa": fp32(M, blocks(K)),
    "b": fp8(E, N, K),
    "sb": fp32(E, blocks(N), blocks(K)),
}
_SECOND: dict[str, Any] = {f"{name}2": spec for name, spec in _BLOCKWISE.items()}
_MN, _MK, _ENK = output(M, N), output(M, K), output(E, N, K)

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


def _read_weight(
    impl: Any, quantizer: str, transposed: bool, w: Tensor, w_scale: Tensor | None, dtype: Any,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q and the scales of a weight as a GEMM reads them; `quantizer` writes q `transposed`."""
    if w_scale is None:
        # Cast here and not by layers: an observer knows these by the memory of the parameters that
        # ops are given.
        return getattr(impl, quantizer)(w.to(dtype or w.dtype).contiguous(), **options)
    if not transposed:
        return for_kernels(w), w_scale
    # The transpose of a `QuantizedWeight` is contiguous already.
    q_t = for_kernels(w.mT) if w.mT.is_contiguous() else impl.transpose_fp8(for_kernels(w))
    return q_t, w_scale


def _multiply(mm: str, quantizer: str, transposed: bool) -> Callable[..., Tensor]:
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
        b = _read_weight(impl, quantizer, transposed, w, w_scale, w_dtype, options)
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
    b = _read_weight(impl, "quantize_128x128_t", True, w, w_scale, w_dtype, options)
    b2 = _read_weight(impl, "quantize_128x128_t", True, w2, w2_scale, w_dtype, options)
    return impl.blockwise_mm_pair(a, sa, *b, a2, sa2, *b2, offs, aligned, out_dtype)


_W = high(E, N, K, scale="w_scale")
_G: dict[str, Any] = {"a": fp8(M, N), "sa": fp32(M, blocks(N))}
_W_COLUMNS = fp32(E, blocks(K), blocks(N))

# fprop: y (M, N) = a Wᵀ for a (M, K). dgrad: dx (M, K) = a W for a (M, N).
composite(
    "blockwise_fprop",
    _multiply("blockwise_mm", "quantize_128x128", transposed=False),
    _MN,
    a=fp8(M, K),
    sa=fp32(M, blocks(K)),
    w=_W,
    w_scale=fp32(E, blocks(N), blocks(K)),
)
composite(
    "blockwise_dgrad",
    _multiply("blockwise_mm", "quantize_128x128_t", transposed=True),
    _MK,
    **_G,
    w=_W,
    w_scale=_W_COLUMNS,
)
composite(
    "blockwise_dgrad_pair",
    _dgrad_pair,
    _MK,
    **_G,
    w=_W,
    a2=_G["a"],
    sa2=_G["sa"],
    w2=high(E, N, K, scale="w2_scale"),
    w_scale=_W_COLUMNS,
    w2_scale=_W_COLUMNS,
)
composite(
    "rowwise_fprop",
    _multiply("rowwise_mm", "quantize_row", transposed=False),
    _MN,
    scaled=False,
    a=fp8(M, K),
    sa=fp32(M),
    w=_W,
    w_scale=fp32(E, N),
)
composite(
    "rowwise_dgrad",
    _multiply("rowwise_mm", "quantize_weight_col_t", transposed=True),
    _MK,
    scaled=False,
    a=fp8(M, N),
    sa=fp32(M),
    w=_W,
    w_scale=fp32(E, K),
)
