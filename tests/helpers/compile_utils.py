"""Compiles kernels for Hopper without a GPU, and reads what ptxas made of them.

Triton compiles to a cubin for the target sm_90a without a device. The cuobjdump in its wheel reads
registers and local memory from the cubin. `compile_launch` takes the arguments of a launch, so that
a test compiles what would run. Tensors may be on the CPU: their values are not read, so even those
of production size cost nothing if nobody writes to them.

Tests share cubins through Triton's cache on disk. To disassemble one takes longer than to compile
most kernels, so a cubin is disassembled only when a test reads its SASS, and once. The PTX tells
what Triton alone decides, as the width of an access, at no cost.
"""

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from titan_fp8.kernels.launch import for_triton, plan

OLDEST = re.findall(r"oldest=([\d.]+)", (Path(__file__).parents[2] / "scripts/test.sh").read_text())
HOPPER = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

needs_cuobjdump = pytest.mark.skipif(
    not CUOBJDUMP.exists(), reason=f"no cuobjdump at {CUOBJDUMP}: registers cannot be read"
)


def cases(*every: Any) -> tuple[Any, ...]:
    """What a test compiles with the oldest supported Triton, and the first of it with a newer one.

    The oldest is the one that spills registers. A newer one shows that it compiles each kernel.
    """
    return every if triton.__version__ in OLDEST else every[:1]


@dataclass(frozen=True)
class Compiled:
    """A kernel: registers and spilled bytes per thread, shared bytes per program, code."""

    name: str
    registers: int
    spills: int
    shared: int
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)

    def wide(self, access: str) -> int:
        """The accesses to global memory, "ld" or "st", of 16 bytes per thread."""
        return len(re.findall(rf"{access}\.global\S*\.v(4\.b32|2\.b64)", self.ptx))

    @property
    def sass(self) -> str:
        return _cuobjdump("--dump-sass", self.cubin)

    def __str__(self) -> str:
        costs = f"{self.registers} registers, {self.spills} B spilled, {self.shared} B shared"
        return f"{self.name}: {costs}"


def triton_compile(kernel: Callable, args: tuple = (), **kwargs) -> CompiledKernel:
    """Compiles with Triton what `kernel[grid](*args, **kwargs)` would run on a Hopper GPU."""
    backend = make_backend(HOPPER)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*map(for_triton, args), debug=False, **kwargs)
    options, signature, constexprs, attrs = kernel._pack_args(
        backend, kwargs, bound, specialization, options
    )
    return triton.compile(
        GluonASTSource(kernel, signature, constexprs, attrs),
        target=HOPPER,
        options=options.__dict__,
    )


def compile_launch(kernel: Callable, args: tuple = (), **kwargs) -> Compiled:
    """The cost of what `kernel[grid](*args, **kwargs)` would run on a Hopper GPU."""
    built = triton_compile(kernel, args, **kwargs)
    built.function = 0
    assert plan(built, dict(zip(kernel.arg_names, args)) | kwargs), "launches are left to Triton"
    return _measure(built)


class Compiler:
    """Replaces a kernel while an op is called on CPU tensors: a launch compiles instead."""

    def __init__(self, kernel, compiled: list):
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.compiled.append(
            compile_launch(self.kernel, args, **kwargs)
        )


def _measure(built: CompiledKernel) -> Compiled:
    cubin = built.asm["cubin"]
    usage = _cuobjdump("--dump-resource-usage", cubin)
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    spills = int(re.search(r"STACK:(\d+)", usage)[1]) + int(re.search(r"LOCAL:(\d+)", usage)[1])
    name, shared = built.metadata.name, built.metadata.shared
    return Compiled(name, registers, spills, shared, cubin, built.asm["ptx"])


@functools.cache
def _cuobjdump(flag: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [CUOBJDUMP, flag, file.name], check=True, capture_output=True, text=True
        ).stdout
