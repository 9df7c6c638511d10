"""Products with weights that are in FP8 already, as FSDP2 gathers them (`titan_fp8/fsdp.py`).

Each op computes what the op of the same name without `_fp8` computes with a weight in high
precision. A weight is q (N, K) or (E, N, K) and the scales that the GEMM reads. Gathered weights
have the layout of the parameter: fprop reads q as it is, dgrad reads its transpose.

The ops of backward transpose q themselves. If the transpose were an op of its own, torch.compile's
partitioner could move it to forward and keep a transposed copy of every weight until backward.
"""

import torch
from torch import Tensor

from titan_fp8.ops.operands import MT_OF_M, E, H, K, M, N, blocks, fp8, fp32, high
from titan_fp8.ops.quantize import new_fp8
from titan_fp8.ops.registry import composite, implementation, primitive
from titan_fp8.ops.swiglu import experts_backward, experts_forward


@primitive(q=fp8(..., N, K))
def transpose_fp8(q: Tensor, *, emulate: bool = False) -> Tensor:
    """q (..., R, C) in FP8, transposed and contiguous: (..., C, R). R and C: multiples of 16."""
    return new_fp8(q, (*q.shape[:-2], q.shape[-1], q.shape[-2]))


_A = fp8(M, N), fp32(M, blocks(N))
"""g of dgrad, and its scale."""


@composite(a=_A[0], sa=_A[1], w=fp8(E, N, K), sw_t=fp32(E, blocks(K), blocks(N)))
def blockwise_dgrad_fp8(
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    sw_t: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    emulate: bool = False,
) -> Tensor:
    """dx (M, K) = a W for a (M, N), w (N, K) or (E, N, K), sw_t (..., ⌈K/128⌉, ⌈N/128⌉)."""
    impl = implementation(a, emulate)
    return impl.blockwise_mm(a, sa, impl.transpose_fp8(w), sw_t, offs, aligned, out_dtype)


@composite(
    a=_A[0],
    sa=_A[1],
    w=fp8(E, N, K),
    sw_t=fp32(E, blocks(K), blocks(N)),
    a2=_A[0],
    sa2=_A[1],
    w2=fp8(E, N, K),
    sw2_t=fp32(E, blocks(K), blocks(N)),
)
def blockwise_dgrad_pair_fp8(
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    sw_t: Tensor,
    a2: Tensor,
    sa2: Tensor,
    w2: Tensor,
    sw2_t: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    emulate: bool = False,
) -> Tensor:
    """dx (M, K) = a W + a2 W2 for operands as in `blockwise_dgrad_fp8`, rounded once."""
    impl = implementation(a, emulate)
    left, right = (impl.transpose_fp8(w), sw_t), (impl.transpose_fp8(w2), sw2_t)
    return impl.blockwise_mm_pair(a, sa, *left, a2, sa2, *right, offs, aligned, out_dtype)


@composite(a=fp8(M, N), sa=fp32(M), w=fp8(E, N, K), sw_t=fp32(E, K))
def rowwise_dgrad_fp8(
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    sw_t: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    emulate: bool = False,
) -> Tensor:
    """dx (M, K) = a W for a (M, N), w (N, K) or (E, N, K), the scales of its columns (..., K)."""
    impl = implementation(a, emulate)
    return impl.rowwise_mm(a, sa, impl.transpose_fp8(w), sw_t, offs, aligned, out_dtype)


@composite(
    x=high(M, K),
    w1=fp8(E, H, K),
    sw1=fp32(E, blocks(H), blocks(K)),
    w2=fp8(E, N, H),
    sw2=fp32(E, blocks(N), blocks(H)),
    w3=fp8(E, H, K),
    sw3=fp32(E, blocks(H), blocks(K)),
)
def blockwise_swiglu_fp8(
    x: Tensor,
    w1: Tensor,
    sw1: Tensor,
    w2: Tensor,
    sw2: Tensor,
    w3: Tensor,
    sw3: Tensor,
    offs: Tensor,
    aligned: bool = False,
    *,
    scale_fmt: str = "fp32",
    emulate: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`blockwise_swiglu` of FP8 weights, whose scales are those of `quantize_128x128`."""
    weights = (w1, sw1), (w2, sw2), (w3, sw3)
    impl = implementation(x, emulate)
    return experts_forward(impl, x, weights, lambda w: w, offs, aligned, scale_fmt)


@composite(
    g=high(M, N),
    a=high(M, H, as_first=True),
    b=high(M, H, as_first=True),
    x_q_t=fp8(K, MT_OF_M),
    x_s_t=fp32(K, blocks(MT_OF_M)),
    w1=fp8(E, H, K),
    sw1_t=fp32(E, blocks(K), blocks(H)),
    w2=fp8(E, N, H),
    sw2_t=fp32(E, blocks(H), blocks(N)),
    w3=fp8(E, H, K),
    sw3_t=fp32(E, blocks(K), blocks(H)),
)
def blockwise_swiglu_backward_fp8(
    g: Tensor,
    a: Tensor,
    b: Tensor,
    x_q_t: Tensor,
    x_s_t: Tensor,
    w1: Tensor,
    sw1_t: Tensor,
    w2: Tensor,
    sw2_t: Tensor,
    w3: Tensor,
    sw3_t: Tensor,
    offs: Tensor | None,
    aligned: bool = False,
    dx_dtype: torch.dtype = torch.bfloat16,
    dw_dtype: torch.dtype = torch.bfloat16,
    *,
    scale_fmt: str = "fp32",
    emulate: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`blockwise_swiglu_backward` of FP8 weights, with scales of `quantize_128x128_t`.

    Returns dx (M, K) in dx_dtype, dW1, dW2 and dW3 in dw_dtype.
    """
    impl = implementation(g, emulate)
    kept, weights = (a, b, x_q_t, x_s_t), ((w1, sw1_t), (w2, sw2_t), (w3, sw3_t))

    def transposed(w: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return impl.transpose_fp8(w[0]), w[1]

    dtypes = dx_dtype, (dw_dtype, dw_dtype, dw_dtype)
    return experts_backward(impl, g, kept, weights, transposed, offs, aligned, *dtypes, scale_fmt)
