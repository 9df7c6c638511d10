"""Launches share a compiled kernel exactly if Triton compiles the same for their arguments."""

import math

import pytest
import torch
from compile_utils import HOPPER
from launch_utils import NARROW, VECTOR, WIDE, arguments, box, example, start, tensor
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from titan_fp8.kernels.launch import TensorMap, for_triton

BIND = create_function_from_signature(example.signature, example.params, make_backend(HOPPER))


def specialization(values: dict) -> list:
    """The properties of arguments and options that Triton specializes on."""
    _, specialization, options = BIND(**{name: for_triton(v) for name, v in values.items()})
    return [specialization, options]


def test_the_first_launch_passes_its_arguments_to_triton(triton_launches):
    values = arguments()
    start(values, grid=(2, 3))
    (first,) = triton_launches
    got = first.values
    assert first.grid == (2, 3) and got.keys() == values.keys()
    for name in values.keys() - {"desc", "vector", "words"}:
        assert got[name] is values[name]
    assert got["words"].dtype == torch.int32
    assert got["words"].data_ptr() == values["x"].data_ptr()
    desc, (base, seen_as) = got["desc"], values["desc"]
    assert desc.base is base and desc.layout is seen_as.layout
    assert (desc.shape, desc.strides, desc.block_shape) == ([32, 128], [128, 1], [16, 128])


@pytest.mark.parametrize(
    "name, other",
    [
        ("desc", box(torch.zeros(16, 128, dtype=torch.float8_e4m3fn))),
        ("vector", (torch.zeros(99), TensorMap((17,), (1,), (64,), VECTOR))),
        ("x", tensor(first=16)),
        ("words", torch.zeros(4, dtype=torch.int32)),
        ("words", (torch.zeros(4, dtype=torch.int64), torch.int32)),
        ("m", 160),
        ("m", 0),
        ("m", -(2**31)),
        ("m", 2**31 - 16),
        ("big", 2**31 + 1),
        ("n", 2**31 - 1),
    ],
)
def test_arguments_that_share_a_kernel(cuda, triton_launches, name, other):
    first, second = arguments(), arguments(**{name: other})
    assert specialization(first) == specialization(second)
    start(first)
    start(second)
    assert len(triton_launches) == 1 and cuda.record.launches == 1


@pytest.mark.parametrize("positional", [8, 10])
@pytest.mark.parametrize(
    "name, other",
    [
        ("desc", box(tensor(dtype=torch.int8))),
        ("desc", box(tensor(), box=(32, 128))),
        ("desc", box(tensor(), layout=NARROW)),
        ("x", tensor(dtype=torch.int8)),
        ("x", tensor(first=8)),
        ("x", None),
        ("words", (tensor(), torch.int16)),
        ("words", (tensor(first=8), torch.int32)),
        ("words", None),
        ("offs", torch.zeros(4, dtype=torch.int32)),
        ("m", 1),
        ("m", 47),
        ("m", -1),
        ("m", 2**31),
        ("m", -(2**31) - 16),
        ("big", 2**31),
        ("big", 2**31 - 1),
        ("n", 2**31 + 1),
        ("FLAG", False),
        ("FLAG", None),
        ("FLAG", 2),
        ("LAYOUT", WIDE),
        ("num_warps", 8),
        ("maxnreg", 128),
    ],
)
def test_arguments_that_need_another_kernel(cuda, triton_launches, name, other, positional):
    first, second = arguments(), arguments(**{name: other})
    assert specialization(first) != specialization(second)
    for values in (first, second):
        start(values, positional=positional)
    assert len(triton_launches) == 2 and not cuda.record.launches
    for values, launched in zip((first, second), triton_launches, strict=True):
        start(values, positional=positional)
        assert cuda.record.function == launched.function.buffer_info()[0]
    assert len(triton_launches) == 2 and cuda.record.launches == 2


def test_numbers_have_five_specializations(cuda, triton_launches):
    kinds = [arguments(m=m) for m in (1, 47, 48, 2**31, 2**31 + 1)]
    traits = [specialization(values) for values in kinds]
    assert all(traits.count(of_kind) == 1 for of_kind in traits)
    for values in [*kinds, *kinds]:
        start(values)
    assert len(triton_launches) == cuda.record.launches == 5


def test_floats_are_known_by_value(cuda, triton_launches):
    different = [1, 1.0, True, 0.0, -0.0, math.nan]
    for number in [*different, float("1"), float("nan"), float("-0")]:
        start(arguments(FLAG=number))
    assert (len(triton_launches), cuda.record.launches) == (len(different), 3)


def test_options_differ_by_name(cuda, triton_launches):
    for option in ("num_warps", "num_stages", "num_warps"):
        values = arguments()
        del values["num_warps"]
        start(values | {option: 8})
    assert len(triton_launches) == 2 and cuda.record.launches == 1


def test_a_kernel_is_compiled_for_each_device(cuda, triton_launches):
    for device in (0, 1, 0, 1):
        cuda.device = device
        start(arguments())
    assert len(triton_launches) == 2 and cuda.record.launches == 2
    assert cuda.record.function == triton_launches[1].function.buffer_info()[0]
    assert cuda.record.stream == 7001
