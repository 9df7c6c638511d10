"""Launches that cost the host little.

A layer in FP8 launches three kernels where one in bf16 launches one, and a MoE model keeps its host
busy as it is. Triton finds the compiled kernel of a launch by binding and hashing all arguments,
layouts too, and checks each tensor descriptor: 40 to 80 us of Python, longer than many a kernel
runs. Here a launch is found by those traits of its arguments that Triton compiles for, and
descriptors are not checked again: the callers' shapes, strides and dtypes are.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver


class Kernel(GluonJITFunction):
    """A Gluon kernel that remembers what it compiled; made by `kernel`."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._launches: dict[tuple, tuple] = {}
        self._constant = [p.is_constexpr for p in self.params]

    def __getitem__(self, grid: tuple[int, ...]):
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any):
        values = (*args, *(options.pop(name) for name in self.arg_names[len(args) :]))
        traits: list[Any] = [driver.active.get_current_device()]
        for value, constant in zip(values, self._constant, strict=True):
            kind = type(value)
            if kind is int and not constant:
                # Triton compiles for 1, for multiples of 16 and for numbers of 64 bits.
                traits.append(1 if value == 1 else (value % 16 == 0) * 16 + (value >= 1 << 31) * 32)
            elif kind is int or kind is bool or value is None:
                traits.append(value)
            elif constant:
                # By identity, for hashing a layout is slow.
                traits.append(id(value))
            elif kind is TensorDescriptor:
                traits += (value.base.dtype, id(value.layout), *value.block_shape)
            else:
                traits += (value.dtype, value.data_ptr() % 16 == 0)
        traits += options.items()
        key = tuple(traits)
        found = self._launches.get(key)
        if found is not None:
            found[0][(*grid, 1, 1)[:3]](*values)
            return
        compiled = self.run(*values, grid=grid, warmup=False, **options)
        if compiled is not None:
            # What was told apart by identity has to live as long. Of a tensor this keeps no more
            # than torch.strided.
            self._launches[key] = compiled, [getattr(value, "layout", value) for value in values]


def kernel(**options: Any) -> functools.partial[Kernel]:
    """`gluon.jit` for a kernel, rather than for a function that kernels call."""
    return functools.partial(Kernel, **options)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many SMs the device has, or the slice of it."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def descriptor(
    base: Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    layout: gl.NVMMASharedLayout,
) -> TensorDescriptor:
    """TMA's view of memory that starts at `base`, without the checks of the class.

    The caller sees to them: base and rows start at multiples of 16 bytes, no dimension is 0.
    """
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = base, shape, strides
    made.block_shape, made.layout = box, layout
    return made
