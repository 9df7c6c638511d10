"""What a product y = x Wᵀ and a gated feed-forward compute, forward and backward.

    fprop   y  (M, N) = x  Wᵀ     reads the rows of x and of W
    dgrad   dx (M, K) = g  W      reads the rows of g and the columns of W
    wgrad   dW (N, K) = gᵀ x      reads the columns of g and of x

Here and below, the "rows" of a matrix are the matrix quantized along its rows, and its "columns"
are its transpose, quantized along the columns of the original (`layouts.py`).

Each function is given the ops that it calls, `ops`: dispatched ones, or the kernels or reference
that compute them (`ops/registry.py`). A weight is a tensor and its scales: one in high precision
and None, which fprop and dgrad quantize, or one in FP8 with the scales that this GEMM reads. No FP8
copy of a weight in high precision outlives its GEMM.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_fp8.recipe import RECIPES, FeedForwardOps, Recipe

Operand = tuple[Tensor, ...]
"""What a GEMM reads of a tensor: q and its scale, or for a bf16 GEMM the tensor itself."""
WeightOperand = tuple[Tensor, Tensor | None]
DTypes = tuple[torch.dtype | None, ...]
"""The dtypes of gradients; None: not needed."""


class ProductSpec(NamedTuple):
    """What a product needs to know besides its tensors; constants to torch.compile.

    Attributes:
        recipe_name: the name of its recipe.
        emulate: compute in FP32 by the reference.
        aligned: every group end is a multiple of 128.
        dtype: of y; the operands are cast to it before they are quantized.
    """

    recipe_name: str
    emulate: bool
    aligned: bool
    dtype: torch.dtype

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.recipe_name]

    @property
    def feed_forward(self) -> FeedForwardOps:
        assert self.recipe.feed_forward is not None, self.recipe_name
        return self.recipe.feed_forward


def quantize(
    ops: Any,
    x_MK: Tensor | Operand,
    offs: Tensor | None,
    rows: bool,
    columns: bool,
    spec: ProductSpec,
) -> tuple[Operand, Operand]:
    """The rows and columns of x (M, K), an input or a gradient, as GEMMs read them.

    `rows` and `columns` say which of the two to compute; the other one is (). x may also be both
    already: q and s of the rows, q and s of the columns.
    """
    if not isinstance(x_MK, Tensor):
        return (x_MK[:2] if rows else ()), (x_MK[2:] if columns else ())
    recipe, layout = spec.recipe, (offs, spec.aligned)
    if columns and recipe.wgrad_in_bf16:
        return (recipe.quantize_rows.on(ops, x_MK) if rows else ()), (x_MK.bfloat16(),)
    if rows and columns:
        q, s, q_t, s_t = recipe.quantize_rows_and_columns.on(ops, x_MK, *layout)
        return (q, s), (q_t, s_t)
    if rows:
        return recipe.quantize_rows.on(ops, x_MK), ()
    return (), (recipe.quantize_columns.on(ops, x_MK, *layout) if columns else ())


def fprop(
    ops: Any,
    x: Tensor,
    sx: Tensor,
    w: Tensor,
    sw: Tensor | None,
    offs: Tensor | None,
    spec: ProductSpec,
) -> Tensor:
    """y (M, N) = x Wᵀ, which contracts K."""
    layout = offs, spec.aligned, spec.dtype, spec.dtype
    return spec.recipe.fprop.on(ops, x, sx, w, *layout, sw)


def dgrad(
    ops: Any,
    g_rows: Operand,
    w: WeightOperand,
    offs: Tensor | None,
    spec: ProductSpec,
    out_dtype: torch.dtype,
) -> Tensor:
    """dx (M, K) = g W, which contracts N."""
    layout = offs, spec.aligned, out_dtype, spec.dtype
    return spec.recipe.dgrad.on(ops, *g_rows, w[0], *layout, w[1])


def wgrad(
    ops: Any,
    g_columns: Operand,
    x_columns: Sequence[Tensor],
    offs: Tensor | None,
    spec: ProductSpec,
    out_dtype: torch.dtype | None,
) -> Tensor | None:
    """dW (N, K) or (E, N, K) = gᵀ x, which contracts the tokens; None if out_dtype is None."""
    if out_dtype is None:
        return None
    return spec.recipe.wgrad.on(ops, *g_columns, *x_columns, offs, spec.aligned, out_dtype)


def _given(*results: Tensor | None) -> tuple[Tensor, ...]:
    return tuple([t for t in results if t is not None])


# Each of these takes tensors and constants by position and returns fresh tensors, for `run`. A
# weight is two arguments. The autograd function saves what forward returns besides y, and backward
# takes it after the weights.


def quantized(
    ops: Any, x_MK: Tensor | Operand, offs: Tensor | None, for_wgrad: bool, spec: ProductSpec
) -> tuple[Tensor, ...]:
    """The rows of x, and with `for_wgrad` its columns; a wgrad in bf16 reads x itself."""
    for_wgrad &= not spec.recipe.wgrad_in_bf16
    rows, columns = quantize(ops, x_MK, offs, True, for_wgrad, spec)
    return *rows, *columns


def product(
    ops: Any, x_MK: Tensor, offs: Tensor | None, for_wgrad: bool, spec: ProductSpec,
    w: Tensor, w_scale: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """y, and with `for_wgrad` the columns of x, as `quantized` returns them."""
    q, s, *columns = quantized(ops, x_MK, offs, for_wgrad, spec)
    return fprop(ops, q, s, w, w_scale, offs, spec), *columns


def product_backward(
    ops: Any, g_MN: Tensor, offs: Tensor | None, dtypes: DTypes, spec: ProductSpec,
    w: Tensor, w_scale: Tensor | None, *x_columns: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of dx (M, K) and dW (N, K) or (E, N, K) those that have a dtype in `dtypes`."""
    dx_dtype, dw_dtype = dtypes
    rows, columns = quantize(ops, g_MN, offs, dx_dtype is not None, dw_dtype is not None, spec)
    dx = None
    if dx_dtype is not None:
        dx = dgrad(ops, rows, (w, w_scale), offs, spec, dx_dtype)
    del rows
    return _given(dx, wgrad(ops, columns, x_columns, offs, spec, dw_dtype))


def feed_forward(
    ops: Any, x_MK: Tensor | Operand, offs: Tensor | None, for_wgrad: bool, spec: ProductSpec,
    *weights: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """y = W2 h with h = silu(a) · b, a = W1 x, b = W3 x; a, b, and the columns of x for wgrad."""
    w1, w2, w3 = zip(weights[::2], weights[1::2])
    q, s, *columns = quantized(ops, x_MK, offs, for_wgrad, spec)
    a_MH = fprop(ops, q, s, *w1, offs, spec)
    b_MH = fprop(ops, q, s, *w3, offs, spec)
    hq, hs = spec.feed_forward.swiglu.on(ops, a_MH, b_MH)
    return fprop(ops, hq, hs, *w2, offs, spec), a_MH, b_MH, *columns


def feed_forward_backward(
    ops: Any, g_MN: Tensor | Operand, offs: Tensor | None, dtypes: DTypes, spec: ProductSpec,
    *weights_and_saved: Any, scores: Tensor | None = None, before: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of dx, dW1, dW2 and dW3 those that have a dtype in `dtypes`; with `scores` their gradients.

    scores (M,): factors of the rows of x if `before`, else of those of y, which g has already.
    """
    w1, s1, w2, s2, w3, s3, a_MH, b_MH, *x_columns = weights_and_saved
    dx_dtype, dtype1, dtype2, dtype3 = dtypes
    layout = offs, spec.aligned
    # Large tensors are deleted as soon as they have been read, to save memory.
    rows, columns = quantize(ops, g_MN, offs, True, dtype2 is not None, spec)
    dh_MH = dgrad(ops, rows, (w2, s2), offs, spec, spec.dtype)
    dscores = None
    if scores is not None:
        dscores = ops.swiglu_dscores(dh_MH, a_MH, b_MH, scores, before)
    parts = spec.feed_forward.swiglu_backward.on(ops, dh_MH, a_MH, b_MH, *layout)
    del rows, dh_MH
    da, da_columns, db, db_columns, h_columns = zip(parts[::2], parts[1::2])
    del parts
    dw2 = wgrad(ops, columns, h_columns, offs, spec, dtype2)
    del columns, h_columns
    dw1 = wgrad(ops, da_columns, x_columns, offs, spec, dtype1)
    dw3 = wgrad(ops, db_columns, x_columns, offs, spec, dtype3)
    del da_columns, db_columns
    dx = None
    if dx_dtype is not None:
        pair = *da, w1, *db, w3, *layout, dx_dtype, spec.dtype, s1, s3
        dx = spec.feed_forward.dgrad_pair.on(ops, *pair)
    return _given(dx, dw1, dw2, dw3, dscores)


BODIES: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {
    1: (product, product_backward),
    3: (feed_forward, feed_forward_backward),
}
"""Forward and backward by the number of weights."""
