"""The autograd functions: a matrix product whose three GEMMs run in FP8.

    fp8_linear       x (..., K), w (N, K)                  y = x Wᵀ + b
    fp8_grouped_mm   x (M, K), w (E, N, K), offs (E,)      each group of rows with its own W

Both run one autograd function; a dense product has one group. Forward quantizes x along its rows
for fprop and along its columns for wgrad, from one read, and saves the FP8 columns for backward
instead of x. If several products read one input, torch.compile merges the equal calls.

A weight in high precision is quantized by the op that multiplies by it: in forward, and again in
backward, from the parameter as it is then. No FP8 copy of it outlives its GEMM, so nothing stale is
read after FSDP2 has freed and gathered the parameter again, and torch.compile has no copy to keep.

A weight may also be in FP8 already (`weights.py`). With `fsdp_all_gather` FSDP2 makes it a
`GatheredWeight`, which is a parameter like any other and gets its gradient. FSDP2 gathers its FP8
values for forward and again, into the same memory, for backward. A `QuantizedWeight` stays as it is
and gets no gradient.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import forward_ad

from titan_fp8.functional.checks import (
    check_bool,
    check_devices,
    check_types,
    checked_offs,
    compute_dtype,
)
from titan_fp8.functional.gemms import BODIES, Spec, fprop
from titan_fp8.functional.weights import (
    OPTIONAL,
    WEIGHTS,
    Weight,
    check_weight,
    operands_of,
)
from titan_fp8.ops import run
from titan_fp8.recipe import get_recipe


class Function(torch.autograd.Function):
    """An autograd function that is called by `call`, which says what it does not support."""

    @classmethod
    def call(cls, *args: Any) -> Any:
        """`apply`.

        Raises:
            RuntimeError: inside a transform of torch.func, such as grad or vmap.
            NotImplementedError: an argument has a tangent, for forward-mode derivatives.
        """
        if _in_transform():
            raise RuntimeError(f"titan_fp8 cannot run inside transforms of torch.func: {_USE}")
        in_eager = not torch.compiler.is_compiling()
        if in_eager and forward_ad._current_level >= 0 and any(map(_has_tangent, args)):
            raise NotImplementedError(f"titan_fp8 has no forward-mode derivatives: {_USE}")
        return cls.apply(*args)


def _in_transform() -> bool:
    return torch._C._are_functorch_transforms_active()


# What torch.compiler.assume_constant_result does. That would import torch._dynamo, and Triton, now.
_in_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _has_tangent(x: Any) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


_USE = "use Tensor.backward or torch.autograd.grad, with create_graph=False, is_grads_batched=False"


def _is_batched(x: Tensor) -> bool:
    return is_legacy_batchedtensor(x) or is_batchedtensor(x)


def no_double_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the `backward` of an autograd function, so that create_graph=True is an error.

    So is is_grads_batched=True.

    PyTorch's `once_differentiable` raises only if an incoming gradient requires grad. Otherwise it
    returns wrong second derivatives.
    """
    once_differentiable = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Tensor) -> Any:
        if torch.compiler.is_compiling():
            return once_differentiable(ctx, *gradients)
        if torch.is_grad_enabled():
            raise RuntimeError("titan_fp8 has no second derivatives: create_graph must be False")
        if any(map(_is_batched, gradients)):
            raise RuntimeError("titan_fp8 has no batched gradients: is_grads_batched must be False")
        return backward(ctx, *gradients)

    return checked


class _FP8(Function):
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
        spec: Spec,
        *weights: Weight,
    ) -> Tensor:
        operands = [operands_of(w, spec.dtype) for w in weights]
        for_fprop = [t for w, _ in operands for t in w]
        if x_quantized is None:
            y_MN, saved = _forward(x_MK, for_fprop, offs, for_wgrad, spec)
        else:
            q, s, *columns = x_quantized
            y_MN = run(fprop, q, s, *for_fprop, offs, spec, emulate=spec.emulate)
            saved = (*columns,) if for_wgrad else ()
            if for_wgrad and spec.recipe.wgrad_in_bf16:
                saved = (x_MK.to(spec.dtype).bfloat16(),)
        ctx.spec, ctx.dtypes = spec, (x_MK.dtype, *[w.dtype for w in weights])
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(offs, *[t for _, w in operands for t in w], *saved)
        return y_MN if bias is None else y_MN + bias.to(spec.dtype)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, g_MN: Tensor) -> Any:
        spec, (offs, *saved) = ctx.spec, ctx.saved_tensors
        needs_dx, needs_db, *others = ctx.needs_input_grad
        needs = needs_dx, *others[4:]
        dtypes = tuple([dtype if need else None for dtype, need in zip(ctx.dtypes, needs)])
        gradients: list[Tensor] = []
        if any(needs):
            _, body = BODIES[len(needs) - 1]
            weights, saved = saved[: 2 * len(needs) - 2], saved[2 * len(needs) - 2 :]
            g = g_MN.to(spec.dtype).contiguous()
            arguments = g, *weights, offs, dtypes, spec, *saved
            gradients = [*run(body, *arguments, emulate=spec.emulate)]
        db = g_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_db else None
        dx, *dws = [None if dtype is None else gradients.pop(0) for dtype in dtypes]
        return dx, db, None, None, None, None, *dws


def _forward(
    x_MK: Tensor, for_fprop: Sequence[Any], offs: Tensor | None, for_wgrad: bool, spec: Spec
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """y, and what backward reads besides the weights."""
    body, _ = BODIES[len(for_fprop) // 2]
    x_MK = x_MK.detach().to(spec.dtype).contiguous()
    arguments = x_MK, *for_fprop, offs, for_wgrad, spec
    y_MN, *saved = run(body, *arguments, emulate=spec.emulate)
    in_bf16 = for_wgrad and spec.recipe.wgrad_in_bf16
    return y_MN, (*saved, x_MK.bfloat16()) if in_bf16 else (*saved,)


def product(
    x_MK: Tensor,
    weights: Sequence[Weight],
    bias: Tensor | None,
    offs: Tensor | None,
    spec: Spec,
    x_quantized: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """y (M, N) of x (M, K) and a weight, as `fp8_linear` and `fp8_grouped_mm` describe them.

    Args:
        weights: one, or the three of a gated feed-forward with a recipe that has ops for it.
        x_quantized: `gemms.quantized` of x, for products that share it; or None. The columns are
            needed if backward computes the gradient of the weight.
    """
    if not torch.is_grad_enabled() and forward_ad._current_level < 0 and x_quantized is None:
        # An autograd function would only take time. But it refuses forward-mode AD.
        for_fprop = [t for w in weights for t in operands_of(w, spec.dtype)[0]]
        y_MN, _ = _forward(x_MK, for_fprop, offs, False, spec)
        return y_MN if bias is None else y_MN + bias.to(spec.dtype)
    read_x = weights[0], weights[-1]
    for_wgrad = torch.is_grad_enabled() and any(w.requires_grad for w in read_x)
    return _FP8.call(x_MK, bias, offs, x_quantized, for_wgrad, spec, *weights)


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
    get_recipe(recipe)
    check_bool("emulate", emulate)
    check_types(x=x)
    check_types(WEIGHTS, weight=weight)
    check_types(OPTIONAL, bias=bias)
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
    get_recipe(recipe)
    check_bool("emulate", emulate)
    check_bool("aligned", aligned)
    check_types(x=x)
    check_types(WEIGHTS, weight=weight)
    if x.dim() != 2 or len(weight.shape) != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}: "
            "allowed are (M, K) and (E, N, K)"
        )
    offs = checked_offs(offs, weight.shape[0])
    w = check_weight("weight", weight, recipe)
    check_devices(x, weight=weight, offs=offs)
    spec = Spec(recipe, emulate, aligned, compute_dtype(x, weight=w))
    return product(x, (weight,), None, offs, spec)
