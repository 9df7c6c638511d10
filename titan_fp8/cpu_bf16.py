"""Products of bf16 matrices on CPUs for which oneDNN has no bf16 kernels, as x86 without AVX-512.

PyTorch leaves bf16 products on the CPU to oneDNN. Where oneDNN has no kernels for them, PyTorch
falls back to slow loops of its own. `use_fp32_products` replaces these kernels by ones that cast
the operands to FP32, multiply, and round the product to bf16 once. Products with M >= 384 and K,
N >= 256 take 1/3 to 1/60 of the time; tiny ones take some 35 us longer.

It applies to the whole process, since it replaces kernels in PyTorch's dispatcher. Autograd,
autocast, dispatch modes, DTensor and the compiler sit above these kernels and see the same ops as
before. `F.linear` and `torch.matmul` call `mm`, `addmm` and `bmm`; Inductor's code and
`torch._grouped_mm` call their variants with `out`. In-place variants and products with vectors are
not replaced. Tensors of other or mixed dtypes go to the original kernels as they are; passing
through Python costs such a call about 4 us.

Tried with torch 2.11 and 2.13. This can go when PyTorch multiplies in FP32 itself.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

_MATRIX_OPS = {"mm": 2, "addmm": 3, "bmm": 2, "baddbmm": 3}
"""Op -> how many of its first arguments must be bf16. Each has a variant that writes to `out`."""

_ATTENTION_OPS = {"_scaled_dot_product_flash_attention_for_cpu_backward": 5}
"""The same for attention. Forward is not replaced: in FP32 it takes no less time."""


@functools.cache
def use_fp32_products() -> torch.library.Library | None:
    """Multiplies bf16 matrices in FP32 in this process, unless oneDNN has kernels for bf16.

    Returns:
        What holds the replacements, which last as long as it does. The cache keeps it until the
        process ends.
    """
    if _has_bf16_kernels():
        return None
    library = torch.library.Library("aten", "IMPL")
    override(library)
    return library


def _has_bf16_kernels() -> bool:
    mkldnn = torch.backends.mkldnn  # PyTorch's name for oneDNN
    return mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def override(library: torch.library.Library) -> None:
    """Replaces the kernels for as long as `library`, of the namespace aten, exists."""
    replacements = {}
    for name, operands in (_MATRIX_OPS | _ATTENTION_OPS).items():
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
        replacements[name] = _returning(kernel, operands)
        if name in _MATRIX_OPS:
            writing_kernel = torch.library.get_kernel(f"aten::{name}.out", "CPU").call_boxed
            replacements[f"{name}.out"] = _writing(writing_kernel, kernel, operands)
    with warnings.catch_warnings():
        # PyTorch warns that kernels are overridden, but that is the purpose.
        warnings.simplefilter("ignore", UserWarning)
        for name, replacement in replacements.items():
            library.impl(name, replacement, "CPU", with_keyset=True, allow_override=True)


def _returning(kernel: Callable, operands: int) -> Callable:
    """The replacement for a kernel that returns new tensors."""

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not _all_bf16(args[:operands]):
            return kernel(keys, *args, **kwargs)
        kwargs = {name: _widened(value) for name, value in kwargs.items()}
        results = kernel(keys, *map(_widened, args), **kwargs)
        if isinstance(results, torch.Tensor):
            return results.bfloat16()
        return tuple(result.bfloat16() for result in results)

    return run


def _writing(kernel: Callable, returning_kernel: Callable, operands: int) -> Callable:
    """The replacement for a kernel that writes to `out`; the other one returns a new tensor."""

    def run(keys: Any, *args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if not _all_bf16((*args[:operands], out)):
            return kernel(keys, *args, out=out, **kwargs)
        product = returning_kernel(keys, *map(_widened, args), **kwargs)
        if out.shape != product.shape:  # the original kernel resizes `out`
            return kernel(keys, *args, out=out, **kwargs)
        return out.copy_(product)

    return run


def _all_bf16(tensors: tuple[torch.Tensor, ...]) -> bool:
    return all(tensor.dtype is torch.bfloat16 for tensor in tensors)


def _widened(value: Any) -> Any:
    """A bf16 tensor in FP32, with the same order of dimensions in memory; others as they are."""
    is_bf16 = isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16
    return value.float() if is_bf16 else value
