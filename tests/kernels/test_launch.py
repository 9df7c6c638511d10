"""Launches pass the CUDA driver what the kernel takes, report its errors, and keep no tensor alive.

The driver is a stub, `stub_cuda.c`, which records its arguments.
"""

import ctypes
import gc
import itertools
import struct
import sys
import weakref
from array import array
from contextlib import suppress
from threading import Thread

import pytest
import torch
from launch_utils import arguments, box, example, shared, start, tensor
from triton.experimental.gluon._runtime import GluonJITFunction


def i32(number) -> bytes:
    return struct.pack("=i", number)


def i64(number) -> bytes:
    return struct.pack("=q", number)


def padded(numbers, length) -> list:
    return [*numbers, *[0] * (length - len(numbers))]


def box_parameters(pair: tuple, kind: int, swizzle: int) -> list[bytes]:
    """The kernel parameters of (tensor, TensorMap); `kind` and `swizzle` are the driver's."""
    base, desc = pair
    rank = len(desc.shape)
    steps = [base.itemsize * stride for stride in desc.strides[-2::-1]]
    made = struct.pack(
        "=Q5Q4Q5I5I6B2x",
        base.data_ptr(),
        *padded(desc.shape[::-1], 5),
        *padded(steps, 4),
        *padded(desc.box[::-1], 5),
        *padded([1] * rank, 5),
        *(kind, rank, 0, swizzle, 2, 0),
    )
    return [made, *map(i32, desc.shape), *map(i64, desc.strides)]


def launch_parameters(values: dict, kind: int, swizzle: int) -> list[bytes]:
    """All kernel parameters. None and 1 have none; the last two are for scratch memory."""
    return [
        *box_parameters(values["desc"], kind, swizzle),
        *box_parameters(values["vector"], 7, 0),
        i64(values["x"].data_ptr()),
        i64(values["words"][0].data_ptr()),
        *([] if values["m"] == 1 else [i32(values["m"])]),
        i64(values["big"]),
        i32(values["n"]),
        *[i64(0), i64(0)],
    ]


def without_ptx(kernel):
    del kernel.asm["ptx"]


def replaced(**metadata):
    def change(kernel):
        kernel.metadata = kernel.metadata._replace(**metadata)

    return change


@pytest.mark.parametrize(
    "ints, others",
    [
        ({"m": -48, "n": 1, "big": -(2**40)}, {"m": -(2**31), "n": 1, "big": -(2**63)}),
        ({"m": 1, "n": -7, "big": 2**31}, {"m": 1, "n": 1 - 2**31, "big": 2**63 - 16}),
        ({"m": 47, "n": 7, "big": 2**31 + 1}, {"m": 2**31 - 1, "n": 2, "big": 2**63 - 1}),
    ],
)
@pytest.mark.parametrize(
    "dtype, kind, layout, swizzle",
    [
        (torch.float8_e4m3fn, 0, shared(128, 8, rank=3), 3),
        (torch.bfloat16, 9, shared(64, 16, rank=3), 2),
        (torch.float32, 7, shared(32, 32, rank=3), 1),
    ],
)
def test_the_driver_gets_what_the_kernel_takes(
    cuda, compilations, dtype, kind, layout, swizzle, ints, others
):
    def launched(rows, ints):
        x = torch.zeros(3, rows, 256, dtype=dtype)[:, 1:, :240]
        desc = box(x, (2, 16, layout.swizzle_byte_width // dtype.itemsize), layout)
        values = arguments(rows, desc=desc, num_warps=8, **ints)
        want = launch_parameters(values, kind, swizzle)
        compilations.function = compilations.function or array("q", [len(want), *map(len, want)])
        start(values, grid=(5, 6, 7))
        return b"".join(want)

    compilations.change = replaced(shared=1000)
    launched(32, ints)
    assert not cuda.record.launches
    want = launched(48, others)
    record = cuda.record
    assert len(compilations.kernels) == record.launches == 1
    assert bytes(record.parameters[: record.bytes]) == want
    assert record.function == compilations.function.buffer_info()[0]
    assert tuple(record.grid) == (5, 6, 7) and tuple(record.block) == (256, 1, 1)
    assert (record.shared, record.stream) == (1000, 7000)


@pytest.mark.parametrize("grid", [(5,), (5, 6)])
def test_a_grid_has_up_to_three_dimensions(cuda, triton_launches, grid):
    for _ in range(2):
        start(arguments(), grid)
    assert tuple(cuda.record.grid) == (*grid, 1, 1)[:3]


@pytest.mark.parametrize("grid", [(0,), (5, 0), (5, 6, 0)])
def test_an_empty_grid_launches_nothing(cuda, triton_launches, grid):
    start(arguments())
    start(arguments(), grid)
    assert len(triton_launches) == 1 and not cuda.record.launches


def without_a_parameter(kernel):
    kernel.asm["ptx"] = kernel.asm["ptx"].replace(".param .u64 .ptr .global .align 1", "//", 1)


def with_a_wider_number(kernel):
    kernel.asm["ptx"] = kernel.asm["ptx"].replace(".param .u32", ".param .u64", 1)


@pytest.mark.parametrize(
    "change, others",
    [
        (without_a_parameter, {}),
        (with_a_wider_number, {}),
        (without_ptx, {}),
        (replaced(tensordesc_meta=None), {}),
        (replaced(global_scratch_size=16), {}),
        (replaced(profile_scratch_size=16), {}),
        (replaced(launch_cooperative_grid=True), {}),
        (replaced(launch_pdl=True), {}),
        (replaced(num_ctas=2), {}),
        (lambda kernel: None, {"m": True}),
    ],
)
def test_triton_launches_unknown_kernels(cuda, compilations, caplog, change, others):
    compilations.change = change
    for _ in range(3):
        start(arguments(**others))
    assert len(compilations.kernels) == 3 and not cuda.record.launches
    assert "parameters to example" in caplog.text


def test_unknown_parameters_warn_once(cuda, compilations, caplog):
    compilations.change = replaced(num_ctas=2)
    for _ in range(3):
        start(arguments())
    assert caplog.text.count("parameters to example") == 1


@pytest.mark.parametrize(
    "call, code, message",
    [
        ("launched", 1, "titan_fp8: launching example failed: invalid argument"),
        ("launched", 719, "titan_fp8: launching example failed: unknown error"),
        ("encoded", 1, "titan_fp8: encoding a tensor map of example failed: invalid argument"),
    ],
)
def test_an_error_of_the_driver_is_named(cuda, compilations, call, code, message):
    start(arguments())
    setattr(cuda.record, call, code)
    with pytest.raises(RuntimeError, match=message):
        start(arguments())
    assert not cuda.record.launches
    setattr(cuda.record, call, 0)
    start(arguments())
    assert cuda.record.launches == len(compilations.kernels) == 1


@pytest.mark.parametrize("given, used", [(None, 1003), (7, 7)])
def test_a_thread_without_a_context_gets_the_primary_context(cuda, triton_launches, given, used):
    cuda.device = 3
    contexts, current = [], ctypes.c_void_p()

    def of_thread():
        cuda.library.cuCtxSetCurrent(ctypes.c_void_p(given))
        start(arguments())
        start(arguments())
        cuda.library.cuCtxGetCurrent(ctypes.byref(current))
        contexts.append(current.value)

    thread = Thread(target=of_thread)
    thread.start()
    thread.join()
    assert contexts == [used] and cuda.record.launches == 1
    cuda.library.cuCtxGetCurrent(ctypes.byref(current))
    assert current.value is None


@pytest.mark.parametrize("grid", [(), (1, 1, 1, 1), [1], 1, None, (1.0,), ("1",)], ids=repr)
def test_other_grids_are_refused(cuda, triton_launches, grid):
    start(arguments())
    with pytest.raises((TypeError, SystemError)):
        start(arguments(), grid)
    assert len(triton_launches) == 1 and not cuda.record.launches


def test_too_many_arguments_are_refused(cuda, triton_launches):
    values = arguments()
    with pytest.raises(TypeError, match="too many arguments"):
        example[(1,)](*(values[name] for name in example.arg_names), 1)
    with pytest.raises(OverflowError):
        start(arguments(big=2**63))
    with pytest.raises(OverflowError):
        start(arguments(), grid=(2**31,))
    assert not triton_launches and not cuda.record.launches


def test_only_constexprs_may_be_keywords(cuda, triton_launches):
    with pytest.raises(TypeError, match="example: big, n must be given by position"):
        start(arguments(), positional=6)
    assert not triton_launches and not cuda.record.launches


def test_a_tensor_map_has_one_rank(cuda, triton_launches):
    base, seen_as = box(tensor())
    for bad in (seen_as._replace(strides=(1,)), seen_as._replace(shape=[32, 128])):
        with pytest.raises(TypeError, match="shape, strides and box of one length"):
            start(arguments(desc=(base, bad)))
    assert not triton_launches and not cuda.record.launches


def test_no_tensor_is_kept_alive(cuda, compilations):
    values = arguments(offs=torch.zeros(4, dtype=torch.int32))
    start(values)
    start(values)
    assert cuda.record.launches == 1
    tensors = [values[name] for name in ("x", "offs")]
    tensors += [values[name][0] for name in ("desc", "vector", "words")]
    kept = [weakref.ref(x) for x in tensors]
    del values, tensors
    compilations.kernels.clear()
    gc.collect()
    assert not any(ref() is not None for ref in kept)


@pytest.mark.parametrize("positional", [8, 10])
def test_layouts_stay_alive(cuda, triton_launches, positional):
    """Keys contain their addresses, which a later layout must not get."""
    values = arguments(desc=box(tensor(), layout=shared(32, 8)), LAYOUT=shared(32, 16))
    start(values, positional=positional)
    kept = [weakref.ref(value) for value in (values["desc"][1].layout, values["LAYOUT"])]
    del values
    triton_launches.clear()
    gc.collect()
    assert [ref() is not None for ref in kept] == [True, True]


@pytest.mark.parametrize(
    "known, fails", [(True, ""), (True, "launched"), (True, "encoded"), (False, "")]
)
def test_launches_leak_nothing(cuda, compilations, monkeypatch, known, fails):
    values, grid = arguments(offs=torch.zeros(4, dtype=torch.int32)), (10**6, 1, 1)
    cuda.device, cuda.stream = 12345, 2**50
    if not known:
        monkeypatch.setattr(GluonJITFunction, "run", lambda self, **rest: None)
    start(values, grid)
    if fails:
        setattr(cuda.record, fails, 1)
    watched = [*values.values(), *values, grid, *grid, cuda.device, cuda.stream, torch.int32]
    watched += [part for name in ("desc", "vector", "words") for part in values[name]]

    def launched():
        for _ in range(1000):
            with suppress(RuntimeError):
                start(values, grid)
        gc.collect()
        return sys.getallocatedblocks(), *map(sys.getrefcount, watched)

    # A leak grows in every round; other growth of the process does not.
    for of_one in zip(*[launched() for _ in range(4)], strict=True):
        assert min(now - then for then, now in itertools.pairwise(of_one)) < 100
