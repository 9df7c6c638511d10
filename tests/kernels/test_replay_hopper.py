"""Replays of products launch on the Hopper kernels what Python launches, parameter by parameter.

`stub_cuda.c` replaces the driver and records the launches.
"""

import ctypes
import functools
from array import array

import pytest
import torch
from compile_utils import cases, triton_compile
from launch_utils import only
from torch.utils._python_dispatch import TorchDispatchMode
from triton.experimental.gluon._runtime import GluonJITFunction

from titan_fp8.functional import bodies
from titan_fp8.kernels import gradients, hopper, launch, replay
from titan_fp8.kernels.hopper import gemm
from titan_fp8.kernels.replay import replayed
from titan_fp8.ops.registry import Implementation
from titan_fp8.ops.sequence import Place, Step, encode, run_steps


class Launch(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("bytes", ctypes.c_int32),
        ("parameters", ctypes.c_uint8 * 2048),
    ]


class History(ctypes.Structure):
    """The struct `history` of `stub_cuda.c`."""

    _fields_ = [("count", ctypes.c_int32), ("launch", Launch * 32)]


@pytest.fixture
def history(cuda):
    found = History.in_dll(cuda.library, "history")
    found.count = 0
    return found


FUNCTIONS: list[array] = []
"""What the stub knows of the compiled kernels, which live as long as the process."""


@pytest.fixture
def kernels(cuda, monkeypatch):
    """The Hopper kernels compile, and launch on CPU tensors."""

    def run(self, *, grid, warmup, **values):
        compiled = triton_compile(self, **values)
        sizes = launch._parameters(compiled.asm["ptx"])
        FUNCTIONS.append(array("q", [len(sizes), *sizes]))
        compiled.function = FUNCTIONS[-1].buffer_info()[0]
        return compiled

    # The CPU has no torch.mm with an out_dtype.
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: (a @ b).to(out_dtype))
    monkeypatch.setattr(GluonJITFunction, "run", run)
    monkeypatch.setattr(gemm, "multiprocessors", lambda device: 132)


OPS = Implementation(hopper)


def test_sums_of_gradients_are_replayed(history, kernels):
    fast = gradients.sum_gradients
    replays = fast.__closure__[[*fast.__code__.co_freevars].index("replays")].cell_contents
    replays.clear()

    def make():
        own, received = (torch.randn(48 * parts).bfloat16() for parts in (1, 2))
        return torch.empty(48), own, received, 1, 3, 1 / 3

    for _ in range(3):
        assert fast(*make()) == ()
    assert isinstance(only(replays), replay.Replay)
    args = make()
    want, got = (launched(history, call, args)[0] for call in (fast.__wrapped__, fast))
    assert want == got and len(got) == 1


def fields(each: Launch) -> list[bytes]:
    """The parameters of a launch."""
    count, *sizes = (ctypes.c_int64 * 64).from_address(each.function)
    ends = [sum(sizes[: i + 1]) for i in range(count)]
    return [bytes(each.parameters[end - size : end]) for end, size in zip(ends, sizes)]


class Kept(TorchDispatchMode):
    """Keeps all tensors that are made, so that no address is used twice."""

    sees_inside_ops = True  # ops do not take it for a mode that they must be dispatched to

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.tensors.append(func(*args, **(kwargs or {})))
        return self.tensors[-1]


def launched(history, function, args) -> tuple[list, tuple]:
    """What a call launches: function, grid and parameters; and its outputs."""
    history.count = 0
    with Kept():
        result = function(*args)
    launches = [
        (each.function, tuple(each.grid), fields(each)) for each in history.launch[: history.count]
    ]
    return launches, result if isinstance(result, tuple) else (result,)


def product(recipe: str, ends: tuple | None, gathered: bool = False):
    """Forward and backward of a product, and what makes their arguments."""
    spec = bodies.ProductSpec(recipe, False, False, torch.bfloat16)
    lead = () if ends is None else (len(ends),)
    in_bf16 = spec.recipe.wgrad_in_bf16
    dtypes = torch.bfloat16, torch.bfloat16 if in_bf16 else torch.float32

    def both(x, g, offs, *weights):
        w, s, s_t = weights if gathered else (*weights, None, None)
        y, *columns = bodies.product(OPS, x, offs, True, spec, w, s)
        columns = columns or (x,)
        return y, *bodies.product_backward(OPS, g, offs, dtypes, spec, w, s_t, *columns)

    def make():
        offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
        x, g, w = (
            torch.randn(shape).bfloat16() for shape in ((320, 384), (320, 272), (*lead, 272, 384))
        )
        if not gathered:
            return x, g, offs, w
        (q, s), (_, s_t) = (
            f(w) for f in (spec.recipe.quantize_weight, spec.recipe.quantize_weight_t)
        )
        return x, g, offs, q, s, s_t

    return both, make


def experts():
    """The fused forward and backward of experts, and what makes their arguments."""
    spec = bodies.ProductSpec("blockwise", False, True, torch.bfloat16)

    def both(x, g, offs, w1, w2, w3):
        weights = w1, None, w2, None, w3, None
        y, a, b, *columns = bodies.feed_forward(OPS, x, offs, True, spec, *weights)
        dtypes = torch.bfloat16, *[torch.float32] * 3
        saved = *weights, a, b, *columns
        return y, *bodies.feed_forward_backward(OPS, g, offs, dtypes, spec, *saved)

    def make():
        shapes = (256, 128), (256, 128), (2, 256, 128), (2, 128, 256), (2, 256, 128)
        x, g, *weights = (torch.randn(shape).bfloat16() for shape in shapes)
        return x, g, torch.tensor([128, 256], dtype=torch.int32), *weights

    return both, make


def three_layers():
    """A sequence of `torch.compile`: layers of groups that share an input."""
    layer = functools.partial(Step, "blockwise_fprop", options={})
    steps = [Step("quantize_1x128", (Place(0, 0),), {})]
    steps += [layer((Place(1, 0), Place(1, 1), Place(0, n), Place(0, 4))) for n in (1, 2, 3)]
    run = encode(steps, [Place(n, 0) for n in (2, 3, 4)])

    def make():
        shapes = (320, 384), (3, 272, 384), (3, 128, 384), (3, 128, 384)
        tensors = tuple(torch.randn(shape).bfloat16() for shape in shapes)
        return *tensors, torch.tensor([5, 5, 200], dtype=torch.int32)

    return lambda *tensors: run_steps(OPS, *tensors, run), make


HOPPER = {
    "blockwise, groups": product("blockwise", (5, 5, 200)),
    "blockwise_pow2, groups": product("blockwise_pow2", (5, 5, 200)),
    "rowwise": product("rowwise", None),
    "rowwise_with_gw_hp, which calls torch.mm": product("rowwise_with_gw_hp", None),
    "blockwise, groups, gathered in FP8": product("blockwise", (5, 5, 200), gathered=True),
    "rowwise, gathered in FP8": product("rowwise", None, gathered=True),
    "experts": experts(),
    "a sequence": three_layers(),
}
"""Groups with blockwise recipes, none with rowwise ones: half of the GEMMs to compile."""


@pytest.mark.parametrize("what", cases(*HOPPER))
def test_the_launches_of_a_replay_are_those_of_python(history, kernels, what):
    function, make = HOPPER[what]
    fast = replayed(function)
    for _ in range(3):
        fast(*make())
    replays = fast.__closure__[[*fast.__code__.co_freevars].index("replays")].cell_contents
    assert isinstance(only(replays), replay.Replay)
    args = make()
    want, outputs = launched(history, function, args)
    got, new_outputs = launched(history, fast, args)
    assert [(w[:2]) for w in want] == [(g[:2]) for g in got] and len(got) >= 6
    inputs = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in args if t is not None]
    moved = {}
    for (_, _, old), (_, _, new) in zip(want, got, strict=True):
        for before, after in zip(old, new, strict=True):
            if len(before) == 4 or before == after:
                assert before == after
                continue
            # An address, or a tensor map, which begins with one.
            assert before[8:] == after[8:]
            (start,), (now,) = (array("Q", each[:8]) for each in (before, after))
            assert not any(first <= start < end for first, end in inputs)
            moved[start] = now
    for before, after in zip(outputs, new_outputs, strict=True):
        assert moved.get(before.data_ptr(), after.data_ptr()) == after.data_ptr()
