"""Trains a config for a few steps in bf16 and in FP8, and says how fast it was.

`--train` and scripts/bench_plans.py both run jobs by `run`: torchrun in a subprocess, as
scripts/train.sh launches it, with torchtitan's own profiler. `python -m titan_fp8.plan.train BLOCKS
...` is what each rank runs: torchtitan, with a model of BLOCKS blocks.

Compute is the time in which kernels other than collectives run in one traced step, overlaps counted
once, over the time of a step that is not traced. Collectives spin while they wait for a late rank,
so their time says nothing. The step before the traced one is logged: torchtitan waits for the GPU,
so no kernel of that step is in the trace.
"""

import argparse
import contextlib
import gzip
import importlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from titan_fp8 import cpu_host
from titan_fp8.recipe import BF16

TUNED = "bf16 tuned"  # bf16 with all that speeds a job up and is not FP8, by this key
LINEAR, GROUPED_MM = "quantize.linear.titan_fp8", "quantize.grouped_mm.titan_fp8"
STEPS, WARM_UP, LOG_EVERY = 20, 5, 5
TRACED = 6  # steps after those that are measured; the last is traced
COLLECTIVE = re.compile(r"nccl|nvshmem|multimem|symm_mem|(one|two)_shot_all_reduce|deep_ep", re.I)
LINE = re.compile(
    r"(?<!validate )step: *(\d+) +loss: *(-?[\d.]+|-?nan|-?inf) .*?"
    r"memory: *(-?[\d.]+)GiB.*?tps: *([\d,]+)"
)
Row = dict[str, Any]


def arm_flags(arm: str, converters: Sequence[str]) -> list[str]:
    """torchtitan's flags of bf16, of TUNED, or of a recipe, for those of model.converters."""
    sections = [name for name in converters if name in (LINEAR, GROUPED_MM)]
    recipe = BF16 if arm == TUNED else arm
    key = (f"--{LINEAR}.host_speedups", str(arm == TUNED)) if recipe == BF16 else ()
    flags = [word for s in sections for word in (f"--{s}.recipe", recipe)]
    return [*flags, *(key if LINEAR in sections else ())]


def run(
    config: str, flags: Sequence[str], ranks: int, blocks: int, steps: int, folder: Path
) -> str | None:
    """Trains so many steps and TRACED more; returns None, or the last error of a job that failed.

    The job ends with this process if that gets SIGINT or SIGTERM.
    """
    on_gpu = torch.cuda.is_available()
    values = {
        "job.dump_folder": folder,
        "training.steps": steps + TRACED * on_gpu,
        "metrics.log_freq": LOG_EVERY,
        "profiling.profile_freq": steps + TRACED,
        "profiling.save_traces_folder": "traces",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--role", "rank"]
    command += ["-m", "titan_fp8.plan.train", str(blocks), "--job.config_file", config, *flags]
    command += [word for key, value in values.items() for word in (f"--{key}", str(value))]
    command += ["--checkpoint.no_enable", "--validation.no_enable"]
    command += ["--profiling.enable_profiling"] * on_gpu
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "train.log"
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with log.open("w", encoding="utf-8") as file:
        streams: Any = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
        job = subprocess.Popen(command, env=environment | os.environ, **streams)
        try:
            job.wait()
        finally:
            if job.poll() is None:
                job.terminate()  # torchrun ends its ranks, after 30 s by force
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(60)
                job.kill()
            signal.signal(signal.SIGTERM, before)
    if job.returncode == 0:
        return None
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    memory = [line for line in errors if "OutOfMemoryError" in line]
    return [*(lines or ["no output"])[-1:], *errors, *memory][-1].strip()[-200:]


def read(folder: Path, steps: int, tokens: float) -> Row:
    """What a finished job measured; `tokens` are those of a step and GPU.

    Raises:
        ValueError, OSError, EOFError, LookupError, TypeError: its log or trace is not whole.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", (folder / "train.log").read_text(errors="replace"))
    logged = [m.groups() for m in LINE.finditer(text) if int(m[1]) <= steps]
    # Stages of a pipeline that compute no loss log a negative one.
    losses = {int(step): float(loss) for step, loss, *_ in logged if not loss.startswith("-")}
    speeds = [float(tps.replace(",", "")) for step, *_, tps in logged if int(step) > WARM_UP]
    if not losses or not speeds:
        raise ValueError(f"{folder}/train.log has no steps with a loss after step {WARM_UP}")
    row: Row = {
        "tokens/s": statistics.median(speeds),
        "GiB": max(float(memory) for *_, memory, _ in logged),
        "compute": None,
        "loss": statistics.fmean([*losses.values()][-3:]),
    }
    if trace := trace_of(folder):
        row["compute"] = busy_us(compute_kernels(events(trace))) * row["tokens/s"] / tokens / 1e6
    return row


def trace_of(folder: Path) -> Path | None:
    """The trace of rank 0; None of a job without a GPU."""
    return next(folder.glob("traces/iteration_*/rank0_trace.json*"), None)


def events(trace: Path) -> list[dict[str, Any]]:
    """The events of a trace that have a name, a start `ts` and a duration `dur` in us."""
    with (gzip.open if trace.suffix == ".gz" else open)(trace, "rt") as file:
        found = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    return [{**e, "name": str(e["name"]), **{k: float(e[k]) for k in ("ts", "dur")}} for e in found]


def compute_kernels(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels other than those of collectives."""
    kernels = (e for e in events if e.get("cat") == "kernel")
    return [e for e in kernels if not COLLECTIVE.search(e["name"])]


def busy_us(events: list[dict[str, Any]]) -> float:
    """The time in which any of the events runs."""
    total, end = 0.0, -math.inf
    for begin, stop in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def fitted(config: Any, gpus: int) -> dict[str, int]:
    """Values that fit the config's plan to at most so many GPUs: data parallelism is cut, expert
    parallelism with it, and the global batch so that a rank has as many micro-batches."""
    p, whole = config.parallelism, config.training.global_batch_size
    replicas, shards = p.data_parallel_replicate_degree, p.data_parallel_shard_degree
    inside = p.tensor_parallel_degree * p.context_parallel_degree
    data = gpus // (inside * p.pipeline_parallel_degree)
    if not data:
        raise ValueError(
            "parallelism.tensor_parallel_degree, context_parallel_degree and pipeline_parallel_"
            f"degree need more GPUs together than the {gpus} there are: choose smaller ones"
        )
    wanted = max(1, data // replicas) if shards == -1 else shards
    shard = min(wanted, data)
    replicate = min(replicas, data // shard)
    ranks = shard * inside // p.expert_tensor_parallel_degree
    return {
        "parallelism.data_parallel_replicate_degree": replicate,
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.expert_parallel_degree": math.gcd(p.expert_parallel_degree, ranks),
        "training.global_batch_size": max(-1, whole * replicate * shard // (replicas * wanted)),
    }


def compare(
    options: argparse.Namespace, flags: list[str], parse: Callable[..., Any]
) -> tuple[list[list[str]], bool]:
    """Trains CONFIG in all arms on this machine's GPUs.

    Returns:
        The table of what each measured, and whether the fastest recipe is slower than the faster
        kind of bf16.

    Raises:
        ValueError: a job fails, or does not fit into memory however few blocks it has.
    """
    from titan_fp8.plan.model import degrees_of, read_rank
    from titan_fp8.torchtitan_0_2.config import experts_recipe

    config = parse(options.config, flags)
    for key, value in fitted(config, options.ngpu or torch.cuda.device_count()).items():
        section, _, name = key.partition(".")
        if (before := getattr(getattr(config, section), name)) not in (value, -1):
            print(f"cut: {key} = {value} instead of {before}")
        flags = [*flags, f"--{key}", str(value)]
    config = parse(options.config, flags)
    dims, batch = degrees_of(config, None), config.training.local_batch_size
    rank, gpus = read_rank(config, dims), dims.world_size
    converters, linear = config.model.converters, config.quantize.linear.titan_fp8
    own_recipe = linear.recipe if LINEAR in converters else experts_recipe(config.quantize)
    recipes = (options.recipes or own_recipe).split(",")
    if BF16 in recipes:
        raise ValueError("the recipe of CONFIG is bf16: --recipes names those to compare with it")
    arms = [BF16, *[TUNED] * (LINEAR in converters), *recipes]
    sequences = max(config.training.global_batch_size, batch * dims.dp_replicate * dims.dp_shard)
    # The fewest blocks that have one of each kind, and one on each stage.
    first = [re.match(r"layers\.(\d+)", layer.modules[0]) for layer in rank.layers]
    least = max(dims.pp, *(1 + int(found[1]) for found in first if found))
    blocks = whole = len(rank.model.layers)  # type: ignore[arg-type]
    rows: dict[str, Row] = {}
    folder = Path(config.job.dump_folder) / f"plan-{time.time_ns()}"
    while len(rows) < len(arms):
        arm = arms[len(rows)]
        print(f"{arm}: {blocks} of {whole} blocks on {gpus} GPUs", file=sys.stderr)
        own = folder / f"{arm.replace(' ', '_')}-{blocks}"
        as_in_config = arm in recipes and not options.recipes
        command = [*flags, *([] if as_in_config else arm_flags(arm, converters))]
        error = run(options.config, command, gpus, blocks, STEPS, own)
        if error and "OutOfMemoryError" in error and blocks > least:
            blocks, rows = max(least, blocks // 2), {}
        elif error:
            raise ValueError(f"training in {arm} with {blocks} blocks failed: {error} ({own})")
        else:
            rows[arm] = read(own, STEPS, sequences * config.training.seq_len / gpus)
    print(f"{blocks} of {whole} blocks on {gpus} GPUs")
    table = [["", "tokens/s", "x bf16", "GiB", "compute", "loss"]]
    for arm, row in rows.items():
        speed, compute = row["tokens/s"], "" if row["compute"] is None else f"{row['compute']:.0%}"
        ratio = f"{speed / rows[BF16]['tokens/s']:.2f}"
        table.append(
            [arm, f"{speed:,.0f}", ratio, f"{row['GiB']:.1f}", compute, f"{row['loss']:.4f}"]
        )
    bf16 = max(row["tokens/s"] for arm, row in rows.items() if arm not in recipes)
    return table, max(rows[recipe]["tokens/s"] for recipe in recipes) < bf16


def main() -> None:
    """Trains as one rank, with a model of as many blocks as the first argument says; 0: all."""
    blocks = int(sys.argv.pop(1))
    if not torch.cuda.is_available():
        cpu_host.prepare()
    from torchtitan import train
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import get_train_spec

    config = ConfigManager().parse_args(sys.argv[1:])
    if config.experimental.custom_import:
        importlib.import_module(config.experimental.custom_import)
    args = get_train_spec(config.model.name).model_args[config.model.flavor]
    args.n_layers = blocks or args.n_layers
    if torch.cuda.is_available():
        train.main(train.Trainer)
    else:
        cpu_host.main()


if __name__ == "__main__":
    main()
