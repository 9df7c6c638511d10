"""The autograd functions: a matrix product whose three GEMMs run in FP8.

    fp8_linear       x (..., K), w (N, K)                  y = x Wᵀ + b
    fp8_grouped_mm   x (M, K), w (E, N, K), offs (E,)      each group of rows with its own W

Both run one autograd function; a dense product has one group. Forward quantises x along its rows
for fprop and along its columns for wgrad, from one read, and saves the FP8 columns for backward
instead of x. If several products read one input, it is quantised once: torch.compile merges the
equal calls, and eager code passes a `SharedInput`.

A weight in high precision is quantised by the op that multiplies by it: in forward, and again in
backward, from the parameter as it is then. No FP8 copy of a weight outlives its GEMM, so nothing
stale is read after FSDP2 has freed and gathered the parameter again, and torch.compile has no copy
to keep. A weight that is in FP8 already comes as a `QuantizedWeight`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_fp8.checks import (
    check_bool,
    check_devices,
    check_multiples_of_16,
    checked_offs,
    compute_dtype,
)
from titan_fp8.recipe import RECIPES, Recipe, Scaling, get_recipe

Operand = tuple[Tensor, ...]
"""What a GEMM reads of a tensor: q and its scale, or for a bf16 GEMM the tensor itself."""


class QuantizedWeight(NamedTuple):
    """A weight that is already in FP8, in the layouts of both GEMMs that read it.

    Attributes:
        recipe: the name of the recipe that it was quantised by.
        rows: q (N, K) or (E, N, K) and its scale, for fprop.
        columns: the transposed q (K, N) or (E, K, N) and its scale, for dgrad.
    """

    recipe: str
    rows: Operand
    columns: Operand

    @property
    def shape(self) -> torch.Size:
        return self.rows[0].shape

    @property
    def device(self) -> torch.device:
        return self.rows[0].device


Weight = Tensor | QuantizedWeight


@torch.no_grad()
def quantize_weight(
    weight: Tensor, *, recipe: str = "blockwise", emulate: bool = False
) -> QuantizedWeight:
    """Quantise a weight once, for products that read it many times.

    Args:
        weight: (N, K) or (E, N, K), bfloat16 or float32, N and K multiples of 16.
        recipe, emulate: as in `fp8_linear`.

    Raises:
        ValueError: a recipe or shape other than these.
    """
    ops = get_recipe(recipe)
    check_bool("emulate", emulate)
    check_multiples_of_16("weight", weight.shape)
    weight = weight.contiguous()
    rows = ops.weight(weight, emulate=emulate)
    return QuantizedWeight(recipe, rows, ops.weight_t(weight, emulate=emulate))


class Spec(NamedTuple):
    """What a product needs to know besides its tensors; constants to torch.compile."""

    recipe: str
    emulate: bool
    aligned: bool
    dtype: torch.dtype

    @property
    def ops(self) -> Recipe:
        return RECIPES[self.recipe]

    @property
    def wgrad_in_bf16(self) -> bool:
        return self.ops.wgrad.left is Scaling.NONE


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As PyTorch's `once_differentiable`, but create_graph=True is always an error.

    PyTorch's version returns wrong second derivatives, without an error, if no incoming gradient
    requires grad.
    """
    once = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Tensor) -> Any:
        if torch.compiler.is_compiling():
            return once(ctx, *gradients)
        if torch.is_grad_enabled():
            raise RuntimeError("titan_fp8 has no second derivatives: create_graph=True")
        return backward(ctx, *gradients)

    return checked


# The three GEMMs


def fprop(x_rows: Operand, w: Tensor | Operand, offs: Tensor | None, spec: Spec) -> Tensor:
    """y (M, N) = x Wᵀ, which contracts K.

    Args:
        x_rows: the rows of x (M, K).
        w: (N, K) or (E, N, K) in high precision, or the rows of a quantised weight.
    """
    layout = offs, spec.aligned, spec.dtype
    if isinstance(w, Tensor):
        return spec.ops.fprop.op(*x_rows, w.to(spec.dtype), *layout, emulate=spec.emulate)
    return spec.ops.mm(*x_rows, *w, *layout, emulate=spec.emulate)


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
        w: (N, K) or (E, N, K) in high precision, or the columns of a quantised weight.
    """
    layout = offs, spec.aligned, out_dtype
    if isinstance(w, Tensor):
        return spec.ops.dgrad.op(*g_rows, w.to(spec.dtype), *layout, emulate=spec.emulate)
    return spec.ops.mm(*g_rows, *w, *layout, emulate=spec.emulate)


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
    return spec.ops.wgrad.op(*g_columns, *x_columns, *layout, emulate=spec.emulate)


# Their operands


def quantize_operands(
    x_MK: Tensor, offs: Tensor | None, rows: bool, columns: bool, spec: Spec
) -> tuple[Operand, Operand]:
    """The rows and columns of x (M, K), an input or a gradient, as GEMMs read them.

    `rows` and `columns` say which of the two are needed; the other one is ().
    """
    ops, layout, emulate = spec.ops, (offs, spec.aligned), spec.emulate
    x_MK = x_MK.detach().to(spec.dtype)
    if columns and spec.wgrad_in_bf16:
        return (ops.rows(x_MK, emulate=emulate) if rows else ()), (x_MK.bfloat16(),)
    if rows and columns:
        q, s, q_t, s_t = ops.rows_and_columns(x_MK, *layout, emulate=emulate)
        return (q, s), (q_t, s_t)
    if rows:
        return ops.rows(x_MK, emulate=emulate), ()
    return (), ops.columns(x_MK, *layout, emulate=emulate) if columns else ()


class SharedInput:
    """Quantises x once for products that read it one after the other.

    x must not change until the last of them has run. Under torch.compile there is nothing to share:
    the compiler merges equal quantisations.
    """

    def __init__(self, x: Tensor):
        self.x = x
        self._operands: dict[tuple[bool, Spec], tuple[Operand, Operand]] = {}

    def operands(self, x_MK: Tensor, for_wgrad: bool, spec: Spec) -> tuple[Operand, Operand]:
        """`quantize_operands` of x_MK, which is x as a matrix."""
        if torch.compiler.is_compiling():
            return quantize_operands(x_MK, None, True, for_wgrad, spec)
        key = for_wgrad, spec
        if key not in self._operands:
            self._operands[key] = quantize_operands(x_MK, None, True, for_wgrad, spec)
        return self._operands[key]


class _Operands(NamedTuple):
    """What a product reads of its tensors, besides what autograd must see.

    Attributes:
        x_rows, x_columns: of x; x_columns is () if backward computes no dW.
        w_rows, w_columns: of a weight that is quantised already, else ().
    """

    x_rows: Operand
    x_columns: Operand
    w_rows: Operand = ()
    w_columns: Operand = ()


class _FP8Product(torch.autograd.Function):
    """y (M, N) of x (M, K) and w (N, K), or of x, w (E, N, K) and the group ends offs (E,).

    Forward reads x through its operands only. w is None if the weight is quantised already.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        w: Tensor | None,
        bias: Tensor | None,
        offs: Tensor | None,
        operands: _Operands,
        spec: Spec,
    ) -> Tensor:
        ctx.spec, ctx.x_dtype = spec, x_MK.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(offs, w, *operands.w_columns, *operands.x_columns)
        y_MN = fprop(operands.x_rows, operands.w_rows if w is None else w, offs, spec)
        return y_MN if bias is None else y_MN + bias.to(spec.dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g_MN: Tensor) -> Any:
        offs, w, *columns = ctx.saved_tensors
        spec = ctx.spec
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        g_rows, g_columns = quantize_operands(g_MN, offs, needs_dx, needs_dw, spec)
        dx_MK = dw = db = None
        if needs_dx:
            dx_MK = dgrad(g_rows, columns if w is None else w, offs, spec, ctx.x_dtype)
        if needs_dw:
            dw = wgrad(g_columns, columns, offs, spec, w.dtype)
        if needs_db:
            db = g_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx_MK, dw, db, None, None, None


def products(
    x: Tensor,
    weights: tuple[Weight, ...],
    bias: Tensor | None,
    offs: Tensor | None,
    spec: Spec,
    shared: SharedInput | None = None,
) -> list[Tensor]:
    """y (M, N) of x (..., K) and each of the weights; x is quantised once for all of them."""
    x_MK = x.reshape(-1, x.shape[-1])
    trained = [isinstance(w, Tensor) and w.requires_grad for w in weights]
    for_wgrad = torch.is_grad_enabled() and any(trained)
    if shared is None:
        x_rows, x_columns = quantize_operands(x_MK, offs, True, for_wgrad, spec)
    else:
        x_rows, x_columns = shared.operands(x_MK, for_wgrad, spec)
    outputs = []
    for w, needs_dw in zip(weights, trained, strict=True):
        if isinstance(w, QuantizedWeight):
            operands = _Operands(x_rows, (), w.rows, w.columns)
            outputs.append(_FP8Product.apply(x_MK, None, bias, offs, operands, spec))
        else:
            operands = _Operands(x_rows, x_columns if needs_dw else ())
            outputs.append(_FP8Product.apply(x_MK, w, bias, offs, operands, spec))
    return outputs


def check_weight(name: str, weight: Weight, recipe: str) -> Tensor | None:
    """ValueError unless `weight` suits the recipe; returns it if it is in high precision."""
    check_multiples_of_16(name, weight.shape)
    if not isinstance(weight, QuantizedWeight):
        return weight
    if weight.recipe != recipe:
        raise ValueError(f"{name} was quantised for {weight.recipe!r}: the recipe is {recipe!r}")
    return None


def fp8_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    recipe: str = "blockwise",
    emulate: bool = False,
    shared: SharedInput | None = None,
) -> Tensor:
    """`torch.nn.functional.linear` with its three GEMMs in FP8; differentiable.

    Args:
        x: (..., K), bfloat16 or float32; any leading dimensions, also none or empty ones.
        weight: (N, K), N and K multiples of 16. It has x's dtype, except under autocast, which
            casts x and weight before they are quantised. A `QuantizedWeight` gets no gradient.
        bias: (N,) or None, added to the product in y's dtype.
        recipe: a name of `titan_fp8.recipe.RECIPES`, such as "blockwise" (DeepSeek-V3,
            arXiv 2412.19437) or "rowwise".
        emulate: compute the same numerics in FP32 arithmetic, on any device. CPU tensors always do.
        shared: `SharedInput(x)`, given to every product that reads x.

    Returns:
        y (..., N), in the dtype of F.linear. Gradients have the dtypes of their tensors.

    Raises:
        ValueError: a recipe, shape, dtype or device other than these, with its value and what is
            allowed.
        RuntimeError: a CUDA device without FP8 kernels, unless `emulate`.
    """
    get_recipe(recipe)
    check_bool("emulate", emulate)
    if x.dim() < 1 or len(weight.shape) != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}: "
            "allowed are (..., K) and (N, K)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}: allowed is ({weight.shape[0]},)")
    w = check_weight("weight", weight, recipe)
    check_devices(x, weight=weight, bias=bias)
    spec = Spec(recipe, emulate, False, compute_dtype(x, weight=w, bias=bias))
    (y_MN,) = products(x, (weight,), bias, None, spec, shared)
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
        aligned: every group end is a multiple of 128, so groups need not be laid out anew. The
            caller vouches for it; checking it on the GPU would wait for the device. The rowwise
            recipes lose little without it.

    Returns:
        y (M, N). Nothing waits for the device, whatever the group sizes.

    Raises:
        ValueError, RuntimeError: as `fp8_linear`; ValueError also for other dtypes of offs.
    """
    get_recipe(recipe)
    check_bool("emulate", emulate)
    check_bool("aligned", aligned)
    if x.dim() != 2 or len(weight.shape) != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}: "
            "allowed are (M, K) and (E, N, K)"
        )
    offs = checked_offs(offs, weight.shape[0])
    w = check_weight("weight", weight, recipe)
    check_devices(x, weight=weight, offs=offs)
    spec = Spec(recipe, emulate, aligned, compute_dtype(x, weight=w))
    (y_MN,) = products(x, (weight,), None, offs, spec)
    return y_MN
