"""The experts' forward and backward, each as one op, for which the host then dispatches once.

A MoE model in FP8 keeps its host as busy as its GPU, and each op costs it the dispatcher, the
checks of compiled code and, in forward, the modes of activation checkpointing. These functions are
written once for any implementation `of` the ops that they are made of: the reference's functions,
the kernels', or the fakes of `ops.py`, which makes ops of them. What they compute is what these
ops compute one by one.

Dense layers are left as they are: op-level checkpointing keeps some of their products, and the
compiler frees what it can between them.
"""

from typing import Any

import torch
from torch import Tensor


def blockwise_swiglu(
    of: Any,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    offs: Tensor,
    aligned: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y = W2 (silu(a) · b), a = W1 x, b = W3 x and `quantize_128x1_t` of x (M, K).

    w1 and w3 (E, H, K), w2 (E, N, H). Returns y (M, N), a and b (M, H) in x's dtype, and the two of
    x.
    """
    layout = offs, aligned, x.dtype
    q, s, q_t, s_t = of.quantize_1x128_128x1_t(x, offs, aligned)
    a = of.blockwise_fprop(q, s, w1.to(x.dtype), *layout)
    b = of.blockwise_fprop(q, s, w3.to(x.dtype), *layout)
    h_q, h_s = of.swiglu_1x128(a, b)
    return of.blockwise_fprop(h_q, h_s, w2.to(x.dtype), *layout), a, b, q_t, s_t


def blockwise_swiglu_backward(
    of: Any,
    g: Tensor,
    a: Tensor,
    b: Tensor,
    x_q_t: Tensor,
    x_s_t: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    offs: Tensor,
    aligned: bool = False,
    dx_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx (M, K), dW1, dW2 and dW3, given g (M, N) and what `blockwise_swiglu` returned."""
    layout = offs, aligned
    q, s, q_t, s_t = of.quantize_1x128_128x1_t(g, *layout)
    dh = of.blockwise_dgrad(q, s, w2.to(g.dtype), *layout, g.dtype)
    quantised = of.swiglu_backward_1x128_128x1_t(dh, a, b, *layout)
    del q, s, dh  # What is big goes as soon as it can.
    *quantised, h_q_t, h_s_t = quantised
    dw2 = of.blockwise_wgrad(q_t, s_t, h_q_t, h_s_t, *layout, w2.dtype)
    del q_t, s_t, h_q_t, h_s_t
    da_q, da_s, da_q_t, da_s_t, db_q, db_s, db_q_t, db_s_t = quantised
    del quantised
    dw1 = of.blockwise_wgrad(da_q_t, da_s_t, x_q_t, x_s_t, *layout, w1.dtype)
    dw3 = of.blockwise_wgrad(db_q_t, db_s_t, x_q_t, x_s_t, *layout, w3.dtype)
    del da_q_t, db_q_t
    w1, w3 = w1.to(g.dtype), w3.to(g.dtype)
    dx = of.blockwise_dgrad_pair(da_q, da_s, w1, db_q, db_s, w3, *layout, dx_dtype)
    return dx, dw1, dw2, dw3


COMPOSITES = (blockwise_swiglu, blockwise_swiglu_backward)
