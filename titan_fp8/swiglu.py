"""The gated feed-forward, y = W2 (silu(W1 x) · W3 x), as one autograd function.

Only the next GEMM reads h = silu(a) · b, where a = W1 x and b = W3 x, and it reads it quantized.
The same holds for da and db in backward. With a blockwise recipe the SwiGLU ops write them in FP8
directly, so h, da and db never exist in high precision. Forward saves a, b and the FP8 columns of
x. Backward computes the columns of h from a and b, which the gradient of SwiGLU reads in any case.

The GEMMs are those of `gemms.py`. Some values are rounded once where separate operations would
round twice: h, da, db, and dx, whose two products are one GEMM. Weights that FSDP2 has gathered in
FP8 (`gathered_weight.py`) run fused, too. Three separate products run instead if the recipe has no
SwiGLU ops, if a weight is a `QuantizedWeight`, or if FSDP2 has gathered only some weights in FP8.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_fp8.checks import (
    check_bool,
    check_devices,
    check_types,
    checked_offs,
    compute_dtype,
)
from titan_fp8.functional import (
    OPTIONAL,
    WEIGHTS,
    Function,
    QuantizedWeight,
    Weight,
    check_weight,
    no_double_backward,
    product,
)
from titan_fp8.gathered_weight import GatheredWeight
from titan_fp8.gemms import Spec, dgrad, fprop, quantize_operands, wgrad
from titan_fp8.ops import replayable
from titan_fp8.recipe import FeedForwardOps, get_recipe


def _ops_of(spec: Spec) -> FeedForwardOps:
    ops = spec.recipe.feed_forward
    assert ops is not None, spec.recipe_name
    return ops


@replayable
def _forward(
    x_MK: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    offs: Tensor | None,
    for_wgrad: bool,
    spec: Spec,
) -> tuple[Tensor, ...]:
    """y, a, b, and with `for_wgrad` the columns of x."""
    x_rows, x_columns = quantize_operands(x_MK, offs, True, for_wgrad, spec)
    a_MH = fprop(x_rows, w1, offs, spec)
    b_MH = fprop(x_rows, w3, offs, spec)
    h_rows = _ops_of(spec).swiglu(a_MH, b_MH, emulate=spec.emulate)
    return fprop(h_rows, w2, offs, spec), a_MH, b_MH, *x_columns


class _FP8SwiGLU(Function):
    """y (M, N) of x (M, K), w1 and w3 (H, K), w2 (N, H); or of (E, ...) and the group ends offs.

    `for_wgrad`: backward computes the gradient of w1 or w3, so the columns of x are needed.
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
        ops, emulate = _ops_of(spec), spec.emulate
        ctx.spec, ctx.x_dtype = spec, x_MK.dtype
        if for_wgrad and offs is not None:
            x_MK = x_MK.to(spec.dtype)
            y_MN, *saved = ops.forward(x_MK, w1, w2, w3, offs, spec.aligned, emulate=emulate)
        else:
            y_MN, *saved = _forward(x_MK, w1, w2, w3, offs, for_wgrad, spec)
        ctx.save_for_backward(w1, w2, w3, offs, *saved)
        return y_MN

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, g_MN: Tensor) -> Any:
        w1, w2, w3, offs, a_MH, b_MH, *x_columns = ctx.saved_tensors
        spec = ctx.spec
        ops, emulate = _ops_of(spec), spec.emulate
        needs_dx, needs_dw1, needs_dw2, needs_dw3, *others = ctx.needs_input_grad
        if needs_dx and needs_dw1 and needs_dw2 and needs_dw3:
            tensors = g_MN.to(spec.dtype), a_MH, b_MH, *x_columns, w1, w2, w3
            layout = offs, spec.aligned, ctx.x_dtype
            gradients = ops.backward(*tensors, *layout, emulate=emulate)
            return *gradients, *(None for _ in others)
        g_rows, g_columns = quantize_operands(g_MN, offs, True, needs_dw2, spec)
        dh_MH = dgrad(g_rows, w2, offs, spec, spec.dtype)
        quantized = ops.swiglu_backward(dh_MH, a_MH, b_MH, offs, spec.aligned, emulate=emulate)
        # Pairs of q and its scale.
        da_rows, da_columns, db_rows, db_columns, h_columns = zip(quantized[::2], quantized[1::2])
        dx_MK = dw1 = dw2 = dw3 = None
        if needs_dw1:
            dw1 = wgrad(da_columns, x_columns, offs, spec, w1.dtype)
        if needs_dw2:
            dw2 = wgrad(g_columns, h_columns, offs, spec, w2.dtype)
        if needs_dw3:
            dw3 = wgrad(db_columns, x_columns, offs, spec, w3.dtype)
        if needs_dx:
            pair, dtypes = (*da_rows, w1, *db_rows, w3), (ctx.x_dtype, spec.dtype)
            dx_MK = ops.dgrad_pair(*pair, offs, spec.aligned, *dtypes, emulate=emulate)
        return dx_MK, dw1, dw2, dw3, *(None for _ in others)


def fp8_swiglu(
    x: Tensor,
    w1: Weight,
    w2: Weight,
    w3: Weight,
    offs: Tensor | None = None,
    *,
    recipe: str = "blockwise",
    emulate: bool = False,
    aligned: bool = False,
) -> Tensor:
    """W2 (silu(W1 x) · W3 x) with its nine GEMMs in FP8, dense or for groups; differentiable.

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
    can_fuse = get_recipe(recipe).feed_forward is not None
    check_bool("emulate", emulate)
    check_bool("aligned", aligned)
    weights = {"w1": w1, "w2": w2, "w3": w3}
    check_types(x=x)
    check_types(WEIGHTS, **weights)
    check_types(OPTIONAL, offs=offs)
    _check_shapes(x, w1, w2, w3, offs)
    in_high_precision = {n: check_weight(n, w, recipe) for n, w in weights.items()}
    if offs is not None:
        offs = checked_offs(offs, w1.shape[0])
    check_devices(x, **weights, offs=offs)
    spec = Spec(recipe, emulate, aligned, compute_dtype(x, **in_high_precision))
    x_MK = x.reshape(-1, x.shape[-1])
    can_fuse &= len({isinstance(w, GatheredWeight) for w in weights.values()}) == 1
    trained = [w is not None and w.requires_grad for w in in_high_precision.values()]
    for_wgrad = torch.is_grad_enabled() and (trained[0] or trained[2])
    if any(isinstance(w, QuantizedWeight) for w in weights.values()) or not can_fuse:
        x_quantized = quantize_operands(x_MK, offs, True, for_wgrad, spec)
        a_MH, b_MH = (product(x_MK, w, None, offs, spec, x_quantized) for w in (w1, w3))
        y_MN = product(F.silu(a_MH) * b_MH, w2, None, offs, spec)
    else:
        y_MN = _FP8SwiGLU.call(x_MK, w1, w2, w3, offs, spec, for_wgrad)
    return y_MN.view(*x.shape[:-1], w2.shape[-2])


def _check_shapes(x: Tensor, w1: Weight, w2: Weight, w3: Weight, offs: Tensor | None) -> None:
    """Raises ValueError unless the shapes match."""
    grouped = offs is not None
    fit = (
        (x.dim() == 2 if grouped else x.dim() > 0)
        and len(w1.shape) == len(w2.shape) == (3 if grouped else 2)
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
