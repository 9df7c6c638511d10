"""The three GEMMs of a product y = x Wᵀ, and the operands that they read.

    fprop   y  (M, N) = x  Wᵀ     reads the rows of x and of W
    dgrad   dx (M, K) = g  W      reads the rows of g and the columns of W
    wgrad   dW (N, K) = gᵀ x      reads the columns of g and of x

Here and below, the "rows" of a matrix are the matrix quantized along its rows, and its "columns"
are its transpose, quantized along the columns of the original (`layouts.py`). A weight in high
precision is quantized by the op that multiplies by it. Given a GatheredWeight, which is in FP8
already, the op calls its counterpart for FP8 weights (`gathered_weight.py`).
"""

import functools
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_fp8.ops import composite, direct
from titan_fp8.ops.operands import (
    MT_OF_M,
    MT_ROWWISE_OF_M,
    Accepted,
    Check,
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
from titan_fp8.recipe import RECIPES, Recipe, get_recipe

Operand = tuple[Tensor, ...]
"""What a GEMM reads of a tensor: q and its scale, or for a bf16 GEMM the tensor itself."""


class Spec(NamedTuple):
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


def fprop(x_rows: Operand, w: Tensor | Operand, offs: Tensor | None, spec: Spec) -> Tensor:
    """y (M, N) = x Wᵀ, which contracts K.

    Args:
        x_rows: the rows of x (M, K).
        w: (N, K) or (E, N, K), in high precision or a GatheredWeight; or the rows of a
            QuantizedWeight.
    """
    layout = offs, spec.aligned, spec.dtype
    if isinstance(w, Tensor):
        return spec.recipe.fprop.op(*x_rows, w, *layout, spec.dtype, emulate=spec.emulate)
    return spec.recipe.mm(*x_rows, *w, *layout, emulate=spec.emulate)


def dgrad(
    g_rows: Operand,
    w: Tensor | Operand,
    offs: Tensor | None,
    spec: Spec,
    out_dtype: torch.dtype,
) -> Tensor:
    """dx (M, K) = g W, which contracts N.

    Args:
        g_rows: the rows of g (M, N).
        w: (N, K) or (E, N, K), in high precision or a GatheredWeight; or the columns of a
            QuantizedWeight.
    """
    layout = offs, spec.aligned, out_dtype
    if isinstance(w, Tensor):
        return spec.recipe.dgrad.op(*g_rows, w, *layout, spec.dtype, emulate=spec.emulate)
    return spec.recipe.mm(*g_rows, *w, *layout, emulate=spec.emulate)


def wgrad(
    g_columns: Operand,
    x_columns: Operand,
    offs: Tensor | None,
    spec: Spec,
    out_dtype: torch.dtype,
) -> Tensor:
    """dW (N, K) or (E, N, K) = gᵀ x, which contracts the tokens.

    Args:
        g_columns, x_columns: the columns of g (M, N) and x (M, K); g and x themselves in bf16.
    """
    layout = offs, spec.aligned, out_dtype
    return spec.recipe.wgrad.op(*g_columns, *x_columns, *layout, emulate=spec.emulate)


def quantize_operands(
    x_MK: Tensor, offs: Tensor | None, rows: bool, columns: bool, spec: Spec
) -> tuple[Operand, Operand]:
    """The rows and columns of x (M, K), an input or a gradient, as GEMMs read them.

    `rows` and `columns` say which of the two to compute; the other one is ().
    """
    recipe, layout, emulate = spec.recipe, (offs, spec.aligned), spec.emulate
    x_MK = x_MK.detach().to(spec.dtype)
    if columns and recipe.wgrad_in_bf16:
        return (recipe.quantize_rows(x_MK, emulate=emulate) if rows else ()), (x_MK.bfloat16(),)
    if rows and columns:
        q, s, q_t, s_t = recipe.quantize_rows_and_columns(x_MK, *layout, emulate=emulate)
        return (q, s), (q_t, s_t)
    if rows:
        return recipe.quantize_rows(x_MK, emulate=emulate), ()
    return (), (recipe.quantize_columns(x_MK, *layout, emulate=emulate) if columns else ())


class _CheckOfBackward:
    """The check of `product_backward`, whose operands depend on the recipe and on the weight."""

    contiguous = frozenset((0, 1, 3, 5))
    """The positions of g, w, x_columns and offs."""

    def __call__(
        self, g: Tensor, w: Tensor, w_scale: Tensor | None, *others: Any, emulate: bool = False
    ) -> None:
        _check_of_backward(others[-1], w_scale is not None)(g, w, w_scale, *others)


@functools.cache
def _check_of_backward(recipe_name: str, w_in_fp8: bool) -> Check:
    recipe = get_recipe(recipe_name)
    w: tuple[Accepted, Accepted | None] = high(E, N, K), None
    if w_in_fp8:
        scale = fp32(E, blocks(K), blocks(N)) if recipe.has_weight_blocks else fp32(E, K)
        w = fp8(E, N, K), scale
    x: tuple[Accepted, Accepted | None] = fp8(K, MT_ROWWISE_OF_M), fp32(E, K)
    if recipe.wgrad_in_bf16:
        x = bf16(M, K), None
    elif recipe.has_weight_blocks:
        x = fp8(K, MT_OF_M), fp32(K, blocks(MT_OF_M))
    operands = {"g": high(M, N), "w": w[0], "w_scale": w[1], "x_columns": x[0], "x_scale": x[1]}
    parameters = inspect.signature(product_backward).parameters
    return Check("product_backward", parameters, operands)


@composite(check=_CheckOfBackward())
def product_backward(
    g: Tensor,
    w: Tensor,
    w_scale: Tensor | None,
    x_columns: Tensor,
    x_scale: Tensor | None,
    offs: Tensor | None,
    aligned: bool,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    recipe: str,
    *,
    emulate: bool = False,
) -> tuple[Tensor, Tensor]:
    """All of a product's backward: dx (M, K) and dW (N, K) or (E, N, K), from g (M, N).

    One op, because nothing else reads g quantized, and every op costs CPU time.

    Args:
        w, w_scale: the weight in high precision and None; or q, laid out as the weight, and the
            scales that dgrad reads.
        x_columns, x_scale: the columns of x; x itself and None in bf16.
    """
    spec = Spec(recipe, emulate, aligned, g.dtype)
    g_rows, g_columns = quantize_operands(g, offs, True, True, spec)
    weight: Tensor | Operand = w
    if w_scale is not None:
        weight = direct.transpose_fp8(w, emulate=emulate), w_scale
    dx = dgrad(g_rows, weight, offs, spec, dx_dtype)
    del g_rows, weight
    columns = (x_columns,) if x_scale is None else (x_columns, x_scale)
    return dx, wgrad(g_columns, columns, offs, spec, dw_dtype)
