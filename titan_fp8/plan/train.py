"""Trains a config for a few steps in bf16 and in FP8, and says how fast it was.

`--train` and scripts/bench/plans.py both run jobs by `run`. `python -m titan_fp8.plan.train`
is what each rank runs: torchtitan, with as many blocks as it is told, which writes what it measured
as JSON. Collectives spin while they wait for a late rank, so they do not count as compute.
"""

import argparse
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.run import main as torchrun
from torch.profiler import ProfilerActivity, profile
from torchtitan import train
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec

from titan_fp8.plan.model import degrees_of, parse, read_rank
from titan_fp8.recipe import BF16
from titan_fp8.torchtitan_0_2.config import GROUPED_MM, LINEAR

TUNED = "bf16 tuned"  # bf16 with all that speeds a job up and is not FP8
AS_IS = "as in CONFIG"
BLOCKS = "TITAN_FP8_PLAN_BLOCKS"  # an environment variable
STEPS, WARM_UP, LOG_EVERY = 20, 5, 5
NO_COMPUTE = re.compile(r"^Mem(cpy|set)|nccl|nvshmem|multimem|symm_mem|_shot_|deep_ep", re.I)
Row = dict[str, Any]


def as_flags(values: dict[str, Any]) -> list[str]:
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def arm_flags(arm: str, converters: Sequence[str]) -> list[str]:
    """torchtitan's flags of bf16, of TUNED, of AS_IS, or of a recipe."""
    if arm == AS_IS:
        return []
    recipe = BF16 if arm in (BF16, TUNED) else arm
    listed = [*dict.fromkeys([*converters, LINEAR])] if recipe == BF16 else converters
    ours = [name for name in listed if name in (LINEAR, GROUPED_MM)]
    values: Row = {f"{name}.recipe": recipe for name in ours}
    if recipe == BF16:
        values |= {"model.converters": ",".join(listed), f"{LINEAR}.host_speedups": arm == TUNED}
        if GROUPED_MM in listed:
            values[f"{GROUPED_MM}.permutation"] = "gather" if arm == TUNED else "host"
    return as_flags(values)


def run(
    config: str, flags: Sequence[str], ranks: int, blocks: int, steps: int, folder: Path
) -> Row:
    """Trains so many steps; RuntimeError with the job's error if it fails.

    Returns "tokens/s" (per GPU), "GiB", "loss", and "compute", None without a GPU. Logs of ranks
    are in the folder.
    """
    values = {"job.dump_folder": folder, "training.steps": steps, "metrics.log_freq": LOG_EVERY}
    command = ["--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--redirects", "3"]
    command += ["--rdzv-endpoint", "localhost:0", "--log-dir", str(folder)]
    command += ["-m", "titan_fp8.plan.train", "--job.config_file", config, *flags]
    command += as_flags(values)
    command += ["--checkpoint.no_enable", "--validation.no_enable", "--metrics.no_enable_wandb"]
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ[BLOCKS] = str(blocks)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        torchrun(command)  # ends the ranks if this process gets SIGINT or SIGTERM
    except ChildFailedError as error:
        message: Any = error.get_first_failure()[1].message
        text = message["message"] if isinstance(message, dict) else message
        raise RuntimeError(text[:200]) from None
    rows = [json.loads((folder / f"rank{i}.json").read_text()) for i in range(ranks)]
    # Stages of a pipeline that compute no loss log a negative one.
    loss = next((row["loss"] for row in rows if not row["loss"] < 0), math.nan)
    return {**rows[0], "GiB": max(row["GiB"] for row in rows), "loss": loss}


def busy_us(events: Iterable[Any]) -> float:
    """The time in which any of the profiler's events computes on a GPU."""
    total, end = 0.0, -math.inf
    for begin, stop in sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
        and not (event.is_user_annotation or NO_COMPUTE.search(event.name))
    ):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


class Trainer(train.Trainer):
    """torchtitan's, which traces one step more and writes what it measured."""

    busy_us: float | None = None

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        if self.step == self.job_config.training.steps and self.device.type == "cuda":
            self.step += 1  # which is not logged
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                super().train_step(data_iterator)
                torch.cuda.synchronize()
            self.busy_us = busy_us(trace.events())

    def train(self) -> None:
        """Writes rankN.json, N of this rank, into the job's folder."""
        rows: dict[int, Row] = {}

        def log(metrics: Row, step: int) -> None:
            if "throughput(tps)" in metrics:  # health_freq logs steps of its own.
                rows[step] = metrics

        self.metrics_processor.logger = SimpleNamespace(log=log, close=lambda: None)
        super().train()
        if self.job_config.training.steps not in rows:
            raise ValueError(f"the training data ends in step {self.step}")
        late = [row for step, row in rows.items() if step > WARM_UP]
        seconds = statistics.median(row["time_metrics/end_to_end(s)"] for row in late)
        losses = [float(row["loss_metrics/global_avg_loss"]) for row in rows.values()]
        row = {
            "tokens/s": statistics.median(row["throughput(tps)"] for row in late),
            "GiB": max(row["memory/max_reserved(GiB)"] for row in rows.values()),
            "compute": None if self.busy_us is None else self.busy_us / seconds / 1e6,
            "loss": statistics.fmean(losses[-3:]),
        }
        file = Path(self.job_config.job.dump_folder, f"rank{torch.distributed.get_rank()}.json")
        file.write_text(json.dumps(row))


def fitted(config: Any, gpus: int) -> Row:
    """Flags that fit the config's plan to at most so many GPUs: shards are cut, expert parallelism
    with them, and the global batch so that a rank has as many micro-batches."""
    p, whole = config.parallelism, config.training.global_batch_size
    inside = p.tensor_parallel_degree * p.context_parallel_degree
    most = gpus // (inside * p.pipeline_parallel_degree * p.data_parallel_replicate_degree)
    wanted = most if p.data_parallel_shard_degree == -1 else p.data_parallel_shard_degree
    if not (shard := min(wanted, most)):
        raise ValueError(f"the degrees in [parallelism] need more GPUs than the {gpus} there are")
    ranks = shard * inside // p.expert_tensor_parallel_degree
    return {
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.expert_parallel_degree": math.gcd(p.expert_parallel_degree, ranks),
        "training.global_batch_size": max(-1, whole * shard // wanted),
    }


def compare(options: argparse.Namespace, flags: list[str]) -> tuple[list[list[str]], bool]:
    """Trains CONFIG in all arms on this machine's GPUs; ValueError if a job fails.

    Returns:
        The table, and whether the fastest recipe is slower than the faster kind of bf16.
    """
    gpus = options.ngpu or torch.cuda.device_count()
    fit = as_flags(fitted(parse(options.config, flags), gpus))
    print("degrees and batch:", *fit)
    flags = [*flags, *fit]
    config = parse(options.config, flags)
    rank = read_rank(config, degrees_of(config, None))
    gpus, whole = rank.dims.world_size, len(rank.model.layers)  # type: ignore[arg-type]
    recipes = options.recipes.split(",") if options.recipes else [AS_IS]
    if recipes == [AS_IS] and all(layer.recipe == BF16 for layer in rank.layers):
        raise ValueError("CONFIG trains in bf16: --recipes names those to compare with it")
    # The fewest blocks that have one of each kind, and one on each stage.
    first = [re.match(r"layers\.(\d+)", layer.modules[0]) for layer in rank.layers]
    least = max(rank.dims.pp, *(1 + int(found[1]) for found in first if found))
    blocks, arms, rows = whole, [BF16, TUNED, *recipes], dict[str, Row]()
    folder = Path(config.job.dump_folder) / f"plan-{time.time_ns()}"
    while len(rows) < len(arms):
        arm = arms[len(rows)]
        print(f"{arm}: {blocks} of {whole} blocks on {gpus} GPUs", file=sys.stderr, flush=True)
        own = folder / f"{arm.replace(' ', '_')}-{blocks}"
        own_flags = [*flags, *arm_flags(arm, config.model.converters)]
        try:
            rows[arm] = run(options.config, own_flags, gpus, blocks, STEPS, own)
        except RuntimeError as error:
            if "OutOfMemoryError" not in str(error) or blocks == least:
                text = f"training in {arm} with {blocks} blocks failed: {error} ({own})"
                raise ValueError(text) from None
            blocks, rows = max(least, blocks // 2), {}
    print(f"{blocks} of {whole} blocks on {gpus} GPUs")
    table = [["", "tokens/s", "x bf16", "GiB", "compute", "loss"]]
    for arm, row in rows.items():
        speed, compute = row["tokens/s"], "" if row["compute"] is None else f"{row['compute']:.0%}"
        cells = [f"{speed / rows[BF16]['tokens/s']:.2f}", f"{row['GiB']:.1f}", compute]
        table.append([arm, f"{speed:,.0f}", *cells, f"{row['loss']:.4f}"])
    fastest = max(rows[recipe]["tokens/s"] for recipe in recipes)
    return table, fastest < max(rows[arm]["tokens/s"] for arm in (BF16, TUNED))


@record
def main() -> None:
    """Trains as one rank."""
    model, blocks = ConfigManager().parse_args(sys.argv[1:]).model, int(os.environ[BLOCKS])
    args = get_train_spec(model.name).model_args[model.flavor]
    args.n_layers = blocks or args.n_layers
    train.main(Trainer)


if __name__ == "__main__":
    main()
