"""The gated feed-forward, y = W2 (silu(W1 x) · W3 x), as one autograd function.

Between its GEMMs a feed-forward writes h = silu(a) · b for the next product alone, which reads it
quantised; likewise da and db in backward. Blockwise, the SwiGLU ops write these quantised at once,
and h, da and db never exist in high precision. Kept for backward are a, b and the transposed FP8
copy of x: backward makes h's columns anew from a and b, which the gradient of SwiGLU reads anyway.

The products are those of `functional.py`, with the same rounding, but that some things are rounded
once: h, da and db, where separate operations round twice, and dx, whose two products are one GEMM.
The other recipes run as the three products they are.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_fp8.functional import (
    InputCache,
    Spec,
    check_bool,
    check_devices,
    check_multiples_of_16,
    checked_offs,
    compute_dtype,
    dgrad,
    differentiable_once,
    fp8_grouped_mm,
    fp8_linear,
    fprop,
    quantize_gradient,
    wgrad,
)
from titan_fp8.recipe import Scaling, get_recipe

_ops = torch.ops.titan_fp8


class _FP8SwiGLU(torch.autograd.Function):
    """y (M, K') of x (M, K), w1 and w3 (H, K) and w2 (K', H), or of (E, ...) and group ends offs.

    `for_wgrad`: backward is to make the gradient of w1 or w3.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        offs: Tensor | None,
        spec: Spec,
        for_wgrad: bool,
    ) -> Tensor:
        x, x_columns = x_MK.to(spec.dtype), ()
        ctx.spec, ctx.x_dtype = spec, x_MK.dtype
        if for_wgrad and offs is not None:
            y, *kept = _ops.blockwise_swiglu(
                x, w1, w2, w3, offs, spec.aligned, emulate=spec.emulate
            )
            ctx.save_for_backward(w1, w2, w3, offs, *kept)
            return y
        if for_wgrad:
            xq, sx, *x_columns = spec.kit.rows_and_columns(
                x, offs, spec.aligned, emulate=spec.emulate
            )
        else:
            xq, sx = spec.kit.rows(x, emulate=spec.emulate)
        a_MH = fprop((xq, sx), w1, offs, spec)
        b_MH = fprop((xq, sx), w3, offs, spec)
        h_rows = _ops.swiglu_1x128(a_MH, b_MH, emulate=spec.emulate)
        ctx.save_for_backward(w1, w2, w3, offs, a_MH, b_MH, *x_columns)
        return fprop(h_rows, w2, offs, spec)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g_MN: Tensor):
        w1, w2, w3, offs, a_MH, b_MH, *x_columns = ctx.saved_tensors
        spec = ctx.spec
        needs_dx, needs_dw1, needs_dw2, needs_dw3, *others = ctx.needs_input_grad
        if offs is not None and needs_dx and needs_dw1 and needs_dw2 and needs_dw3:
            gradients = _ops.blockwise_swiglu_backward(
                *(g_MN, a_MH, b_MH, *x_columns, w1, w2, w3),
                *(offs, spec.aligned, ctx.x_dtype),
                emulate=spec.emulate,
            )
            return *gradients, *(None for _ in others)
        g_rows, g_columns = quantize_gradient(g_MN, offs, True, needs_dw2, spec)
        quantised = _ops.swiglu_backward_1x128_128x1_t(
            dgrad(g_rows, w2, offs, spec, spec.dtype),
            *(a_MH, b_MH, offs, spec.aligned),
            emulate=spec.emulate,
        )
        da_rows, da_columns, db_rows, db_columns, h_columns = zip(quantised[::2], quantised[1::2])
        dx_MK = dw1 = dw2 = dw3 = None
        if needs_dw1:
            dw1 = wgrad(da_columns, x_columns, offs, spec, w1.dtype)
        if needs_dw2:
            dw2 = wgrad(g_columns, h_columns, offs, spec, w2.dtype)
        if needs_dw3:
            dw3 = wgrad(db_columns, x_columns, offs, spec, w3.dtype)
        if needs_dx:
            dx_MK = _ops.blockwise_dgrad_pair(
                *(*da_rows, w1.to(spec.dtype), *db_rows, w3.to(spec.dtype)),
                *(offs, spec.aligned, ctx.x_dtype),
                emulate=spec.emulate,
            )
        return dx_MK, dw1, dw2, dw3, *(None for _ in others)


def fp8_swiglu(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    offs: Tensor | None = None,
    *,
    recipe: str = "blockwise",
    emulate: bool = False,
    aligned: bool = False,
) -> Tensor:
    """W2 (silu(W1 x) · W3 x) with its nine products in FP8, dense or for groups; differentiable.

    Args:
        x: (..., K), bfloat16 or float32; with groups (M, K), sorted by group.
        w1, w3: (H, K); with groups (E, H, K). All dimensions are multiples of 16, dtypes as in
            `fp8_linear`.
        w2: (N, H); with groups (E, N, H).
        offs: None, or (E,) int32, the end of each group, as in `fp8_grouped_mm`.
        recipe, emulate, aligned: as in `fp8_grouped_mm`.

    Returns:
        y (..., N), with groups (M, N), in the dtype of F.linear.

    Raises:
        ValueError, RuntimeError: as `fp8_linear` and `fp8_grouped_mm`.
    """
    check_bool("emulate", emulate)
    check_bool("aligned", aligned)
    _check_shapes(x, w1, w2, w3, offs)
    if offs is not None:
        offs = checked_offs(offs, w1.shape[0])
    if get_recipe(recipe).fprop.left is not Scaling.BLOCK_1X128:
        if offs is None:
            mm = functools.partial(fp8_linear, recipe=recipe, emulate=emulate)
        else:
            mm = functools.partial(
                fp8_grouped_mm, offs=offs, recipe=recipe, emulate=emulate, aligned=aligned
            )
        shared = InputCache()
        return mm(F.silu(mm(x, w1, cache=shared)) * mm(x, w3, cache=shared), w2)
    check_devices(x, w1=w1, w2=w2, w3=w3, offs=offs)
    spec = Spec(recipe, emulate, aligned, compute_dtype(x, w1=w1, w2=w2, w3=w3))
    for_wgrad = torch.is_grad_enabled() and (w1.requires_grad or w3.requires_grad)
    y = _FP8SwiGLU.apply(x.reshape(-1, x.shape[-1]), w1, w2, w3, offs, spec, for_wgrad)
    return y.view(*x.shape[:-1], w2.shape[-2])


def _check_shapes(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, offs: Tensor | None) -> None:
    """ValueError unless these shapes go together and suit FP8 GEMMs."""
    grouped = offs is not None
    fit = (
        (x.dim() == 2 if grouped else x.dim() > 0)
        and w1.dim() == w2.dim() == (3 if grouped else 2)
        and w1.shape == w3.shape
        and w1.shape[:-2] == w2.shape[:-2]
        and (w1.shape[-2], w1.shape[-1]) == (w2.shape[-1], x.shape[-1])
    )
    if not fit:
        allowed = "(M, K) and (E, H, K), (E, N, H)" if grouped else "(..., K) and (H, K), (N, H)"
        raise ValueError(
            f"x has shape {tuple(x.shape)} and w1, w2, w3 {tuple(w1.shape)}, {tuple(w2.shape)}, "
            f"{tuple(w3.shape)}: allowed are {allowed}, w3 as w1"
        )
    check_multiples_of_16("w1", w1)
    check_multiples_of_16("w2", w2)
