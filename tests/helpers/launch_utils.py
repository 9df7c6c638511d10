"""A kernel to launch in tests, its arguments, and what the stub driver records."""

import ctypes

import torch
from triton.experimental.gluon import language as gl

from titan_fp8.kernels import launch
from titan_fp8.kernels.hopper.quantize_tile import tile_layout
from titan_fp8.kernels.launch import TensorMap


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
    return x, TensorMap(tuple(x.shape), x.stride(), box, layout)


def arguments(rows=32, **others) -> dict:
    """Arguments and options of `example`; Triton compiles the same for any `rows`."""
    x, s = tensor(rows), torch.zeros(rows * 4)
    values = {"desc": box(x), "vector": (s, TensorMap((rows * 4,), (1,), (64,), VECTOR)), "x": x}
    values |= {"words": (x, torch.int32), "offs": None}
    values |= {"m": 16 * rows, "big": -rows - 7 - 2**40, "n": rows + 1}
    values |= {"FLAG": True, "LAYOUT": TALL, "num_warps": 4, "maxnreg": 168}
    return values | others


def start(values: dict, grid=(1,), positional=8) -> None:
    """Launches `example`, with the first `positional` arguments by position."""
    names = example.arg_names[:positional]
    rest = {name: value for name, value in values.items() if name not in names}
    example[grid](*(values[name] for name in names), **rest)


class Record(ctypes.Structure):
    """The struct `record` of `stub_cuda.c`."""

    _fields_ = [
        *[(name, ctypes.c_int) for name in ("launched", "encoded", "launches", "bytes")],
        *[(name, ctypes.c_uint64) for name in ("function", "stream")],
        *[(name, ctypes.c_uint32 * 3) for name in ("grid", "block")],
        ("shared", ctypes.c_uint32),
        ("parameters", ctypes.c_uint8 * 2048),
    ]
