"""Products of bf16 matrices on CPUs for which oneDNN has no bf16 kernels, as x86 without AVX-512.

There PyTorch falls back to loops of its own, up to 60 times slower. `in_fp32` makes kernels that
cast the operands to FP32, multiply, and round the product to bf16 once.

They replace kernels in PyTorch's dispatcher, for the whole process (`patches.py`). Autograd,
autocast, dispatch modes, DTensor and the compiler sit above and see the same ops as before.
Inductor's code and `torch._grouped_mm` call the variants with `out`. In-place variants and products
with vectors are not replaced. Tensors of other or mixed dtypes go to the original kernels. Forward
of attention takes no less time in FP32. This can go when PyTorch multiplies in FP32 itself.
"""

from collections.abc import Callable
from typing import Any

import torch


def has_bf16_kernels() -> bool:
    mkldnn = torch.backends.mkldnn  # PyTorch's name for oneDNN
    return mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def in_fp32(path: str) -> Callable[[Callable], Callable]:
    """Makes the replacement for PyTorch's kernel of an op such as "aten::mm.out"."""
    op, _, overload = path.partition(".")
    if overload == "out":
        returning = torch.library.get_kernel(op, "CPU").call_boxed
        return lambda kernel: _writing(kernel, returning)
    return _returning


def _returning(kernel: Callable) -> Callable:
    """The replacement for a kernel that returns new tensors."""

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not _all_bf16(args):
            return kernel(keys, *args, **kwargs)
        kwargs = {name: _widened(value) for name, value in kwargs.items()}
        results = kernel(keys, *map(_widened, args), **kwargs)
        if isinstance(results, torch.Tensor):
            return results.bfloat16()
        return tuple(result.bfloat16() for result in results)

    return run


def _writing(kernel: Callable, returning_kernel: Callable) -> Callable:
    """The replacement for a kernel that writes to `out`; the other one returns a new tensor."""

    def run(keys: Any, *args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if not _all_bf16((out, *args)):
            return kernel(keys, *args, out=out, **kwargs)
        product = returning_kernel(keys, *map(_widened, args), **kwargs)
        return out.resize_(product.shape).copy_(product)

    return run


def _all_bf16(args: tuple[Any, ...]) -> bool:
    """Whether the tensors among them are; attention's statistics, its sixth argument, never are."""
    return all(x.dtype is torch.bfloat16 for x in args[:5] if isinstance(x, torch.Tensor))


def _widened(value: Any) -> Any:
    """A bf16 tensor in FP32, with the same order of dimensions in memory; others as they are."""
    is_bf16 = isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16
    return value.float() if is_bf16 else value
