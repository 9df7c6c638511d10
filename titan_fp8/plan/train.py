"""Trains a config for a few steps in bf16 and in FP8, and says how fast it was.

`--train` and scripts/bench/plans.py run jobs by `run`. Each rank runs this file: torchtitan, which
writes what it measured. Collectives spin while they wait for a late rank, so they are no compute.
"""

import itertools
import json
import math
import os
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.run import main as torchrun
from torch.profiler import ProfilerActivity, profile
from torchtitan import train
from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import get_train_spec

from titan_fp8.modules.report import text_table
from titan_fp8.plan.model import parse, read_rank
from titan_fp8.recipe import BF16, get_recipe
from titan_fp8.torchtitan_0_2.config import GROUPED_MM, LINEAR

TUNED = "bf16 tuned"  # bf16 with all that speeds a job up and is not FP8
BLOCKS = "TITAN_FP8_PLAN_BLOCKS"  # an environment variable
STEPS, WARM_UP, LOG_EVERY = 20, 5, 5
NO_COMPUTE = re.compile(r"^Mem(cpy|set)|^exchange_|nccl|nvshmem|multimem|symm_mem|_shot_|deep_ep")
Row = dict[str, Any]


def arm_flags(arm: str, converters: Sequence[str]) -> list[str]:
    """torchtitan's flags of bf16, of TUNED, or of a recipe."""
    is_bf16, is_tuned = arm in (BF16, TUNED), arm == TUNED
    listed = [*dict.fromkeys([*converters, *[LINEAR] * is_bf16])]
    ours = [name for name in listed if name in (LINEAR, GROUPED_MM)]
    flags = [f"--{name}.recipe={BF16 if is_bf16 else arm}" for name in ours]
    if is_bf16:
        flags += [f"--model.converters={','.join(listed)}", f"--{LINEAR}.host_speedups={is_tuned}"]
        if GROUPED_MM in listed:
            flags.append(f"--{GROUPED_MM}.permutation={'gather' if is_tuned else 'host'}")
    return flags


def run(config: str, flags: list[str], ranks: int, blocks: int, steps: int, folder: Path) -> Row:
    """Trains so many steps, with logs in the folder; RuntimeError with the job's error if it fails.

    Returns "tokens/s" (per GPU), "GiB", "loss", and "compute", NaN without a GPU.
    """
    command = ["--standalone", f"--nproc-per-node={ranks}", f"--log-dir={folder}", "--redirects=3"]
    command += ["-m", "titan_fp8.plan.train", "--job.config_file", config, *flags]
    command += [f"--job.dump_folder={folder}", f"--training.steps={steps}"]
    command += [f"--metrics.log_freq={LOG_EVERY}", "--metrics.no_enable_wandb"]
    command += ["--checkpoint.no_enable", "--validation.no_enable"]
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ[BLOCKS] = str(blocks)
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
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
        and not (event.is_user_annotation or NO_COMPUTE.search(event.name))
    )
    before = itertools.accumulate((end for _, end in spans), max, initial=-math.inf)
    return sum(max(0.0, end - max(begin, done)) for (begin, end), done in zip(spans, before))


class Trainer(train.Trainer):
    """torchtitan's, which traces one step more and writes what it measured."""

    busy_us = math.nan  # unless there is a GPU

    def __init__(self, config: JobConfig):
        args = get_train_spec(config.model.name).model_args[config.model.flavor]
        args.n_layers = int(os.environ[BLOCKS]) or args.n_layers
        super().__init__(config)

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
        rows = defaultdict[int, Row](dict)
        self.metrics_processor.logger.log = lambda row, step: rows[step].update(row)
        super().train()
        if (steps := self.job_config.training.steps) not in rows:
            raise ValueError(f"the training data ends in step {self.step}")
        late = [rows[step] for step in range(WARM_UP + LOG_EVERY, steps + 1, LOG_EVERY)]
        seconds = statistics.median(row["time_metrics/end_to_end(s)"] for row in late)
        row = {
            "tokens/s": statistics.median(row["throughput(tps)"] for row in late),
            # health_freq logs steps of its own.
            "GiB": max(row.get("memory/max_reserved(GiB)", 0) for row in rows.values()),
            "compute": self.busy_us / seconds / 1e6,
            "loss": statistics.fmean(row["loss_metrics/global_avg_loss"] for row in late[-3:]),
        }
        file = Path(self.job_config.job.dump_folder, f"rank{torch.distributed.get_rank()}.json")
        file.write_text(json.dumps(row))


def fitted(config: JobConfig, gpus: int) -> list[str]:
    """Flags that cut shards, and with them expert parallelism and the global batch, to the GPUs."""
    p, whole = config.parallelism, config.training.global_batch_size
    inside = p.tensor_parallel_degree * p.context_parallel_degree
    most = gpus // (inside * p.pipeline_parallel_degree * p.data_parallel_replicate_degree)
    wanted = most if p.data_parallel_shard_degree == -1 else p.data_parallel_shard_degree
    if not (shard := min(wanted, most)):
        raise ValueError(f"the degrees in [parallelism] need more GPUs than the {gpus} there are")
    ranks = shard * inside // p.expert_tensor_parallel_degree
    return [
        f"--parallelism.data_parallel_shard_degree={shard}",
        f"--parallelism.expert_parallel_degree={math.gcd(p.expert_parallel_degree, ranks)}",
        f"--training.global_batch_size={max(-1, whole * shard // wanted)}",
    ]


def compare(file: str, flags: list[str], recipes: list[str]) -> bool:
    """Trains a config in bf16 and in recipes, by default its own, and prints what it measured.

    Returns whether the fastest recipe is slower than the faster bf16. ValueError if a job fails.
    """
    recipes = [get_recipe(name).name for name in recipes]
    fit = fitted(parse(file, flags), torch.cuda.device_count())
    print("degrees and batch:", *fit)
    config = parse(file, [*flags, *fit])
    rank = read_rank(config)
    gpus, whole = rank.dims.world_size, len(rank.model.layers)  # type: ignore[arg-type]
    arms = {arm: arm_flags(arm, config.model.converters) for arm in (BF16, TUNED, *recipes)}
    if not recipes:
        arms["as in CONFIG"] = []
        if all(layer.recipe == BF16 for layer in rank.layers):
            raise ValueError("CONFIG trains in bf16: --recipes names those to compare with it")
    # The fewest blocks that have one of each kind, and one on each stage.
    first = [re.match(r"layers\.(\d+)", layer.modules[0]) for layer in rank.layers]
    least = max(rank.dims.pp, *(1 + int(found[1]) for found in first if found))
    blocks, rows = whole, dict[str, Row]()
    folder = Path(config.job.dump_folder) / f"plan-{time.time_ns()}"
    while len(rows) < len(arms):
        arm = [*arms][len(rows)]
        print(f"{arm}: {blocks} of {whole} blocks on {gpus} GPUs", flush=True)
        own = folder / f"{arm.replace(' ', '_')}-{blocks}"
        try:
            rows[arm] = run(file, [*flags, *fit, *arms[arm]], gpus, blocks, STEPS, own)
        except RuntimeError as error:
            if "OutOfMemoryError" not in str(error) or blocks == least:
                raise ValueError(f"in {arm} with {blocks} blocks: {error} ({own})") from None
            blocks, rows = max(least, blocks // 2), {}
    speeds = [row["tokens/s"] for row in rows.values()]
    table = [["", "tokens/s", "x bf16", "GiB", "compute", "loss"]]
    for (arm, row), speed in zip(rows.items(), speeds):
        cells = [f"{row['GiB']:.1f}", f"{row['compute']:.0%}", f"{row['loss']:.4f}"]
        table.append([arm, f"{speed:,.0f}", f"{speed / speeds[0]:.2f}", *cells])
    print(text_table(table, right=range(1, 6)))
    return max(speeds[2:]) < max(speeds[:2])


if __name__ == "__main__":
    record(train.main)(Trainer)
