"""Replays launch what Python would launch, on the right memory, for tensors that they never saw.

`stub_cuda.c` replaces the driver. A kernel of the test runs on the CPU, so that what is replayed
computes something. test_replay_hopper.py compares the launches of the Hopper kernels.
"""

import ctypes
import gc
import math
from array import array

import pytest
import torch
from launch_utils import only
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction

from titan_fp8.kernels import launch, replay
from titan_fp8.kernels.replay import replayed

KERNEL = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p))


@launch.kernel(do_not_specialize=["n"])
def add(out, a, b, n, OFFSET: gl.constexpr = 0):
    """out = a + 10 b, for n int64 values."""


@launch.kernel(do_not_specialize=["n"])
def add_by_tma(desc, out, b, n):
    """out = a + 10 b, where a is a matrix that is read by TMA; n is 0."""


@pytest.fixture
def adds(cuda, monkeypatch):
    """Launches of `add` compute."""

    def number(parameter, of=ctypes.c_int64):
        return ctypes.cast(parameter, ctypes.POINTER(of))[0]

    def run(parameters):
        out, a, b = (number(parameters[i]) for i in range(3))
        n = number(parameters[3], ctypes.c_int32)
        out, a, b = ((ctypes.c_int64 * n).from_address(address) for address in (out, a, b))
        for i in range(n):
            out[i] = a[i] + 10 * b[i]

    kernel = KERNEL(run)
    slot = ctypes.c_void_p.in_dll(cuda.library, "run_kernel")
    slot.value = ctypes.cast(kernel, ctypes.c_void_p).value
    function = array("q", [6, 8, 8, 8, 4, 8, 8])

    def compiled(self, *, grid, warmup, **values):
        run_now = [values[name] for name in ("out", "a", "b", "n")]
        run_now[0].copy_(run_now[1] + 10 * run_now[2])
        return "compiled"

    def plan(compiled, named):
        kinds = [launch.POINTER] * 3 + [launch.NUMBER]
        words = [function.buffer_info()[0], 32, 0]
        for index, kind in enumerate(kinds):
            words += [kind, index]
        return bytes(launch.NAME_BYTES) + array("q", words).tobytes()

    monkeypatch.setattr(GluonJITFunction, "run", compiled)
    monkeypatch.setattr(launch, "plan", plan)
    monkeypatch.setattr(add, "_launcher", None)
    yield kernel
    slot.value = None


def plus(a, b):
    """a + 10 b, in fresh memory."""
    out = torch.empty_like(a)
    add[(1,)](out, a, b, a.numel())
    return out


def check(function, make, calls=5):
    """The function and its replay agree on tensors that differ from call to call; the replay."""
    fast = replayed(function)
    replays = cache_of(fast)
    for _ in range(calls):
        args = make()
        got, want = fast(*args), function(*args)
        for g, w in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
            assert torch.equal(g, w) and g.stride() == w.stride()
            assert not any(g.data_ptr() == t.data_ptr() for t in args if torch.is_tensor(t))
    return replays


def random(*shape):
    return torch.randint(0, 1000, shape)


def test_a_chain_of_launches(adds):
    def function(x, y):
        a = plus(x, y)
        b = plus(a, x)
        c = plus(b, a)
        del a, b
        return plus(c, y), plus(y, c)

    found = only(check(function, lambda: (random(8, 4), random(8, 4))))
    assert isinstance(found, replay.Replay)
    # a, b and c are alive together while c is computed.
    assert found.bytes == 3 * 256


def test_memory_is_reused_when_it_is_free(adds):
    def function(x, y):
        for _ in range(6):
            x = plus(x, y)
        return plus(x, y)

    found = only(check(function, lambda: (random(64), random(64))))
    # x and its successor, in turns.
    assert isinstance(found, replay.Replay) and found.bytes == 2 * 512


def test_a_function_that_calls_one_with_a_replay(adds):
    """The launches of the inner function are recorded, although it would replay them."""
    inner = replayed(plus)
    for _ in range(3):
        inner(random(8), random(8))

    def function(x, y):
        return plus(inner(x, y), y)

    assert isinstance(only(check(function, lambda: (random(8), random(8)))), replay.Replay)


def test_zeros_are_cleared_at_each_call(adds):
    def function(x):
        big = plus(x, x)
        total = torch.zeros_like(x)
        add[(1,)](total, total, big, x.numel())
        add[(1,)](total, total, big, x.numel())
        return plus(total, torch.zeros(x.shape, dtype=x.dtype))

    assert isinstance(only(check(function, lambda: (random(40),))), replay.Replay)


def test_an_output_that_starts_as_zeros(adds):
    """As maxima do, which programs raise."""

    def function(x):
        total, untouched = torch.zeros_like(x), torch.zeros(x.shape, dtype=x.dtype)
        add[(1,)](total, total, x, x.numel())
        add[(1,)](total, total, x, x.numel())
        return total, plus(x, x), untouched

    assert isinstance(only(check(function, lambda: (random(40),))), replay.Replay)


def test_views_of_inputs_and_of_memory(adds):
    def function(x):
        upper, lower = x[:4], x[4:]
        both = torch.empty_like(x)
        add[(1,)](both[4:], upper, lower, upper.numel())
        add[(1,)](both[:4], lower, both[4:], upper.numel())
        return plus(both[4:], both[:4])

    assert isinstance(only(check(function, lambda: (random(8, 16),))), replay.Replay)


def test_one_tensor_alone_and_no_temporaries(adds):
    assert isinstance(only(check(lambda x: plus(x, x), lambda: (random(3),))), replay.Replay)


def test_inputs_that_differ_have_replays_of_their_own(adds):
    sizes = iter([8, 8, 8, 24, 24, 24, 8, 24])
    replays = check(lambda x, k: (plus(x, x) if k else plus(x[::1], x), plus(x, x)),
                    lambda: (random(next(sizes)), True), calls=8)  # fmt: skip
    assert len(replays) == 2
    assert all(isinstance(each, replay.Replay) for each in replays.values())


def a_chain_with_ops(x, y):
    a = plus(x, y)
    b = a.t() @ plus(y, x)
    c = torch.where(b > 7, b, 1)
    del a, b
    return plus(c, y.t() @ y), c


def ops_on_parts(x):
    both = torch.empty_like(x)
    add[(1,)](both, x, x, x.numel())
    add[(1,)](both[4:], both[:4], both[4:], both[4:].numel())
    return plus(both[4:] * 3, x[2:6] - both[:4])


def ops_on_zeros(x):
    zeros = torch.zeros_like(x)
    total = plus(zeros, torch.zeros_like(x)) + zeros
    add[(1,)](zeros, x, total, x.numel())
    return plus(zeros, x), zeros + 1


REPLAYED = {
    "an op first": lambda x: plus(x + 1, x),
    "an op last": lambda x: plus(x, x) * 2,
    "an op alone": lambda x: x + 1,
    "its result is read twice": lambda x: (lambda y: plus(y, y))(x * 3),
    "an output that is unused": lambda x: (plus(x, x), torch.empty(0, dtype=torch.int64)),
    "ops and launches": lambda x: a_chain_with_ops(x[:4, :4].clone(), x[2:6, 4:].clone()),
    "parts of memory": ops_on_parts,
    "zeros": ops_on_zeros,
}


@pytest.mark.parametrize("what", REPLAYED)
def test_ops_between_launches(adds, what):
    replays = check(REPLAYED[what], lambda: (random(8, 8),))
    assert isinstance(only(replays), replay.Replay)


def test_what_an_op_reads_is_freed_after_its_last_reader(adds):
    """No tensor of a stage that has passed is kept for the later ones."""
    alive = []

    def function(x):
        a = plus(x, x)
        b = a + 1
        del a
        b = b + 1
        return plus(b, x)

    fast = only(check(function, lambda: (random(8),)))
    run = fast.stages[-1].run
    last = fast.stages[-1]._replace(run=lambda tensors: (alive.append(set(tensors)), run(tensors)))
    fast.stages[-1] = last
    x = random(8)
    assert torch.equal(fast([x]), function(x))
    # The input, the sum that the last launch reads, and the output.
    assert len(alive[0]) == 3


NOT_REPLAYED = {
    "an op that writes": lambda x: plus(x.clone().mul_(2), x),
    "an op of two results": lambda x: plus(x.double().frexp()[1].long(), x),
    "an op on what a launch wrote": lambda x: plus(plus(x, x).add_(1), x),
    "an output that is an input": lambda x: (plus(x, x), x),
    "an output that is a view": lambda x: plus(x, x)[1:],
    "outputs of one memory": lambda x: (lambda y: (y, y.view(-1)))(plus(x, x)),
    "a result that is kept": lambda x, kept=[]: (kept.append(plus(x, x)), plus(x, kept[-1]))[1],
}


@pytest.mark.parametrize("what", NOT_REPLAYED)
def test_what_cannot_be_replayed_runs_in_python(adds, what):
    function = NOT_REPLAYED[what]
    fast = replayed(function)
    for _ in range(4):
        x = random(6)
        results = [r if isinstance(r, tuple) else (r,) for r in (fast(x), function(x))]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    replays = cache_of(fast)
    assert only(replays) == "not replayable"


def test_inputs_that_overlap_run_in_python(adds):
    both = random(12)
    fast = replayed(plus)
    for _ in range(4):
        assert torch.equal(fast(both[:8], both[2:10]), both[:8] + 10 * both[2:10])


def test_nothing_is_kept_alive(adds):
    fast = replayed(lambda x: plus(plus(x, x), x))
    for _ in range(4):
        x = random(8)
        y = fast(x)
    from torch.multiprocessing.reductions import StorageWeakRef

    kept = [StorageWeakRef(t.untyped_storage()) for t in (x, y)]
    del x, y
    gc.collect()
    assert all(each.expired() for each in kept)


def cache_of(fast):
    return fast.__closure__[[*fast.__code__.co_freevars].index("replays")].cell_contents


def test_the_cache_keeps_what_was_used_last(adds, monkeypatch):
    monkeypatch.setattr(launch, "CACHED_SHAPES", 4)
    in_python = []
    fast = replayed(lambda x, y: (in_python.append(len(x)), plus(x, y))[1])
    for size in range(2, 14):
        for n in (1, size):
            x, y = random(n), random(n)
            assert torch.equal(fast(x, y), x + 10 * y)
    assert in_python.count(1) == 2 and len(cache_of(fast)) == 4


def test_constants_are_known_by_type_and_value(adds):
    """1, 1.0 and True are equal, and so are the zeros; no two NaNs are."""
    fast = replayed(lambda x, constant: plus(x, x))
    different = [1, 1.0, True, 0.0, -0.0, math.nan, None]
    for _ in range(3):
        for constant in [*different, float("1"), float("nan")]:
            fast(random(4), constant)
    assert len(cache_of(fast)) == len(different)
