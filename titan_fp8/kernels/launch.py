"""Kernel launches that take little CPU time.

To launch a kernel, Triton binds and hashes all arguments, layouts included, checks tensor
descriptors and packs parameters, all in Python. That takes 40 to 80 us, longer than many kernels
run. Here Triton compiles a kernel and launches it the first time. After that `launcher.c` looks up
the compiled kernel by the properties of the arguments that Triton specializes on, packs the
parameters and calls the CUDA driver. Triton's launch hooks see only the first launch.

An argument is a tensor, a number, None or a pair: (tensor, dtype) for a tensor whose bytes the
kernel reads or writes as another dtype, (tensor, TensorMap) for one that it accesses by TMA. Pairs
are cheap: neither PyTorch nor Triton checks them.
"""

import ctypes
import functools
import logging
import re
from array import array
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.build import compile_module_from_src

_log = logging.getLogger(__name__)

POINTER, NUMBER, BOX = range(3)
"""Kinds of kernel parameters in a plan."""
NAME_BYTES = 64
"""Those of a kernel's name in a plan."""
MAX_ARGUMENTS, MAX_SLOTS = 64, 128
"""The arguments of a launch, the tensors of a replay; the places of a replay's addresses."""
FOR_C = ("POINTER", "NUMBER", "BOX", "NAME_BYTES", "MAX_ARGUMENTS", "MAX_SLOTS")
"""The constants above, which the C code has under the same names."""
_BYTES = {"i32": 4, "u32": 4, "i64": 8, "u64": 8}
CACHED_SHAPES = 1024
"""How many shapes each cache of launch arguments or replays holds. With expert parallelism the
number of tokens differs from step to step. A replay holds 3.4 KiB a launch, so all replays of a
product, which launches four kernels, hold at most 14 MiB."""


class TensorMap(NamedTuple):
    """How TMA accesses the memory of a tensor: as an array, in boxes.

    The caller ensures that rows start at multiples of 16 bytes and that no dimension is 0. The
    driver refuses other shapes and strides that TMA does not support.

    Attributes:
        shape, strides: those of the array, in elements.
        box: the shape of what one TMA instruction moves.
        layout: of a box in shared memory.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    layout: gl.NVMMASharedLayout


def for_triton(value: Any) -> Any:
    """An argument in the form that Triton takes; a pair becomes a view or a TensorDescriptor."""
    if not isinstance(value, tuple):
        return value
    base, seen_as = value
    if isinstance(seen_as, torch.dtype):
        return base.view(seen_as)
    shape, strides, box, layout = seen_as
    return TensorDescriptor(base, list(shape), list(strides), list(box), layout)


@functools.cache
def native(driver: str = "libcuda.so.1") -> ModuleType:
    """The extension module of `launcher.c`, built as Triton builds its launchers."""
    ctypes.CDLL(driver, ctypes.RTLD_GLOBAL)  # The module is not linked to it, and finds it here.
    constants = ", ".join(f"{name} = {globals()[name]}" for name in FOR_C)
    source = f"enum {{ {constants} }};\n" + Path(__file__).with_name("launcher.c").read_text()
    include = nvidia.include_dirs
    module = compile_module_from_src(source, "titan_fp8_launcher", include_dirs=include)
    module.set_up(torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream)
    return module


RECORDER: ContextVar[Any] = ContextVar("recorder", default=None)
"""The `record.Recorder` that does the launches of this thread, or None."""


class Kernel(GluonJITFunction):
    """A Gluon kernel that `launcher.c` launches from the second time on; made by `kernel`."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._launcher: functools.partial | None = None

    def __getitem__(self, grid: tuple[int, ...]):
        """A function that launches the kernel, given its arguments and options."""
        if self._launcher is None:
            plans: dict[bytes, bytes] = {}
            first = functools.partial(self._launch_first, plans, [])
            constants = bytes(p.is_constexpr for p in self.params)
            self._launcher = functools.partial(native().launch, first, plans, constants)
        if (recorder := RECORDER.get()) is not None:
            return functools.partial(recorder.launch, self._launcher, grid)
        return functools.partial(self._launcher, grid, None)

    def _launch_first(
        self,
        plans: dict[bytes, bytes],
        kept: list[Any],
        key: bytes,
        grid: tuple[int, ...],
        /,
        *args: Any,
        **options: Any,
    ) -> None:
        """Launches through Triton, which compiles if needed, and stores a plan for later launches.

        Args:
            plans: key -> plan, shared with `launcher.c`. With an empty plan Triton launches.
            kept: objects to keep alive as long as the kernel.
            key: the key of these arguments, for which `launcher.c` has found no plan.
        """
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
                "titan_fp8: this version of Triton passes parameters to %s in an unknown way, so "
                "Triton launches it, which takes more CPU time",
                self.__name__,
            )
        # Keys contain the addresses of constants and layouts, so these objects must stay alive, or
        # others could get their addresses. The compiled kernel must stay loaded.
        runtime = {p.name for p in self.params if not p.is_constexpr}
        kept += (value for name, value in named.items() if name not in runtime)
        pairs = (value[1] for value in args if isinstance(value, tuple))
        kept += (seen_as.layout for seen_as in pairs if isinstance(seen_as, TensorMap))
        kept.append(compiled)
        plans[key] = known or b""


def plan(compiled: CompiledKernel, arguments: dict[str, Any]) -> bytes | None:
    """The plan by which `launcher.c` launches a compiled kernel, in the format described there.

    None if the kernel's parameters differ from those that the plan would pass, or if a launch needs
    more than parameters (scratch memory, clusters, a cooperative launch).
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
            rank = len(arguments[name][1].shape)
            elem_type = nvidia.TMA_DTYPE_DEVICE_TO_HOST[box["elem_type"]]
            words += [BOX, index, elem_type, box["swizzle"], box["elem_size"], rank]
            words += box["block_size"]
            sizes += [128, *[4] * rank, *[8] * rank]
        else:
            return None
    plain_launch = not (
        metadata.global_scratch_size
        or metadata.profile_scratch_size
        or metadata.launch_cooperative_grid
        or metadata.launch_pdl
        or metadata.num_ctas != 1
    )
    ptx = compiled.asm.get("ptx", "")  # Triton can be configured not to keep it.
    # After its arguments a kernel takes two pointers to scratch memory.
    if not plain_launch or _parameters(ptx) != [*sizes, 8, 8]:
        return None
    name = metadata.name.encode()[: NAME_BYTES - 1]
    return name.ljust(NAME_BYTES, b"\0") + array("q", words).tobytes()


def _parameters(ptx: str) -> list[int]:
    """The size in bytes of each parameter of the kernel, read from its PTX."""
    entry = re.search(r"\.entry [^(]*\(([^)]*)\)", ptx)
    if entry is None:
        return []
    declared = re.findall(r"\.param (?:\.align \d+ )?\.[busf](\d+)[^\[\n]*(?:\[(\d+)\])?", entry[1])
    return [int(bits) // 8 * int(count or 1) for bits, count in declared]


def kernel(**options: Any) -> functools.partial[Kernel]:
    """Like `gluon.jit`, for kernels; functions that kernels call keep `gluon.jit`."""
    return functools.partial(Kernel, **options)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of SMs of the device, or of the MIG slice."""
    return torch.cuda.get_device_properties(device).multi_processor_count
