"""Launches: told apart by all that Triton compiles for, and what CUDA's driver then gets.

The driver is a stub, `stub_cuda.c`, which keeps what it is called with.
"""

import ctypes
import gc
import itertools
import struct
import subprocess
import sys
import weakref
from array import array
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from compile_utils import HOPPER, triton_compile
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import make_backend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import create_function_from_signature

from titan_fp8.kernels import launch
from titan_fp8.kernels.hopper.quantize_tile import tile_layout
from titan_fp8.kernels.launch import Box, Typed, for_triton


def shared(swizzle, bits, rank=2):
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


BOX, NARROW, VECTOR = shared(128, 8), shared(64, 8), shared(0, 32, rank=1)
TALL, WIDE = tile_layout((4, 1), (4, 8), (4, 1)), tile_layout((1, 4), (4, 8), (4, 1))


@launch.kernel(do_not_specialize=["n"])
def example(desc, vector, x, words, offs, m, big, n, FLAG: gl.constexpr, LAYOUT: gl.constexpr):
    pass


def tensor(rows=32, dtype=torch.float8_e4m3fn, first=0):
    return torch.zeros(first + rows * 128, dtype=torch.int8)[first:].view(dtype).view(-1, 128)


def box(x, box=(16, 128), layout=BOX):
    return Box(x, tuple(x.shape), x.stride(), box, layout)


def arguments(rows=32, **others) -> dict:
    """Arguments and options, which change with the rows only where Triton compiles the same."""
    x, s = tensor(rows), torch.zeros(rows * 4)
    values = {"desc": box(x), "vector": Box(s, (rows * 4,), (1,), (64,), VECTOR), "x": x}
    values |= {"words": Typed(x, torch.int32), "offs": None}
    values |= {"m": 16 * rows, "big": -rows - 7 - 2**40, "n": rows + 1}
    values |= {"FLAG": True, "LAYOUT": TALL, "num_warps": 4, "maxnreg": 168}
    return values | others


def start(values: dict, grid=(1,), positional=8) -> None:
    names = example.arg_names[:positional]
    rest = {name: value for name, value in values.items() if name not in names}
    example[grid](*(values[name] for name in names), **rest)


BIND = create_function_from_signature(example.signature, example.params, make_backend(HOPPER))


def compiled_for(values: dict) -> list:
    """What Triton compiles for of these arguments and options."""
    _, specialization, options = BIND(**{name: for_triton(v) for name, v in values.items()})
    return [specialization, options]


class Record(ctypes.Structure):
    """As `stub_cuda.c` has it."""

    _fields_ = [
        *[(name, ctypes.c_int) for name in ("launched", "encoded", "launches", "bytes")],
        *[(name, ctypes.c_uint64) for name in ("function", "stream")],
        *[(name, ctypes.c_uint32 * 3) for name in ("grid", "block")],
        ("shared", ctypes.c_uint32),
        ("parameters", ctypes.c_uint8 * 2048),
    ]


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    source = Path(__file__).parents[1] / "helpers" / "stub_cuda.c"
    library = str(tmp_path_factory.mktemp("stub") / "libcuda.so")
    include = [f"-I{folder}" for folder in nvidia.include_dirs]
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", *include, source, "-o", library], check=True)
    return library


@pytest.fixture
def cuda(stub, monkeypatch):
    """The stub: its record and its contexts, and which device and stream are current."""
    module = launch.native(stub)
    module.load_driver(stub)
    library = ctypes.CDLL(stub)
    library.cuCtxSetCurrent(None)
    record = Record.in_dll(library, "record")
    ctypes.memset(ctypes.addressof(record), 0, ctypes.sizeof(record))
    state = SimpleNamespace(module=module, library=library, record=record, device=0, stream=7000)
    monkeypatch.setattr(launch, "native", lambda: module)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: state.device, raising=False)
    stream = lambda device: state.stream + device  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream, raising=False)
    monkeypatch.setattr(example, "_launcher", None)
    return state


@pytest.fixture
def asked(cuda, monkeypatch):
    """The launches that went to Triton, as grid, arguments and the function it then made."""
    launches = []

    def run(self, *, grid, warmup, **values):
        assert not warmup
        launches.append(SimpleNamespace(grid=grid, values=values, function=array("q", [0])))
        return launches[-1]

    def plan(compiled, named):
        return array("q", [compiled.function.buffer_info()[0], 32, 0]).tobytes()

    monkeypatch.setattr(GluonJITFunction, "run", run)
    monkeypatch.setattr(launch, "plan", plan)
    return launches


@pytest.fixture
def compiled(cuda, monkeypatch):
    """The kernels that Triton compiled; `function` is the next one's, `change` is done to it."""
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


def test_triton_gets_what_it_takes(asked):
    values = arguments()
    start(values, grid=(2, 3))
    (first,) = asked
    got = first.values
    assert first.grid == (2, 3) and got.keys() == values.keys()
    for name in values.keys() - {"desc", "vector", "words"}:
        assert got[name] is values[name]
    assert got["words"].dtype == torch.int32
    assert got["words"].data_ptr() == values["x"].data_ptr()
    desc, given = got["desc"], values["desc"]
    assert desc.base is given.base and desc.layout is given.layout
    assert (desc.shape, desc.strides, desc.block_shape) == ([32, 128], [128, 1], [16, 128])


@pytest.mark.parametrize(
    "name, other",
    [
        ("desc", box(torch.zeros(16, 128, dtype=torch.float8_e4m3fn))),
        ("vector", Box(torch.zeros(99), (17,), (1,), (64,), VECTOR)),
        ("x", tensor(first=16)),
        ("words", torch.zeros(4, dtype=torch.int32)),
        ("words", Typed(torch.zeros(4, dtype=torch.int64), torch.int32)),
        ("m", 160),
        ("m", 0),
        ("m", -(2**31)),
        ("m", 2**31 - 16),
        ("big", 2**31 + 1),
        ("n", 2**31 - 1),
    ],
)
def test_what_triton_does_not_compile_for_is_the_same_kernel(cuda, asked, name, other):
    first, second = arguments(), arguments(**{name: other})
    assert compiled_for(first) == compiled_for(second)
    start(first)
    start(second)
    assert len(asked) == 1 and cuda.record.launches == 1


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
        ("words", Typed(tensor(), torch.int16)),
        ("words", Typed(tensor(first=8), torch.int32)),
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
def test_what_triton_compiles_for_is_another_kernel(cuda, asked, name, other, positional):
    first, second = arguments(), arguments(**{name: other})
    assert compiled_for(first) != compiled_for(second)
    for values in (first, second):
        start(values, positional=positional)
    assert len(asked) == 2 and not cuda.record.launches
    for values, launched in zip((first, second), asked, strict=True):
        start(values, positional=positional)
        assert cuda.record.function == launched.function.buffer_info()[0]
    assert len(asked) == 2 and cuda.record.launches == 2


def test_numbers_are_of_five_kinds(cuda, asked):
    kinds = [arguments(m=m) for m in (1, 47, 48, 2**31, 2**31 + 1)]
    traits = [compiled_for(values) for values in kinds]
    assert all(traits.count(of_kind) == 1 for of_kind in traits)
    for values in [*kinds, *kinds]:
        start(values)
    assert len(asked) == cuda.record.launches == 5


def test_options_go_by_their_names(cuda, asked):
    for option in ("num_warps", "num_stages", "num_warps"):
        values = arguments()
        del values["num_warps"]
        start(values | {option: 8})
    assert len(asked) == 2 and cuda.record.launches == 1


def test_a_kernel_is_compiled_for_each_device(cuda, asked):
    for device in (0, 1, 0, 1):
        cuda.device = device
        start(arguments())
    assert len(asked) == 2 and cuda.record.launches == 2
    assert cuda.record.function == asked[1].function.buffer_info()[0]
    assert cuda.record.stream == 7001


def i32(number) -> bytes:
    return struct.pack("=i", number)


def i64(number) -> bytes:
    return struct.pack("=q", number)


def padded(numbers, length) -> list:
    return [*numbers, *[0] * (length - len(numbers))]


def of_box(desc: Box, kind: int, swizzle: int) -> list[bytes]:
    """A Box's parameters, where the map is of a type and a swizzle of TMA's."""
    rank = len(desc.shape)
    steps = [desc.base.itemsize * stride for stride in desc.strides[-2::-1]]
    made = struct.pack(
        "=Q5Q4Q5I5I6B2x",
        desc.base.data_ptr(),
        *padded(desc.shape[::-1], 5),
        *padded(steps, 4),
        *padded(desc.box[::-1], 5),
        *padded([1] * rank, 5),
        *(kind, rank, 0, swizzle, 2, 0),
    )
    return [made, *map(i32, desc.shape), *map(i64, desc.strides)]


def of_launch(values: dict, kind: int, swizzle: int) -> list[bytes]:
    """The kernel's parameters: none for None or what is 1, two for scratch memory."""
    return [
        *of_box(values["desc"], kind, swizzle),
        *of_box(values["vector"], 7, 0),
        i64(values["x"].data_ptr()),
        i64(values["words"].base.data_ptr()),
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
    cuda, compiled, dtype, kind, layout, swizzle, ints, others
):
    def launched(rows, ints):
        x = torch.zeros(3, rows, 256, dtype=dtype)[:, 1:, :240]
        desc = box(x, (2, 16, layout.swizzle_byte_width // dtype.itemsize), layout)
        values = arguments(rows, desc=desc, num_warps=8, **ints)
        want = of_launch(values, kind, swizzle)
        compiled.function = compiled.function or array("q", [len(want), *map(len, want)])
        start(values, grid=(5, 6, 7))
        return b"".join(want)

    compiled.change = replaced(shared=1000)
    launched(32, ints)
    assert not cuda.record.launches
    want = launched(48, others)
    record = cuda.record
    assert len(compiled.kernels) == record.launches == 1
    assert bytes(record.parameters[: record.bytes]) == want
    assert record.function == compiled.function.buffer_info()[0]
    assert tuple(record.grid) == (5, 6, 7) and tuple(record.block) == (256, 1, 1)
    assert (record.shared, record.stream) == (1000, 7000)


@pytest.mark.parametrize("grid", [(5,), (5, 6)])
def test_a_grid_has_up_to_three_dimensions(cuda, asked, grid):
    for _ in range(2):
        start(arguments(), grid)
    assert tuple(cuda.record.grid) == (*grid, 1, 1)[:3]


@pytest.mark.parametrize("grid", [(0,), (5, 0), (5, 6, 0)])
def test_nothing_is_launched_on_no_grid(cuda, asked, grid):
    start(arguments())
    start(arguments(), grid)
    assert len(asked) == 1 and not cuda.record.launches


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
def test_launches_that_are_not_known_are_left_to_triton(cuda, compiled, caplog, change, others):
    compiled.change = change
    for _ in range(3):
        start(arguments(**others))
    assert len(compiled.kernels) == 3 and not cuda.record.launches
    assert "parameters to example" in caplog.text


def test_one_warning_says_that_launches_are_not_known(cuda, compiled, caplog):
    compiled.change = replaced(num_ctas=2)
    for _ in range(3):
        start(arguments())
    assert caplog.text.count("parameters to example") == 1


@pytest.mark.parametrize(
    "call, code, message",
    [
        ("launched", 1, "titan_fp8: a launch: invalid argument"),
        ("launched", 719, "titan_fp8: a launch: unknown error"),
        ("encoded", 1, "titan_fp8: a tensor for TMA: invalid argument"),
    ],
)
def test_an_error_of_the_driver_is_named(cuda, compiled, call, code, message):
    start(arguments())
    setattr(cuda.record, call, code)
    with pytest.raises(RuntimeError, match=message):
        start(arguments())
    assert not cuda.record.launches
    setattr(cuda.record, call, 0)
    start(arguments())
    assert cuda.record.launches == len(compiled.kernels) == 1


@pytest.mark.parametrize(
    "driver, message", [("no_such_driver.so", "no_such_driver.so"), ("libm.so.6", "libm.so.6")]
)
def test_a_driver_that_does_not_load_is_named(cuda, driver, message):
    with pytest.raises(RuntimeError, match=f"titan_fp8: CUDA's driver: .*{message}"):
        cuda.module.load_driver(driver)


@pytest.mark.parametrize("given, used", [(None, 1003), (7, 7)])
def test_a_thread_without_a_context_gets_the_devices_own(cuda, asked, given, used):
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
def test_other_grids_are_refused(cuda, asked, grid):
    start(arguments())
    with pytest.raises(TypeError):
        start(arguments(), grid)
    assert len(asked) == 1 and not cuda.record.launches


def test_too_many_arguments_are_refused(cuda, asked):
    values = arguments()
    with pytest.raises(TypeError, match="too many arguments"):
        example[(1,)](*(values[name] for name in example.arg_names), 1)
    with pytest.raises(OverflowError):
        start(arguments(big=2**63))
    with pytest.raises(OverflowError, match=r"2\^31 - 1 programs"):
        start(arguments(), grid=(2**31,))
    assert not asked and not cuda.record.launches


def test_what_is_no_constant_comes_by_position(cuda, asked):
    with pytest.raises(TypeError, match="example: big, n must be given by position"):
        start(arguments(), positional=6)
    assert not asked and not cuda.record.launches


def test_a_box_is_of_one_rank(cuda, asked):
    for desc in (box(tensor())._replace(strides=(1,)), box(tensor())._replace(shape=[32, 128])):
        with pytest.raises(TypeError, match="three tuples of one length"):
            start(arguments(desc=desc))
    assert not asked and not cuda.record.launches


def test_no_tensor_is_kept_alive(cuda, compiled):
    values = arguments(offs=torch.zeros(4, dtype=torch.int32))
    start(values)
    start(values)
    assert cuda.record.launches == 1
    tensors = [values[name] for name in ("x", "offs")]
    tensors += [values[name].base for name in ("desc", "vector", "words")]
    kept = [weakref.ref(x) for x in tensors]
    del values, tensors
    compiled.kernels.clear()
    gc.collect()
    assert not any(ref() is not None for ref in kept)


@pytest.mark.parametrize("positional", [8, 10])
def test_what_is_told_apart_by_its_address_stays(cuda, asked, positional):
    """Another layout could lie where one was, and be taken for it."""
    values = arguments(desc=box(tensor(), layout=shared(32, 8)), LAYOUT=shared(32, 16))
    start(values, positional=positional)
    kept = [weakref.ref(value) for value in (values["desc"].layout, values["LAYOUT"])]
    del values
    asked.clear()
    gc.collect()
    assert [ref() is not None for ref in kept] == [True, True]


@pytest.mark.parametrize(
    "known, fails", [(True, ""), (True, "launched"), (True, "encoded"), (False, "")]
)
def test_launches_leave_nothing_behind(cuda, compiled, monkeypatch, known, fails):
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

    # What launches leave grows in each round; what else the process keeps, in some at most.
    for of_one in zip(*[launched() for _ in range(4)], strict=True):
        assert min(now - then for then, now in itertools.pairwise(of_one)) < 100
