"""Timing, layers and reports for the benchmarks.

A time is the median of CUDA graph replays, so it is the GPU's time and not that of the launching
thread. The replays go through several sets of random inputs that together exceed the L2 cache.
Before them the GPU rests, because a GEMM at the card's power limit lowers the clock of what comes
next, and then some untimed replays run, because memory clocks rise slowly.
"""

import datetime
import functools
import importlib.util
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from tables import Row, text_table
from torch import Tensor
from torch.utils.benchmark import Timer

L2_BYTES = 60 << 20
REST_S = 0.1
WARMUP_S = 0.01
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
FP8_ERROR = 0.08
"""Bound on the relative error of a product of Gaussian data. e4m3 gives 0.037; skipping one
block of 128 out of 4096 gives 0.18."""

Step = Callable[[], object]
"""What is timed: a call without arguments."""
Result = tuple[list[Row], dict[str, object]]
"""The rows of a benchmark, all with the same columns, and facts that hold for all of them."""


def median_us(functions: Sequence[Step], replays: int = 20) -> float:
    """Median time in us of one call; `functions` do the same on different inputs.

    `triton.testing.do_bench_cudagraph` replays one set of inputs, which then stay in the L2 cache.
    """
    graphs = []
    for function in functions:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        graphs.append(graph)
    torch.cuda.synchronize()
    time.sleep(REST_S)
    end_of_warmup = time.perf_counter() + WARMUP_S
    while time.perf_counter() < end_of_warmup:
        graphs[0].replay()
        torch.cuda.synchronize()
    events = []
    for i in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graphs[i % len(graphs)].replay()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e3


def call_us(steps: Sequence[Step], calls: int, rounds: int) -> list[float]:
    """Median time in us of one call of each step, host included.

    A round is a loop of `calls` calls of each step; so the steps take turns.
    """
    timers = [Timer("step()", globals={"step": step}) for step in steps]  # waits for the GPU
    times = [[timer.timeit(calls).mean for timer in timers] for _ in range(rounds)]
    return [statistics.median(of_step) * 1e6 for of_step in zip(*times, strict=True)]


def sets_beyond_l2(bytes_of_one: int) -> int:
    """How many input sets of this size exceed the L2 cache, so that each replay reads memory."""
    return max(2, -(-3 * L2_BYTES // bytes_of_one))


@dataclass(frozen=True)
class Layer:
    """A function of x and its weights, whose gradients a step computes."""

    forward: Callable[[Tensor], Tensor]
    weights: Sequence[Tensor]

    def step(self, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        """Forward and backward: y and the gradients of x and the weights, from y's gradient g."""
        y = self.forward(x)
        return y.detach(), *torch.autograd.grad(y, (x, *self.weights), g)

    def kept_bytes(self, x: Tensor) -> int:
        """Bytes that forward saves for backward, without weights; shared storage counts once."""
        weights = {storage.data_ptr() for w in self.weights for storage in storages(w)}
        kept: dict[int, int] = {}

        def keep(t: Tensor) -> Tensor:
            kept.update({s.data_ptr(): s.nbytes() for s in storages(t)})
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = self.forward(x)
        del y
        return sum(size for address, size in kept.items() if address not in weights)


def storages(t: Tensor) -> list[torch.UntypedStorage]:
    """The memory of a tensor, or of the tensors that a subclass consists of."""
    names = t.__tensor_flatten__()[0] if hasattr(t, "__tensor_flatten__") else []
    return [part.untyped_storage() for part in ([getattr(t, name) for name in names] or [t])]


def randn(*shape: int, scale: float = 1.0, requires_grad: bool = False) -> Tensor:
    """A Gaussian bf16 tensor on the GPU."""
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(scale)
    return x.requires_grad_(requires_grad)


def layer_inputs(m: int, n: int, k: int) -> list[tuple[Tensor, Tensor]]:
    """Sets of x (M, K) and y's gradient (M, N) that together exceed the L2 cache."""
    count = sets_beyond_l2(2 * m * (n + k))
    return [(randn(m, k, requires_grad=True), randn(m, n)) for _ in range(count)]


def relative_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest relative error among the tensors; NaN if any of them holds NaN."""
    norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float32)
    return float(torch.stack([norm(a - b) / norm(b) for a, b in zip(got, want, strict=True)]).max())


def layer_rows(
    layers: dict[str, Callable[[], Layer]], inputs: list[tuple[Tensor, Tensor]], limit: float
) -> list[Row]:
    """Error and time of a step of each layer, relative to the first layer, which is in bf16.

    A layer whose error exceeds the limit gets no time.
    """
    rows: list[Row] = []
    want = bf16_us = None
    for kind, make in layers.items():
        torch.cuda.empty_cache()
        layer = make()
        got = layer.step(*inputs[0])
        want = want or got
        error = relative_error(got, want)
        del got
        row: Row = {"layer": kind, "error": error, "us": "wrong", "x bf16": None, "MiB kept": None}
        if error < limit:
            us = median_us([functools.partial(layer.step, *each) for each in inputs])
            bf16_us = bf16_us or us
            row |= {"us": us, "x bf16": bf16_us / us}
            row["MiB kept"] = layer.kept_bytes(inputs[0][0]) / 2**20
            print(f"{kind}: {us:.0f} us", file=sys.stderr)
        rows.append(row)
    return rows


def copy_gbps(elements: int = 1 << 29) -> float:
    """Device copy bandwidth in GB/s, bytes read and written counted.

    Outside a CUDA graph: the copy that a graph makes of `copy_` is slower by a third.
    """
    source = torch.randn(elements, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    ms = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * source.nbytes / ms / 1e6


def bandwidth(gigabytes: float, us: float, copy: float) -> Row:
    """The cells of what moves so many bytes in this time; `copy` is the copy bandwidth in GB/s."""
    gbps = gigabytes / us * 1e6
    return {"GB/s": gbps, "% of copy": 100 * gbps / copy}


def environment() -> dict[str, str]:
    """Where and how a result was measured: command, date, card, versions, commit.

    BENCH_COMMIT is the commit of a copy of the tree without git.
    """
    return {
        "command": f"python scripts/bench {shlex.join(sys.argv[1:])}",
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": os.environ.get("BENCH_COMMIT") or git_commit() or "unknown",
    }


def git_commit() -> str:
    """The commit of this tree, with "-dirty" if it was changed; empty without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def require_hopper() -> None:
    """Ends the process if there is no Hopper GPU."""
    there = torch.cuda.is_available()
    if not there or torch.cuda.get_device_capability()[0] != 9:
        card = torch.cuda.get_device_name() if there else "no GPU"
        sys.exit(f"bench: benchmarks need a Hopper GPU; this machine has {card}")


def report(
    rows: list[Row], json_file: Path | None, title: str, about: str, **facts: object
) -> None:
    """Prints a table; with `json_file` also writes it for render.py.

    Args:
        rows: the results, all with the same columns.
        title, about: a heading for the table and one sentence that says what it measures.
        facts: whatever else was measured or chosen for all rows, such as the copy bandwidth.
    """
    result = {"title": title, "about": about, **environment(), "facts": facts, "rows": rows}
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(f"{key}: {value}" for key, value in result.items() if key != "rows"))
    print(text_table(rows))
