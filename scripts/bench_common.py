"""What the benchmarks share: timing, ceilings, whole layers, and the table or JSON they print.

Times are medians of CUDA graph replays, so that they are the GPU's and not the launching thread's.
Every replay takes the next of several sets of random inputs, which together exceed the L2 cache.
A rest goes before them, for a GEMM that draws all of the card's power lowers the clock for what
follows, and then some replays more, for memory is slow to wake.
"""

import argparse
import datetime
import functools
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

L2_BYTES = 60 << 20
REST_S = 0.1
WAKE_S = 0.01
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
FP8_ERROR = 0.08
"""Relative error of a product on Gaussian data: 0.037 for e4m3, 0.059 with the e5m2 gradients of
torchao's tensorwise recipe. One block of 128 left out of 4096 is 0.18."""


def median_us(functions: Sequence[Callable[[], object]], replays: int = 20) -> float:
    """Median time in us of one call; the functions are the same one on different inputs."""
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
    awake = time.perf_counter() + WAKE_S
    while time.perf_counter() < awake:
        graphs[0].replay()
        torch.cuda.synchronize()
    times = []
    for i in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graphs[i % len(graphs)].replay()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times) * 1e3


def sets_beyond_l2(bytes_of_one: int) -> int:
    """How many input sets of this size make each replay read memory and not the cache."""
    return max(2, -(-3 * L2_BYTES // bytes_of_one))


@dataclass(frozen=True)
class Layer:
    """A function of x, and the weights in it whose gradients a step computes."""

    forward: Callable[[Tensor], Tensor]
    weights: Sequence[Tensor]

    def step(self, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        """y and the gradients of x and of the weights, given that of y."""
        y = self.forward(x)
        return y.detach(), *torch.autograd.grad(y, (x, *self.weights), g)

    def kept_bytes(self, x: Tensor) -> int:
        """Bytes that forward keeps for backward, each storage once, weights aside."""
        weights = {w.untyped_storage().data_ptr() for w in self.weights}
        kept: dict[int, int] = {}

        def keep(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = self.forward(x)
        del y
        return sum(kept.values())


def randn(*shape: int, scale: float = 1.0, requires_grad: bool = False) -> Tensor:
    """Gaussian bf16 numbers on the GPU."""
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(scale)
    return x.requires_grad_(requires_grad)


def layer_inputs(m: int, n: int, k: int) -> list[tuple[Tensor, Tensor]]:
    """Sets of x (M, K) and the gradient of y (M, N), beyond the L2 cache together."""
    count = sets_beyond_l2(2 * m * (n + k))
    return [(randn(m, k, requires_grad=True), randn(m, n)) for _ in range(count)]


def relative_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest of the tensors, NaN if one of them has it."""
    norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float32)
    return float(torch.stack([norm(a - b) / norm(b) for a, b in zip(got, want, strict=True)]).max())


Makers = dict[str, Callable[[], Layer]]


def layer_rows(
    layers: Makers, yardsticks: Makers, inputs: list[tuple[Tensor, Tensor]], limit: float
) -> list[dict[str, object]]:
    """Result and time of a step of each layer beside those of the first, which is in bf16.

    No time for a layer whose error passes the limit. Yardsticks are others' layers: one that fails
    says why on stderr, and its row is empty.
    """
    rows, want, bf16_us = [], None, None
    for kind, make in (layers | yardsticks).items():
        torch.cuda.empty_cache()
        error = us = kept = None
        try:
            layer = make()
            got = layer.step(*inputs[0])
            want = want or got
            error = relative_error(got, want)
            del got
            if error < limit:
                us = median_us([functools.partial(layer.step, *each) for each in inputs])
                kept = layer.kept_bytes(inputs[0][0]) / 2**20
                print(f"{kind}: {us:.0f} us", file=sys.stderr)
        except Exception as reason:
            if kind not in yardsticks:
                raise
            summary = str(reason).strip().partition("\n")[0]
            print(f"{kind}: {type(reason).__name__}: {summary}", file=sys.stderr)
        bf16_us = bf16_us or us
        rows.append(
            {
                "layer": kind,
                "error": error,
                "us": us if error is None or us else "wrong",
                "x bf16": bf16_us / us if us else None,
                "MiB kept": kept,
            }
        )
    return rows


def copy_gbps(elements: int = 1 << 29, copies: int = 20) -> float:
    """Device copy bandwidth in GB/s, bytes read and written counted.

    Outside a CUDA graph: the copy that a graph makes of `copy_` is slower by a third.
    """
    source = torch.randn(elements, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(copies + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * source.nbytes / statistics.median(times[3:]) / 1e6


def environment() -> dict[str, str]:
    """Date, card, versions, commit and command: what a figure needs beside it."""
    commit = subprocess.run(
        ["git", "-C", Path(__file__).parent, "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "unknown",
        "command": " ".join(sys.argv),
    }


def parser(description: str) -> argparse.ArgumentParser:
    """Arguments common to the benchmarks."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return arguments


def report(rows: list[dict[str, object]], json_file: Path | None = None) -> None:
    """Prints rows of equal keys as a table; writes them with the environment if asked to."""
    print("  ".join(f"{key}: {value}" for key, value in environment().items()))
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    if json_file is not None:
        json_file.write_text(json.dumps({**environment(), "rows": rows}, indent=1))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 10
        else (f"{value:.0f}" if isinstance(value, float) else str(value))
    )
