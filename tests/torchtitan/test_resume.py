"""A run that is killed and resumed has the losses of an uninterrupted run.

Two processes train the tiny DeepSeekV3 in FP8 under FSDP2 and expert parallelism and are killed by
SIGKILL between two checkpoints. Started again, the same job resumes from the last checkpoint.
"""

import os
import signal
from pathlib import Path

import gloo
import pytest
from titan import one_process, parse, toml, trainer, training
from titan_logs import merge, read_folder
from torch.multiprocessing import ProcessExitedException

STEPS, INTERVAL, KILLED_AT = 4, 2, 4
CHECKPOINT = ("--checkpoint.enable", "--checkpoint.interval", INTERVAL)
PARALLEL = ("--parallelism.expert_parallel_degree", 2)

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")


def train(rank: int, folder: Path, flags: list[object], starts_at: int, killed_at: int) -> None:
    """Trains on one rank, which is killed in step `killed_at`."""
    (folder / str(rank)).mkdir(exist_ok=True)
    with trainer(parse(folder / str(rank), toml("deepseek_v3"), *flags)) as t:
        train_step = t.train_step

        def train_step_or_die(batches):
            assert t.step >= starts_at
            if t.step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            train_step(batches)

        t.train_step = train_step_or_die
        t.train()
        assert t.step == STEPS


def test_a_killed_run_resumes_with_the_losses_of_one_that_was_not(text, tmp_path):
    seed, whole, killed = (tmp_path / name for name in ("seed", "whole", "killed"))
    for folder in (seed, whole, killed):
        folder.mkdir()
    with one_process():
        config = parse(seed, toml("deepseek_v3"), *training(text, seed), *CHECKPOINT)
        with trainer(config) as one:
            one.checkpointer.save(curr_step=0, last_step=True)

    def run(folder: Path, starts_at: int = 1, killed_at: int = 0) -> dict[int, float]:
        flags = [*training(text, folder), "--training.steps", STEPS, *CHECKPOINT, *PARALLEL]
        flags += ["--checkpoint.initial_load_path", seed / "checkpoint/step-0"]
        flags += ["--metrics.enable_tensorboard"]
        gloo.spawn(train, 2, folder, flags, starts_at, killed_at)
        return merge(read_folder(folder)[0])["loss"]

    expected = run(whole)
    assert expected.keys() == set(range(1, STEPS + 1))
    with pytest.raises(ProcessExitedException) as died:
        run(killed, killed_at=KILLED_AT)
    assert died.value.signal_name == "SIGKILL"
    resumed = run(killed, starts_at=INTERVAL + 1)
    steps = range(INTERVAL + 1, STEPS + 1)
    assert {step: resumed[step] for step in steps} == {step: expected[step] for step in steps}
    assert expected[STEPS] < expected[1] - 0.1
