"""Launches that cost the host little.

A layer in FP8 launches three kernels where one in bf16 launches one, and a MoE model keeps its host
busy as it is. Triton finds the compiled kernel of a launch by binding and hashing all arguments,
layouts too, checks each tensor descriptor and packs the parameters in Python: 40 to 80 us, longer
than many a kernel runs. Here Triton compiles, and launches a kernel for the first time. From then
on `launcher.c` finds it by those traits of its arguments that Triton compiles for, packs the
parameters and calls CUDA's driver; Triton's hooks around a launch see the first one alone.

Python passes what costs it little: tensors whose type the kernel sees differently, `Typed`, and
what TMA reads or writes, `Box`, are tuples, neither made nor checked by PyTorch or Triton.
"""

import functools
import logging
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.build import compile_module_from_src

_log = logging.getLogger(__name__)

POINTER, NUMBER, BOX = range(3)
"""Kinds of parameters, as `launcher.c` has them."""
_BYTES = {"i32": 4, "u32": 4, "i64": 8, "u64": 8}


class Typed(NamedTuple):
    """A tensor that the kernel sees as one of another type, of as many bytes or fewer."""

    base: Tensor
    dtype: torch.dtype


class Box(NamedTuple):
    """TMA's view of memory that starts at `base`, read in boxes.

    The caller sees to it that rows start at multiples of 16 bytes and that no dimension is 0; CUDA
    refuses what does not suit TMA.
    """

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    layout: gl.NVMMASharedLayout


def for_triton(value: Any) -> Any:
    """An argument as Triton takes it."""
    if isinstance(value, Typed):
        return value.base.view(value.dtype)
    if isinstance(value, Box):
        base, shape, strides, box, layout = value
        return TensorDescriptor(base, list(shape), list(strides), list(box), layout)
    return value


@functools.cache
def native(driver: str = "libcuda.so.1") -> ModuleType:
    """`launcher.c`, built with the compiler that Triton builds its own launchers with."""
    source = Path(__file__).with_name("launcher.c").read_text()
    include = nvidia.include_dirs
    module = compile_module_from_src(source, "titan_fp8_launcher", include_dirs=include)
    module.load_driver(driver)
    return module


class Kernel(GluonJITFunction):
    """A Gluon kernel with launches of its own; made by `kernel`."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._launcher: Callable | None = None

    def __getitem__(self, grid: tuple[int, ...]):
        if self._launcher is None:
            plans: dict[bytes, bytes] = {}
            first = functools.partial(self._launch_first, plans, [])
            constants = bytes(p.is_constexpr for p in self.params)
            self._launcher = native().Launcher(
                *(first, plans, constants),
                *(torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream),
            )
        return functools.partial(self._launcher, grid)

    def _launch_first(
        self,
        plans: dict[bytes, bytes],
        kept: list[Any],
        key: bytes,
        grid: tuple[int, ...],
        args: tuple,
        options: dict,
    ) -> None:
        """Launches through Triton, which compiles if it has not, and notes how to launch again."""
        missing = [p.name for p in self.params[len(args) :] if not p.is_constexpr]
        if missing:
            raise TypeError(f"{self.__name__}: {', '.join(missing)} must be given by position")
        named = dict(zip(self.arg_names, args)) | options
        values = {name: for_triton(value) for name, value in named.items()}
        compiled = self.run(**values, grid=grid, warmup=False)
        if compiled is None or key in plans:
            return
        known = plan(compiled, named)
        if known is None:
            _log.warning(
                "titan_fp8: this Triton passes parameters to %s in a way that is not known here; "
                "launches are left to it and take the host longer",
                self.__name__,
            )
        # What is told apart by its address has to stay there, and what is launched loaded.
        runtime = {p.name for p in self.params if not p.is_constexpr}
        kept += (value for name, value in named.items() if name not in runtime)
        kept += (value.layout for value in args if isinstance(value, Box))
        kept.append(compiled)
        plans[key] = known or b""


def plan(compiled: CompiledKernel, arguments: dict[str, Any]) -> bytes | None:
    """How `launcher.c` launches a kernel again, for arguments of the same traits.

    None where the parameters of the compiled kernel are not those that this would pass, or where it
    needs more than a launch.
    """
    metadata = compiled.metadata
    words = [compiled.function, 32 * metadata.num_warps, metadata.shared]
    sizes = []
    boxes = iter(metadata.tensordesc_meta or [])
    for index, (name, kind) in enumerate(compiled.src.signature.items()):
        if kind == "constexpr":
            continue
        if kind.startswith("*"):
            words += [POINTER, index]
            sizes.append(8)
        elif kind in _BYTES:
            words += [NUMBER, index]
            sizes.append(_BYTES[kind])
        elif kind.startswith("tensordesc") and (box := next(boxes, None)) is not None:
            rank = len(arguments[name].shape)
            kind = nvidia.TMA_DTYPE_DEVICE_TO_HOST[box["elem_type"]]
            words += [BOX, index, kind, box["swizzle"], box["elem_size"], rank, *box["block_size"]]
            sizes += [128, *[4] * rank, *[8] * rank]
        else:
            return None
    launches_alone = not (
        metadata.global_scratch_size
        or metadata.profile_scratch_size
        or metadata.launch_cooperative_grid
        or metadata.launch_pdl
        or metadata.num_ctas != 1
    )
    # Triton can be told to keep no PTX.
    ptx = compiled.asm.get("ptx", "")
    # Behind its arguments a kernel has pointers to two kinds of scratch memory.
    if not launches_alone or _parameters(ptx) != [*sizes, 8, 8]:
        return None
    return array("q", words).tobytes()


def _parameters(ptx: str) -> list[int]:
    """How many bytes each parameter of the kernel has."""
    entry = re.search(r"\.entry [^(]*\(([^)]*)\)", ptx)
    if entry is None:
        return []
    declared = re.findall(r"\.param (?:\.align \d+ )?\.[busf](\d+)[^\[\n]*(?:\[(\d+)\])?", entry[1])
    return [int(bits) // 8 * int(count or 1) for bits, count in declared]


def kernel(**options: Any) -> functools.partial[Kernel]:
    """`gluon.jit` for a kernel, rather than for a function that kernels call."""
    return functools.partial(Kernel, **options)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many SMs the device has, or the slice of it."""
    return torch.cuda.get_device_properties(device).multi_processor_count
