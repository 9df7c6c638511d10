"""What the autograd functions of titan_fp8 refuse: they have first derivatives only.

PyTorch itself refuses forward-mode derivatives and batched gradients.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Function(torch.autograd.Function):
    """An autograd function that is called by `call`, also where it is compiled."""

    @classmethod
    def call(cls, *args: Any) -> Any:
        """`apply`. RuntimeError inside a transform of torch.func, such as grad or vmap.

        In eager mode that error is PyTorch's; in code of torch.compile gradients would be zero.
        """
        if torch.compiler.is_compiling() and _in_transform():
            raise RuntimeError("titan_fp8 cannot run inside transforms of torch.func")
        return cls.apply(*args)


def _in_transform() -> bool:
    return torch._C._are_functorch_transforms_active()


# What torch.compiler.assume_constant_result does. That would import torch._dynamo, and Triton, now.
_in_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def no_double_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the `backward` of an autograd function, so that create_graph=True is an error.

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
        return backward(ctx, *gradients)

    return checked
