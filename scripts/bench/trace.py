"""Shows where the time of a training step goes, from a trace of torchtitan's profiler.

    ./scripts/train.sh CONFIG --job.dump_folder FOLDER --profiling.enable_profiling
    python scripts/bench trace FOLDER/profile_traces/iteration_10/rank0_trace.json

Prints the GPU time by kind of kernel and by kernel, the idle time of the GPU, the bytes that
all-gathers receive, and the CPU time in the CUDA runtime and in this project's ops. The profiler
slows the CPU down, so the idle time is an upper bound; the GPU time is accurate.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from tables import printable

from titan_fp8.plan import train
from titan_fp8.text_table import text_table

LISTED = 30
"""How many kernels or calls a table has at most."""
LONG_GAP = 20
"""Microseconds."""
KINDS = {
    "NCCL": r"nccl",
    "inductor": r"^triton_(?!tem_)",  # templates (tem) are FlexAttention
    "FP8 GEMM": r"^(blockwise|rowwise)_|e4m3",
    "quantizers": r"^(quantize|transpose_fp8)_",
    "SwiGLU": r"^swiglu_",
    "FSDP copies": r"^copy_gradient_|^sum_gradients_|chunk_cat|split_with_sizes_copy",
    "attention": r"flash|fmha|cudnn.*sdpa|attention",
    "permutation": r"^permute_|fill_indices|index|scatter|gather|sort|radix",
    "optimizer": r"multi_tensor|adam|lpnorm",
    "grouped GEMM": r"group.*gemm|gemm.*group|GroupProblem|zero_empty_groups",
    "GEMM": r"nvjet|cutlass|gemm|cublas|splitk",
    "other": r"",
}
"""Kinds of kernels and patterns of their names; the first match counts.

The kernels of this project start with blockwise_ or rowwise_ (GEMMs), quantize_, transpose_fp8_
(weights gathered in FP8, which take the place of quantizing them), swiglu_, permute_,
copy_gradient_ or sum_gradients_, after the modules that they are in. zero_empty_groups belongs to
PyTorch's grouped GEMM.
"""


def kind_of(event: dict) -> str:
    if event["cat"] in ("gpu_memcpy", "gpu_memset"):
        return "copies"
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, event["name"], re.I))


def gaps_between(events: list[dict]) -> list[tuple[float, dict]]:
    """The microseconds in which no event runs, each with the event that follows."""
    gaps, end = [], None
    for event in sorted(events, key=lambda e: e["ts"]):
        if end is not None and event["ts"] > end:
            gaps.append((event["ts"] - end, event))
        end = max(event["ts"] + event["dur"], end or 0.0)
    return gaps


def gpu_events(events: list[dict]) -> list[dict]:
    return [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


ELEMENT_BYTES = {"Byte": 1, "Char": 1, "BFloat16": 2, "Half": 2, "Float": 4, "Int": 4, "Long": 8}
"""By PyTorch's names of dtypes."""


def gathered_bytes(events: list[dict]) -> int:
    """Bytes that all-gathers write to the memory of this rank, its own part included."""
    total = 0
    for event in gpu_events(events):
        args = event.get("args", {})
        # Each kernel of NCCL says how many elements it moves.
        if "AllGather" in event["name"] and "Out msg nelems" in args:
            total += args["Out msg nelems"] * ELEMENT_BYTES[args["dtype"]]
    return total


def main(argv: list[str]) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python scripts/bench trace", None, __doc__, formatter_class=raw
    )
    parser.add_argument("trace", type=Path, help="a .json or .json.gz file of torch.profiler")
    args = parser.parse_args(argv)
    try:
        events = train.events(args.trace)
        received = gathered_bytes(events)
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError) as reason:
        parser.error(f"{args.trace} is not a trace of torch.profiler: {reason!r}")
    gpu = gpu_events(events)
    if not gpu:
        parser.error(f"{args.trace}: the trace has no GPU kernels")
    steps = {e["name"] for e in events if e["name"].startswith("ProfilerStep")}
    busy, compute = train.busy_us(gpu) / 1e3, train.busy_us(train.compute_kernels(gpu)) / 1e3
    gaps = gaps_between(gpu)
    idle = sum(gap for gap, _ in gaps) / 1e3
    long = [dict(event, dur=gap) for gap, event in gaps if gap > LONG_GAP]
    print(f"{printable(args.trace)}: {max(1, len(steps))} step(s), total ms")
    print(f"  GPU busy {busy:.1f}, with kernels that compute {compute:.1f}")
    print(f"  GPU idle {idle:.1f} in {len(gaps)} gaps")
    print(f"  received by all-gathers {received / 1e9:.2f} GB")
    print_times("GPU time by kind", gpu, kind_of)
    print_times("GPU time by kernel", gpu, name_of)
    print_times(f"GPU idle (gaps over {LONG_GAP} us) by the kernel that follows", long, name_of)
    runtime = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    print_times("CPU time in the CUDA runtime", runtime, name_of)
    ops = [e for e in events if e.get("cat") == "cpu_op" and e["name"].startswith("titan_fp8")]
    print_times("CPU time in this project's ops", ops, name_of)


def name_of(event: dict) -> str:
    return event["name"][:90]


def print_times(title: str, events: list[dict], key: Callable[[dict], str]) -> None:
    """A table of the keys with the longest times."""
    durations: dict[str, list[float]] = {}
    for event in events:
        durations.setdefault(key(event), []).append(event["dur"])
    longest = sorted(durations, key=lambda name: -sum(durations[name]))[:LISTED]
    rows = [("ms", "calls", "us each", "")]
    for name in longest:
        us, calls = sum(durations[name]), len(durations[name])
        rows.append((f"{us / 1e3:.2f}", str(calls), f"{us / calls:.1f}", name))
    print(f"\n{title}:\n{text_table(rows, right={0, 1, 2})}")
