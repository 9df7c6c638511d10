"""Every kernel ends, with the same result, while other streams hold most of the GPU.

A hog kernel on another stream holds SMs: one program to an SM, with nearly all of its shared
memory. It ends when a third stream writes its flag, or after 10 s, so that no test can hang. A
kernel whose programs wait for each other without a bound would not end before the hog does.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8.kernels import hopper, permute
from titan_fp8.kernels.launch import multiprocessors
from titan_fp8.ops import OPS

HOG_LIMIT = 10 * 10**9
"""Nanoseconds after which the hog ends by itself."""
M, N, K, EXPERTS, TOP = 4096, 1024, 2048, 4, 2


@gluon.jit
def _nanoseconds():
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer; // $1", "=l,r", [gl.to_tensor(0)], gl.int64,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _pause():
    """Sleeps for about 0.6 us."""
    gl.inline_asm_elementwise(
        "nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(600)], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def hog_kernel(started, flag, out, LIMIT: gl.constexpr):
    """Holds 224 KiB of shared memory until the flag is set."""
    room = gl.allocate_shared_memory(
        gl.int32, [56, 1024], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    room.index(0).store(gl.full([1024], 1, gl.int32, lanes))
    gl.atomic_add(started, 1)
    end = _nanoseconds() + LIMIT
    # Threads may leave this loop one by one: nothing in it waits for the others of the program.
    while (gl.load(flag, volatile=True) == 0) & (_nanoseconds() < end):
        _pause()
    # The memory is the program's for as long as something is read from it.
    gl.store(out + gl.arange(0, 1024, lanes), room.index(0).load(lanes))


@contextlib.contextmanager
def hog(programs: int) -> Iterator[torch.cuda.Event]:
    """Holds that many SMs; yields the event of its end."""
    stream, control = torch.cuda.Stream(), torch.cuda.Stream()
    started, flag = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
    out = torch.empty(1024, dtype=torch.int32, device="cuda")
    one = torch.ones(1, dtype=torch.int32).pin_memory()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        hog_kernel[(programs,)](started, flag, out, HOG_LIMIT, num_warps=1)
        end = stream.record_event()
    try:
        # Copies need no SM.
        with torch.cuda.stream(control):
            while started.item() < programs:
                assert not end.query(), "the hog did not start on all of its SMs"
        yield end
    finally:
        with torch.cuda.stream(control):
            flag.copy_(one, non_blocking=True)
        torch.cuda.synchronize()


def run_beside(hog_end: torch.cuda.Event, op: Callable, stream: torch.cuda.Stream) -> tuple:
    """What `op` returns; fails unless it ended on its stream while the hog was running."""
    with torch.cuda.stream(stream):
        got = op()
        end = stream.record_event()
    deadline = time.monotonic() + 8
    while not end.query() and time.monotonic() < deadline:
        pass
    ended, hog_runs = end.query(), not hog_end.query()
    assert ended, "the op waits for SMs that the hog holds"
    assert hog_runs, "the hog ended too early to show anything"
    return got


def check(op: Callable, held: int) -> None:
    """`op` returns the same with `held` SMs held by the hog as alone."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        want = op()
        op()  # Leaves memory for the outputs below: allocating might wait for the hog.
    with hog(held) as hog_end:
        got = run_beside(hog_end, op, stream)
    for a, b in zip(_tensors(got), _tensors(want), strict=True):
        assert torch.equal(_bits(a), _bits(b))


def _tensors(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def quantizer_inputs(offs: Tensor | None) -> dict[str, tuple]:
    """Arguments of each quantizer: activations, gradients and weights."""
    x = normal(M, K)
    w = normal(N, K) if offs is None else normal(EXPERTS, N, K)
    return {
        "quantize_1x128": (x,),
        "quantize_128x1_t": (x, offs),
        "quantize_1x128_128x1_t": (x, offs),
        "quantize_128x128": (w,),
        "quantize_128x128_t": (w,),
        "quantize_row": (x,),
        "quantize_col_t": (x, offs),
        "quantize_row_col_t": (x, offs),
        "quantize_weight_col_t": (w,),
        "swiglu_1x128": (x, normal(M, K)),
        "swiglu_backward_1x128_128x1_t": (x, normal(M, K), normal(M, K), offs),
        "swiglu_dscores": (x, normal(M, K), normal(M, K), torch.rand(M, device="cuda"), True),
        "transpose_fp8": (w.to(torch.float8_e4m3fn),),
        "gather_1x128_128x1_t": (
            *hopper.quantize_1x128(x), torch.arange(-8, 1016).int().cuda(),
            torch.tensor([128, 128, 896]).int().cuda(),
        ),
    }  # fmt: skip


def gemm_inputs(offs: Tensor | None) -> dict[str, tuple]:
    """Arguments of each GEMM."""
    of = quantizer_inputs(offs)
    x, g, w = of["quantize_1x128"][0], normal(M, N), of["quantize_128x128"][0]
    fprop = (*hopper.quantize_1x128(x), *hopper.quantize_128x128(w))
    dgrad = (*hopper.quantize_1x128(g), *hopper.quantize_128x128_t(w))
    return {
        "blockwise_mm": (*fprop, offs),
        "blockwise_mm_pair": (*dgrad, *dgrad, offs),
        "blockwise_wgrad": (
            *hopper.quantize_128x1_t(g, offs), *hopper.quantize_128x1_t(x, offs), offs,
        ),
        "rowwise_mm": (*hopper.quantize_row(x), *hopper.quantize_row(w), offs),
        "rowwise_wgrad": (
            *hopper.quantize_col_t(g, offs), *hopper.quantize_col_t(x, offs), offs,
        ),
        "bf16_wgrad": (g, x, offs),
    }  # fmt: skip


def permutation_inputs() -> dict[str, tuple]:
    """Arguments of each kernel around the experts, with TOP experts for a token."""
    x, y = normal(M, K), normal(M * TOP, K)
    slots = torch.randperm(M * TOP, device="cuda").int()
    index, weight = slots.view(M, TOP), torch.rand(M, TOP, device="cuda")
    counts = torch.tensor([700, 0, 300, 41, 1, 555, 128, 1000], device="cuda")
    tokens = 2725
    return {
        "gather_rows": (x, slots, weight, TOP),
        "combine_rows": (y, index, weight),
        "dot_rows": (x, y, index),
        "places_of_tokens": (counts, EXPERTS, 2, tokens, 3328, 128),
    }


KERNELS = sorted(name for name, op in OPS.items() if op.is_fp8 and op.body is None)
GEMMS = [name for name in KERNELS if name.endswith(("_mm", "_mm_pair", "_wgrad"))]
QUANTIZERS = [name for name in KERNELS if name not in GEMMS]
each_layout = pytest.mark.parametrize("ends", [None, (1000, 1000, 2500, 4000)], ids=str)


def half_of_the_sms() -> int:
    return multiprocessors(torch.device("cuda", torch.cuda.current_device())) // 2


@each_layout
@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers(name, ends):
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32, device="cuda")
    args = quantizer_inputs(offs)[name]
    check(lambda: getattr(hopper, name)(*args), half_of_the_sms())


@each_layout
@pytest.mark.parametrize("name", GEMMS)
def test_gemms(name, ends):
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32, device="cuda")
    args = gemm_inputs(offs)[name]
    check(lambda: getattr(hopper, name)(*args), half_of_the_sms())


@pytest.mark.parametrize("name", ["gather_rows", "combine_rows", "dot_rows", "places_of_tokens"])
def test_permutation(name):
    args = permutation_inputs()[name]
    check(lambda: getattr(permute, name)(*args), half_of_the_sms())
