"""What the benchmarks share: timing, ceilings, and the table or JSON they print.

Times are medians of CUDA graph replays, so that they are the GPU's and not the launching thread's.
Every replay takes the next of several sets of random inputs, which together exceed the L2 cache.
"""

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton

L2_BYTES = 60 << 20


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
