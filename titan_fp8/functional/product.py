"""The autograd functions: a matrix product whose three GEMMs run in FP8.

    fp8_linear       x (..., K), w (N, K)                  y = x Wᵀ + b
    fp8_grouped_mm   x (M, K), w (E, N, K), offs (E,)      each group of rows with its own W

Both run one autograd function around a forward and a backward of `bodies.py`; a dense product has
one group. What is saved for backward, and why no FP8 copy of a weight is, docs/architecture.md
explains.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from titan_fp8.functional.bodies import BODIES, ProductSpec, fprop
from titan_fp8.functional.checks import (
    check_bool,
    check_types,
    checked_dtype,
    checked_offs,
)
from titan_fp8.functional.function import Function, no_double_backward
from titan_fp8.functional.weights import (
    OPTIONAL,
    WEIGHTS,
    Weight,
    check_weight,
    operands_of,
)
from titan_fp8.ops import run
from titan_fp8.recipe import get_recipe


class _Product(Function):
    """y (M, N) of x (M, K) and weights, dense or for groups that end at `offs` (E,).

    `for_wgrad`: backward computes the gradient of a weight that reads x, so it needs the columns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        bias: Tensor | None,
        offs: Tensor | None,
        x_quantized: tuple[Tensor, ...] | None,
        for_wgrad: bool,
        spec: ProductSpec,
        *weights: Weight,
    ) -> Tensor:
        for_fprop, for_dgrad = operands_of(weights, spec.dtype)
        y_MN, saved = _forward(x_MK, x_quantized, for_fprop, bias, offs, for_wgrad, spec)
        ctx.spec, ctx.dtypes = spec, (x_MK.dtype, *[w.dtype for w in weights])
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(offs, *for_dgrad, *saved)
        return y_MN

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, g_MN: Tensor) -> Any:
        spec, (offs, *saved) = ctx.spec, ctx.saved_tensors
        needs_dx, needs_db, *others = ctx.needs_input_grad
        needs = needs_dx, *others[4:]
        dtypes = tuple([dtype if need else None for dtype, need in zip(ctx.dtypes, needs)])
        gradients: tuple[Tensor, ...] = ()
        if any(needs):
            _, body = BODIES[len(needs) - 1]
            # `to` takes 2 us to find that it has nothing to do.
            g = (g_MN if g_MN.dtype == spec.dtype else g_MN.to(spec.dtype)).contiguous()
            gradients = run(body, g, offs, dtypes, spec, *saved, emulate=spec.emulate)
        db = g_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_db else None
        given = iter(gradients)
        dx, *dws = [next(given) if need else None for need in needs]
        return dx, db, None, None, None, None, *dws


def _forward(
    x_MK: Tensor, x_quantized: tuple[Tensor, ...] | None, for_fprop: Sequence[Any],
    bias: Tensor | None, offs: Tensor | None, for_wgrad: bool, spec: ProductSpec,
) -> tuple[Tensor, Sequence[Tensor]]:  # fmt: skip
    """y, and what backward reads besides the weights."""
    if x_quantized is None:
        body, _ = BODIES[len(for_fprop) // 2]
        x_MK = (x_MK if x_MK.dtype == spec.dtype else x_MK.to(spec.dtype)).contiguous()
        y_MN, *saved = run(body, x_MK, offs, for_wgrad, spec, *for_fprop, emulate=spec.emulate)
    else:
        q, s, *columns = x_quantized
        saved = columns if for_wgrad else []
        y_MN = run(fprop, q, s, *for_fprop, offs, spec, emulate=spec.emulate)
    if for_wgrad and spec.recipe.wgrad_in_bf16:
        saved = [*saved, x_MK.to(spec.dtype).bfloat16()]
    return y_MN if bias is None else y_MN + bias.to(spec.dtype), saved


def spec_of(
    x: Tensor,
    weights: dict[str, Weight],
    recipe: str,
    emulate: bool,
    aligned: bool = False,
    bias: Tensor | None = None,
    offs: Tensor | None = None,
) -> ProductSpec:
    """Checks the arguments of a function, shapes apart, and returns what its products need."""
    get_recipe(recipe)
    check_bool("emulate", emulate)
    check_bool("aligned", aligned)
    if not (isinstance(x, Tensor) and isinstance(bias, OPTIONAL) and isinstance(offs, OPTIONAL)):
        check_types(x=x)
        check_types(OPTIONAL, bias=bias, offs=offs)
    operands = weights.copy()
    for name, w in weights.items():
        if not isinstance(w, WEIGHTS):
            check_types(WEIGHTS, **{name: w})
        check_weight(name, w, recipe)
    if bias is not None:
        operands["bias"] = bias
    if offs is not None:
        operands["offs"] = offs
    return ProductSpec(recipe, emulate, aligned, checked_dtype(x, operands))


def product(
    x_MK: Tensor,
    weights: Sequence[Weight],
    bias: Tensor | None,
    offs: Tensor | None,
    spec: ProductSpec,
    x_quantized: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """y (M, N) of x (M, K) and a weight, as `fp8_linear` and `fp8_grouped_mm` describe them.

    Args:
        weights: one, or the three of a gated feed-forward with a recipe that has ops for it.
        x_quantized: `bodies.quantized` of x, for products that share it; or None. The columns are
            needed if backward computes the gradient of the weight.
    """
    if not torch.is_grad_enabled() and forward_ad._current_level < 0 and x_quantized is None:
        # An autograd function would only take time. But it refuses forward-mode AD.
        for_fprop, _ = operands_of(weights, spec.dtype)
        return _forward(x_MK, None, for_fprop, bias, offs, False, spec)[0]
    reads_x = weights[0].requires_grad or weights[-1].requires_grad
    for_wgrad = torch.is_grad_enabled() and reads_x
    if torch.compiler.is_compiling():
        weights = _told_apart(x_MK, weights)
    return _Product.call(x_MK, bias, offs, x_quantized, for_wgrad, spec, *weights)


def _told_apart(x_MK: Tensor, weights: Sequence[Weight]) -> list[Weight]:
    """The weights, and views of those that come twice, as tied ones, or are x itself.

    Of a tensor that an autograd function is given twice Dynamo loses a gradient in torch 2.11, and
    2.13 refuses it.
    """
    again = [any(w is t for t in (x_MK, *weights[:i])) for i, w in enumerate(weights)]
    return [w.view_as(w) if a and isinstance(w, Tensor) else w for w, a in zip(weights, again)]


def fp8_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    recipe: str = "blockwise",
    emulate: bool = False,
) -> Tensor:
    """`torch.nn.functional.linear` with its three GEMMs in FP8; differentiable.

    Args:
        x: (..., K), bfloat16 or float32; any leading dimensions, also none or empty ones.
        weight: (N, K), N and K multiples of 16. It has x's dtype, except under autocast, which
            casts x and weight before they are quantized. A `QuantizedWeight` gets no gradient.
        bias: (N,) or None, added to the product in y's dtype.
        recipe: a name of `titan_fp8.recipe.RECIPES`, such as "blockwise" (DeepSeek-V3,
            arXiv 2412.19437) or "rowwise".
        emulate: compute the same numerics in FP32 arithmetic, on any device. CPU tensors always do.

    Returns:
        y (..., N), in the dtype of F.linear. Gradients have the dtypes of their tensors.

    Raises:
        ValueError: a recipe, type, shape, dtype or device other than these, with its value and what
            is allowed.
        RuntimeError: a CUDA device without FP8 kernels, unless `emulate`.
    """
    spec = spec_of(x, {"weight": weight}, recipe, emulate, bias=bias)
    if x.dim() < 1 or len(weight.shape) != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}: "
            "allowed are (..., K) and (N, K)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}: allowed is ({weight.shape[0]},)")
    if x.dim() == 2:
        return product(x, (weight,), bias, None, spec)
    y_MN = product(x.reshape(-1, x.shape[-1]), (weight,), bias, None, spec)
    return y_MN.view(*x.shape[:-1], weight.shape[0])


def fp8_grouped_mm(
    x: Tensor,
    weight: Weight,
    offs: Tensor,
    *,
    recipe: str = "blockwise",
    emulate: bool = False,
    aligned: bool = False,
) -> Tensor:
    """Each group of rows of x times the transpose of its own weight, in FP8; differentiable.

    Args:
        x: (M, K) tokens, sorted by group, bfloat16 or float32.
        weight: (E, N, K), N and K multiples of 16; otherwise as in `fp8_linear`.
        offs: (E,) int32, the end of each group in rows of x, non-decreasing, on x's device. Rows
            past the last end belong to no group: they are zero in y and in x's gradient, and add
            nothing to weight's.
        recipe, emulate: as in `fp8_linear`.
        aligned: every group end is a multiple of 128, so groups need no padding. This is not
            checked, because a check would wait for the GPU. The rowwise recipes lose little without
            it.

    Returns:
        y (M, N), in the dtype of F.linear. The kernels read offs on the GPU, so the CPU never waits
        for the group sizes.

    Raises:
        ValueError, RuntimeError: as `fp8_linear`; ValueError also for other dtypes of offs.
    """
    spec = spec_of(x, {"weight": weight}, recipe, emulate, aligned, offs=offs)
    if x.dim() != 2 or len(weight.shape) != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}: "
            "allowed are (M, K) and (E, N, K)"
        )
    offs = checked_offs(offs, weight.shape[0])
    return product(x, (weight,), None, offs, spec)
