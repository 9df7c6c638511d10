"""A kernel's launches are told apart by all that Triton compiles for."""

from types import SimpleNamespace

import pytest
import torch
from compile_utils import HOPPER
from triton.compiler.compiler import make_backend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import create_function_from_signature

from titan_fp8.kernels import launch
from titan_fp8.kernels.tile import layout

BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
NARROW = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
TALL, WIDE = layout((4, 1), (4, 8), (4, 1)), layout((1, 4), (4, 8), (4, 1))


@launch.kernel(do_not_specialize=["n"])
def example(desc, x, offs, m, n, FLAG: gl.constexpr, LAYOUT: gl.constexpr):
    pass


def tensor(rows=32, dtype=torch.float8_e4m3fn, first=0):
    return torch.zeros(first + rows * 128, dtype=torch.int8)[first:].view(dtype).view(-1, 128)


def described(x, box=(16, 128), layout=BOX):
    return launch.descriptor(x, x.shape, x.stride(), box, layout)


BIND = create_function_from_signature(example.signature, example.params, make_backend(HOPPER))


def compiled_for(arguments: dict) -> list:
    """What Triton compiles for of these arguments and options."""
    _, specialization, options = BIND(**arguments)
    return [specialization, options]


@pytest.fixture
def launches(monkeypatch):
    """What was compiled and what was launched again, as positional arguments and grid."""
    compiled, again = [], []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *args: again.append((grid, args))

    def run(self, *args, grid, warmup, **options):
        compiled.append((grid, args, options))
        return Compiled()

    monkeypatch.setattr(GluonJITFunction, "run", run)
    monkeypatch.setattr(example, "_launches", {})
    device = SimpleNamespace(get_current_device=lambda: 0)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=device))
    return compiled, again


def test_a_second_launch_goes_to_the_same_kernel(launches):
    compiled, again = launches
    for rows, m in ((32, 48), (64, 160)):
        x = tensor(rows)
        args = (described(x), x, None, m, rows, True, TALL)
        example[(rows,)](*args[:-1], LAYOUT=TALL, num_warps=4)
    assert compiled == [((32,), compiled[0][1], {"num_warps": 4})] and compiled[0][1][-1] is TALL
    ((grid, got),) = again
    assert grid == (64, 1, 1) and len(got) == 7
    assert all(a is b for a, b in zip(got, args, strict=True))


@pytest.mark.parametrize(
    "name, other",
    [
        ("x", tensor(dtype=torch.int8)),
        ("x", tensor(first=8, dtype=torch.int8).view(torch.float8_e4m3fn)),
        ("desc", described(torch.zeros(32, 128, dtype=torch.bfloat16))),
        ("desc", described(tensor(), box=(32, 128))),
        ("desc", described(tensor(), layout=NARROW)),
        ("offs", torch.zeros(4, dtype=torch.int32)),
        ("m", 1),
        ("m", 47),
        ("m", 2**31),
        ("n", 2**31),
        ("FLAG", False),
        ("LAYOUT", WIDE),
        ("num_warps", 8),
        ("maxnreg", 128),
    ],
)
def test_what_triton_compiles_for_is_another_kernel(launches, name, other):
    compiled, again = launches
    x = tensor()
    first = {"desc": described(x), "x": x, "offs": None, "m": 48, "n": 7, "FLAG": True}
    first |= {"LAYOUT": TALL, "num_warps": 4, "maxnreg": 168}
    second = {**first, name: other}
    assert compiled_for(first) != compiled_for(second)
    for arguments in (first, second):
        example[(1,)](**arguments)
    assert len(compiled) == 2 and not again


def test_a_kernel_is_compiled_for_each_device(launches, monkeypatch):
    compiled, again = launches
    for device in (0, 1, 0):
        monkeypatch.setattr(launch.driver.active, "get_current_device", lambda at=device: at)
        example[(1,)](described(x := tensor()), x, None, 48, 7, True, TALL, num_warps=4)
    assert len(compiled) == 2 and len(again) == 1


def test_no_tensor_is_kept_alive(launches):
    x = tensor()
    example[(1,)](described(x), x, None, 48, 7, True, TALL, num_warps=4)
    ((_, kept),) = example._launches.values()
    assert not any(isinstance(value, torch.Tensor) for value in kept)
