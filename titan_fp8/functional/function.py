"""The autograd functions of titan_fp8: first derivatives only, and what else they refuse."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import forward_ad


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
