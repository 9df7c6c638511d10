"""SwiGLU with quantized outputs, the experts' forward as one op, and the whole backward as another.

Only the next GEMM reads h = silu(a) · b, and it reads it quantized. The same holds for da and db in
backward. The primitive ops write these in FP8 directly.

The composite ops save CPU time: a MoE model in FP8 keeps its CPU as busy as its GPU, and every op
passes through the dispatcher, the guards of compiled code and the modes of activation
checkpointing. Dense layers use only the op of backward: op-level checkpointing saves some GEMMs of
their forward, and the compiler merges equal quantizations of its input.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titan_fp8.ops.operands import MT_OF_M, E, H, K, M, N, blocks, fp8, fp32, high
from titan_fp8.ops.quantize import (
    cast_weight,
    quantize_1x128,
    quantize_1x128_128x1_t,
    quantize_128x1_t,
)
from titan_fp8.ops.registry import composite, implementation, primitive

Operand = tuple[Tensor, Tensor]
"""q and its scale, as a GEMM reads them."""
Weight = Any
"""A weight in high precision, or an Operand."""


@primitive(a=high(M, H), b=high(M, H, as_first=True))
def swiglu_1x128(
    a: Tensor, b: Tensor, *, scale_fmt: str = "fp32", emulate: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows of h = silu(a) · b for a, b (M, H): q (M, H) and s (M, ⌈H/128⌉)."""
    return quantize_1x128(a)


@primitive(dh=high(M, H), a=high(M, H, as_first=True), b=high(M, H, as_first=True))
def swiglu_backward_1x128_128x1_t(
    dh: Tensor,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    *,
    scale_fmt: str = "fp32",
    emulate: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows and columns of da, rows and columns of db, columns of h; for dh, a, b (M, H)."""
    rows_and_columns = [quantize_1x128_128x1_t(a, offs, aligned) for _ in range(2)]
    return (*rows_and_columns[0], *rows_and_columns[1], *quantize_128x1_t(a, offs, aligned))


@composite(x=high(M, K), w1=high(E, H, K), w2=high(E, N, H), w3=high(E, H, K))
def blockwise_swiglu(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    offs: Tensor,
    aligned: bool = False,
    *,
    scale_fmt: str = "fp32",
    emulate: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The experts' forward: y = W2 h, h = silu(a) · b, a = W1 x, b = W3 x, for each group.

    Args:
        x: (M, K). w1, w3: (E, H, K). w2: (E, N, H). offs: (E,), the group ends.

    Returns:
        y (M, N), a and b (M, H) in x's dtype; the columns of x, q (K, Mt) and s (K, Mt/128).
    """
    impl = implementation(x, emulate)

    def quantized(w: Tensor) -> Operand:
        return impl.quantize_128x128(cast_weight(impl, w, x.dtype), scale_fmt=scale_fmt)

    return experts_forward(impl, x, (w1, w2, w3), quantized, offs, aligned, scale_fmt)


@composite(
    g=high(M, N),
    a=high(M, H, as_first=True),
    b=high(M, H, as_first=True),
    x_q_t=fp8(K, MT_OF_M),
    x_s_t=fp32(K, blocks(MT_OF_M)),
    w1=high(E, H, K),
    w2=high(E, N, H),
    w3=high(E, H, K),
)
def blockwise_swiglu_backward(
    g: Tensor,
    a: Tensor,
    b: Tensor,
    x_q_t: Tensor,
    x_s_t: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    offs: Tensor | None,
    aligned: bool = False,
    dx_dtype: torch.dtype = torch.bfloat16,
    *,
    scale_fmt: str = "fp32",
    emulate: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The whole backward: dx (M, K), dW1, dW2, dW3, from g (M, N) and the forward's outputs.

    dx has dx_dtype, each dW its weight's dtype. Without groups (`offs` None) weights are matrices.
    """
    impl, weights = implementation(g, emulate), (w1, w2, w3)

    def quantized(w: Tensor) -> Operand:
        return impl.quantize_128x128_t(cast_weight(impl, w, g.dtype), scale_fmt=scale_fmt)

    kept = a, b, x_q_t, x_s_t
    dtypes = dx_dtype, (w1.dtype, w2.dtype, w3.dtype)
    return experts_backward(impl, g, kept, weights, quantized, offs, aligned, *dtypes, scale_fmt)


def experts_forward(
    impl: Any,
    x: Tensor,
    weights: tuple[Weight, Weight, Weight],
    operand: Callable[[Weight], Operand],
    offs: Tensor | None,
    aligned: bool,
    scale_fmt: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`blockwise_swiglu` by `impl`; `operand` makes what fprop reads of each of w1, w2, w3."""
    w1, w2, w3 = weights
    layout = offs, aligned, x.dtype
    q, s, q_t, s_t = impl.quantize_1x128_128x1_t(x, offs, aligned, scale_fmt=scale_fmt)
    a = impl.blockwise_mm(q, s, *operand(w1), *layout)
    b = impl.blockwise_mm(q, s, *operand(w3), *layout)
    h_q, h_s = impl.swiglu_1x128(a, b, scale_fmt=scale_fmt)
    return impl.blockwise_mm(h_q, h_s, *operand(w2), *layout), a, b, q_t, s_t


def experts_backward(
    impl: Any,
    g: Tensor,
    kept: tuple[Tensor, Tensor, Tensor, Tensor],
    weights: tuple[Weight, Weight, Weight],
    operand: Callable[[Weight], Operand],
    offs: Tensor | None,
    aligned: bool,
    dx_dtype: torch.dtype,
    dw_dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    scale_fmt: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`blockwise_swiglu_backward` by `impl`; `operand` makes what dgrad reads of each weight.

    kept: a, b and the columns of x, from forward.
    """
    a, b, x_q_t, x_s_t = kept
    w1, w2, w3 = weights
    dtype1, dtype2, dtype3 = dw_dtypes
    layout = offs, aligned
    # Large tensors are deleted as soon as they have been read, to save memory.
    q, s, q_t, s_t = impl.quantize_1x128_128x1_t(g, *layout, scale_fmt=scale_fmt)
    dh = impl.blockwise_mm(q, s, *operand(w2), *layout, g.dtype)
    operands = impl.swiglu_backward_1x128_128x1_t(dh, a, b, *layout, scale_fmt=scale_fmt)
    del q, s, dh
    *operands, h_q_t, h_s_t = operands
    dw2 = impl.blockwise_wgrad(q_t, s_t, h_q_t, h_s_t, *layout, dtype2)
    del q_t, s_t, h_q_t, h_s_t
    da_q, da_s, da_q_t, da_s_t, db_q, db_s, db_q_t, db_s_t = operands
    del operands
    dw1 = impl.blockwise_wgrad(da_q_t, da_s_t, x_q_t, x_s_t, *layout, dtype1)
    dw3 = impl.blockwise_wgrad(db_q_t, db_s_t, x_q_t, x_s_t, *layout, dtype3)
    del da_q_t, db_q_t
    left, right = operand(w1), operand(w3)
    dx = impl.blockwise_mm_pair(da_q, da_s, *left, db_q, db_s, *right, *layout, dx_dtype)
    return dx, dw1, dw2, dw3
