"""Fixtures of the launch tests: a stub of the CUDA driver, and Triton's part of a launch."""

import ctypes
import subprocess
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compile_utils import triton_compile
from launch_utils import Record, example
from triton.backends.nvidia import driver as nvidia
from triton.experimental.gluon._runtime import GluonJITFunction

from titan_fp8.kernels import launch


@pytest.fixture(scope="session")
def stub(tmp_path_factory):
    source = Path(__file__).parents[1] / "helpers" / "stub_cuda.c"
    library = str(tmp_path_factory.mktemp("stub") / "libcuda.so")
    include = [f"-I{folder}" for folder in nvidia.include_dirs]
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", *include, source, "-o", library], check=True)
    return library


@pytest.fixture
def cuda(stub, monkeypatch):
    """The stub driver: its record, its contexts, and the current device and stream."""
    stream = lambda device: state.stream + device  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: state.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream, raising=False)
    module = launch.native(stub)
    library = ctypes.CDLL(stub)
    library.cuCtxSetCurrent(None)
    record = Record.in_dll(library, "record")
    ctypes.memset(ctypes.addressof(record), 0, ctypes.sizeof(record))
    state = SimpleNamespace(module=module, library=library, record=record, device=0, stream=7000)
    monkeypatch.setattr(launch, "native", lambda: module)
    monkeypatch.setattr(example, "_plans", {})
    return state


@pytest.fixture
def triton_launches(cuda, monkeypatch):
    """The launches that went to Triton: grid, arguments, and the function that it compiled."""
    launches = []

    def run(self, *, grid, warmup, **values):
        assert not warmup
        launches.append(SimpleNamespace(grid=grid, values=values, function=array("q", [0])))
        return launches[-1]

    def plan(compiled, named):
        return (
            bytes(launch.NAME_BYTES)
            + array("q", [compiled.function.buffer_info()[0], 32, 0]).tobytes()
        )

    monkeypatch.setattr(GluonJITFunction, "run", run)
    monkeypatch.setattr(launch, "plan", plan)
    return launches


@pytest.fixture
def compilations(cuda, monkeypatch):
    """The kernels that Triton compiled. The next one gets `function` and is changed by `change`."""
    state = SimpleNamespace(kernels=[], function=None, change=lambda kernel: None)

    def run(self, *, grid, warmup, **values):
        kernel = triton_compile(self, **values)
        state.function = state.function or array("q", [0])
        kernel.function = state.function.buffer_info()[0]
        state.change(kernel)
        state.kernels.append(kernel)
        return kernel

    monkeypatch.setattr(GluonJITFunction, "run", run)
    return state
