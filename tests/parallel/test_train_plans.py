"""Stages of a pipeline train in FP8 with torchtitan's trainer, on text: the loss falls by 2.

`test_plans.py` checks what every plan computes, and other tests train under the other plans:
test_resume.py under FSDP2 and EP, test_health_plans.py and test_exchange_training.py under TP,
and test_training.py of torchtitan 0.3 under HSDP.
"""

import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from gloo import spawn
from parsing import parse_args
from plans import Plan
from titan import trainer, training
from titan_logs import merge, read_log
from torchtitan.tools.logging import init_logger

if torch.cuda.is_available():
    pytest.skip("ranks on gloo, for machines without a GPU", allow_module_level=True)

STEPS = 6
TIMEOUT = 240


def job(plan: Plan, recipe: str, text: Path, folder: Path) -> list[object]:
    """The command line of a training that writes to `folder`."""
    flags = [*plan.flags(recipe), *training(text, folder), "--training.steps", STEPS]
    flags += ["--model.flavor", "tiny", "--experimental.custom_import", "titan"]
    flags += ["--training.local_batch_size", 4 // plan.shares, "--optimizer.lr", 4e-3]
    return [*flags, "--checkpoint.enable", "--checkpoint.interval", 10 * STEPS]


def train(rank: int, flags: list[object], log: Path) -> None:
    """Trains as `torchtitan.train` does; the output of each rank goes to a file of its own."""
    with log.with_name(f"{log.name}-{rank}").open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    init_logger()
    with trainer(parse_args(flags)) as job:
        job.train()
    sys.stdout.flush()


def write_seed(rank: int, flags: list[object]) -> None:
    """Writes a checkpoint of step 0, as --checkpoint.create_seed_checkpoint does."""
    with trainer(parse_args(flags)) as alone:
        alone.checkpointer.save(curr_step=0, last_step=True)


def test_a_pipeline_trains(text, tmp_path):
    alone, plan = Plan("deepseek_v3"), Plan("deepseek_v3", pp=2)
    (tmp_path / "seed").mkdir()
    spawn(write_seed, 1, job(alone, "bf16", text, tmp_path / "seed"))
    flags = job(plan, "blockwise", text, tmp_path)
    flags += ["--checkpoint.initial_load_path", tmp_path / "seed/checkpoint/step-0"]
    spawn(train, plan.ranks, flags, tmp_path / "log", timeout=TIMEOUT)
    log = "".join(file.read_text() for file in sorted(tmp_path.glob("log-*")))
    converted = [int(count) for count in re.findall(r"titan_fp8: converted (\d+) of", log)]
    assert len(converted) == plan.ranks * len(plan.converters)
    assert min(converted) > 0
    loss = merge(read_log(log))["loss"]
    assert loss.keys() == set(range(1, STEPS + 1))
    assert all(map(math.isfinite, loss.values()))
    assert loss[STEPS] < loss[1] - 2
