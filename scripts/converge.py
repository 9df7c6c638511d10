"""Runs the convergence experiment: one model, several arms, and the verdict on them.

    ./scripts/converge.sh MODEL [--arms ARM,ARM,...] [--steps N] [--minutes M] [--out DIR]
                          [--no-checkpoints] [-- FLAG ...]

MODEL is a TOML of configs/convergence, which also says on how many GPUs an arm runs: the product of
its degrees of parallelism. As many arms run in parallel as the GPUs allow. Without a GPU they run
one after the other, with FP8 emulated. FLAGs are passed to torchtitan, in every arm.

Results are in outputs/converge/MODEL or DIR: a folder for each arm with its log, TensorBoard events
and held_out.jsonl, and the verdict of converge_verdict.py. The same command continues where it was
stopped: finished arms are not run again, and others resume from their last checkpoint.
--minutes stops it after that time, and no arm starts later; seed checkpoints, from which arms
start, are not limited. The checkpoints of a finished arm are deleted.

With --no-checkpoints every arm initializes its weights from the TOML's seed and cannot be resumed:
for models whose checkpoints take longer than the run.

Exit status: that of the verdict; 2 for bad arguments; 3 if it was stopped, or arms failed.
"""

import argparse
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import converge_verdict
from converge_arms import ARMS, BASELINE, DEFAULT_ARMS, Arm
from converge_experiment import (
    CONFIGS,
    DEGREES,
    BadArguments,
    Experiment,
    opened,
    read_experiment,
    texts,
)
from converge_jobs import Job, devices, launch, stop_all, tail
from converge_stats import HELD_OUT, read_held_out
from titan_logs import InputError

POLL = 2.0  # seconds
REPORT = 30.0  # seconds between two lines of progress


class Failure(Exception):
    """What keeps the experiment from going on; the message says why."""


def make_seed(experiment: Experiment, gpus: tuple[str, ...], perturbed: int) -> None:
    """Writes a checkpoint that arms start from: weights only, in one process."""
    seed = experiment.seed(perturbed)
    if (seed / ".metadata").is_file():
        return
    print(f"== seed checkpoint: {seed.parents[1].name}", flush=True)
    shutil.rmtree(seed.parents[1], ignore_errors=True)
    arm = Arm("bf16", perturbed=perturbed)
    flags = [*experiment.settings.flags, "--checkpoint.create_seed_checkpoint"]
    flags += ["--validation.no_enable"]
    flags += ["--parallelism.expert_parallel_degree", "1", *arm_flags(arm, experiment)]
    flags += [word for degree in DEGREES for word in (f"--parallelism.{degree}", "1")]
    deterministic = experiment.deterministic
    job = launch(experiment.toml, seed.parents[1], gpus[:1], 1, flags, deterministic)
    try:
        if job.process.wait():
            raise Failure(f"{tail(job.log)}the seed checkpoint failed: {job.log}")
    finally:
        stop_all([job])


def reorder(experiment: Experiment, number: int) -> Path:
    """The training text with its lines in another order, the same for each number."""
    folder = experiment.results / f"reordered_{number}"
    if not (folder / "text.jsonl").is_file():
        lines = [line for file in texts(str(experiment.corpus)) for line in file.open("rb")]
        random.Random(number).shuffle(lines)
        folder.mkdir(exist_ok=True)
        (folder / "text.part").write_bytes(b"".join(lines))
        (folder / "text.part").rename(folder / "text.jsonl")
    return folder


def arm_flags(arm: Arm, experiment: Experiment) -> list[str]:
    """What an arm changes in the TOML, except the text."""
    flags = ["--quantize.linear.titan_fp8.recipe", arm.recipe]
    if arm.converter:
        converters = [*experiment.config["model"]["converters"], arm.converter]
        flags += ["--model.converters", ",".join(converters)]
    if arm.rounding:
        flags += ["--optimizer.rounding_seed", str(arm.rounding)]
    if arm.perturbed:
        flags += ["--optimizer.perturbation_seed", str(arm.perturbed)]
    return flags


def start(experiment: Experiment, name: str, gpus: tuple[str, ...]) -> Job:
    """Starts an arm, or goes on with it."""
    arm, settings, folder = ARMS[name], experiment.settings, experiment.folder(name)
    flags = [*settings.flags, *arm_flags(arm, experiment)]
    flags += ["--training.steps", str(settings.steps)]
    flags += ["--lr_scheduler.warmup_steps", str(settings.warmup)]
    if arm.reordered:
        flags += ["--training.dataset_path", str(reorder(experiment, arm.reordered))]
    if experiment.checkpoints:
        flags += ["--checkpoint.initial_load_path", str(experiment.seed(arm.perturbed))]
        drop_cut_line(folder)
        drop_unusable_checkpoints(experiment, name)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    ranks, deterministic = experiment.ranks, experiment.deterministic
    return launch(experiment.toml, folder, gpus, ranks, flags, deterministic)


def drop_cut_line(folder: Path) -> None:
    """Drops a last evaluation that was cut short, or the next one would be written behind it."""
    file = folder / HELD_OUT
    if file.exists():
        os.truncate(file, file.read_bytes().rfind(b"\n") + 1)


def drop_unusable_checkpoints(experiment: Experiment, name: str) -> None:
    """Deletes checkpoints that are cut short, or later than an evaluation that was missed.

    From a folder without a whole checkpoint torchtitan would start with random weights. It saves
    before it evaluates, so a job killed in between would resume without that evaluation.
    """
    folder = experiment.folder(name) / "checkpoint"
    evaluated, every = read_held_out(experiment.folder(name)), experiment.settings.every
    for checkpoint in folder.glob("step-*"):
        step = int(checkpoint.name.removeprefix("step-"))
        missed = set(range(every, step + 1, every)) - evaluated.keys()
        if missed or not (checkpoint / ".metadata").is_file():
            shutil.rmtree(checkpoint)
    if not any(folder.glob("step-*")):
        shutil.rmtree(folder, ignore_errors=True)


def slots(ranks: int) -> list[tuple[str, ...]]:
    """Disjoint groups of GPUs, one for each arm that can run at the same time.

    Raises:
        BadArguments: there are fewer GPUs than an arm needs.
    """
    gpus = devices()
    if not gpus:
        return [()]
    if len(gpus) < ranks:
        raise BadArguments(f"an arm needs {ranks} GPUs, this machine has {len(gpus)}")
    return [gpus[i : i + ranks] for i in range(0, len(gpus) - ranks + 1, ranks)]


def remaining(jobs: list[Job], waiting: int, places: int, steps: int) -> str:
    """The time until all arms are finished, if they keep their speed; empty before any has one."""
    speeds = [speed for job in jobs if (speed := job.seconds_per_step())]
    if not speeds:
        return ""
    speed = sum(speeds) / len(speeds)
    left = max((steps - job.step) * (job.seconds_per_step() or speed) for job in jobs)
    left += math.ceil(waiting / places) * steps * speed
    return f"{timedelta(seconds=round(left))} left"


def kill_if_due(experiment: Experiment, job: Job) -> None:
    """Kills a resumed arm between two checkpoints in the middle, once."""
    mark = experiment.folder(job.name) / "killed"
    interval = experiment.config["checkpoint"]["interval"]
    due = experiment.settings.steps // 2 + interval // 2
    is_due = due <= job.step < experiment.settings.steps and job.process.poll() is None
    if ARMS[job.name].role == "resumed" and is_due and not mark.exists():
        mark.write_text(f"step {job.step}\n")
        job.kill()


def run(
    experiment: Experiment, names: list[str], groups: list[tuple[str, ...]], deadline: float
) -> list[str]:
    """Runs arms, each on a group of GPUs, until all are finished; returns those that failed.

    Raises:
        Failure: the deadline came first; no arm is started after it.
    """
    queue = [name for name in names if not experiment.is_done(name)]
    free, jobs, failed = list(groups), [], []
    places, reported = len(free), 0.0
    try:
        while queue or jobs:
            if time.monotonic() > deadline:
                raise Failure("the time is up: the same command goes on")
            while queue and free:
                jobs.append(start(experiment, queue.pop(0), free.pop(0)))
                print(f"== {jobs[-1].name}", *jobs[-1].gpus, flush=True)
            time.sleep(POLL)
            for job in list(jobs):
                job.read()
                kill_if_due(experiment, job)
                if job.process.poll() is None:
                    continue
                jobs.remove(job)
                free.append(job.gpus)
                finish(experiment, job, queue, failed)
            if time.monotonic() - reported >= REPORT and jobs:
                reported = time.monotonic()
                left = remaining(jobs, len(queue), places, experiment.settings.steps)
                print(*progress(jobs, experiment.settings.steps), left, flush=True)
    finally:
        stop_all(jobs)
    return failed


def missing_references(experiment: Experiment, names: list[str]) -> list[str]:
    """Arms that the others are compared with, and that neither have run nor will."""
    references = dict.fromkeys([BASELINE, *(twin for name in names if (twin := ARMS[name].twin))])
    return [name for name in references if name not in names and not experiment.is_done(name)]


def progress(jobs: list[Job], steps: int) -> Iterator[str]:
    yield f"{datetime.now():%H:%M:%S}"
    for job in jobs:
        state = "starting" if job.loss is None else f"{job.step}/{steps} loss {job.loss:.4f}"
        yield f" {job.name} {state} "


def finish(experiment: Experiment, job: Job, queue: list[str], failed: list[str]) -> None:
    """What follows the end of a job: nothing, a second launch, or a failure."""
    folder = experiment.folder(job.name)
    if experiment.is_done(job.name):
        if job.process.returncode == -signal.SIGKILL:  # too late to be resumed
            (folder / "killed").unlink(missing_ok=True)
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        print(f"== {job.name} is finished", flush=True)
    elif job.process.returncode == -signal.SIGKILL and (folder / "killed").exists():
        queue.insert(0, job.name)
        print(f"== {job.name} was killed at step {job.step} and is resumed", flush=True)
    else:
        failed.append(job.name)
        print(f"{tail(job.log)}== {job.name} failed: {job.log}", flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    models = sorted(path.stem for path in CONFIGS.glob("*.toml"))
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model", choices=models, metavar="MODEL", help=", ".join(models))
    parser.add_argument("--arms", default=",".join(DEFAULT_ARMS), help=f"of {', '.join(ARMS)}")
    parser.add_argument("--steps", type=int, help="default: the TOML's; a tenth is warm-up")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results")
    parser.add_argument("--no-checkpoints", action="store_true")
    words = sys.argv[1:] if argv is None else argv
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.flags = words[end + 1 :]
    args.arms = args.arms.split(",")
    if unknown := [name for name in args.arms if name not in ARMS]:
        parser.error(f"no arm {unknown[0]!r}: allowed are {', '.join(ARMS)}")
    if args.steps is not None and args.steps < 10:
        parser.error(f"--steps must be at least 10, not {args.steps}")
    if twice := [name for name in args.arms if args.arms.count(name) > 1]:
        parser.error(f"--arms names {twice[0]} more than once")
    needs = [name for name in args.arms if ARMS[name].twin]
    if args.no_checkpoints and needs:
        parser.error(f"--no-checkpoints: {needs[0]} needs checkpoints")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    deadline = time.monotonic() + 60 * args.minutes
    try:
        experiment = read_experiment(args)
        groups = slots(experiment.ranks)
        with opened(experiment):
            for name in missing_references(experiment, args.arms):
                print(f"== the verdict also needs the arm {name}", flush=True)
            if experiment.checkpoints:
                for perturbed in sorted({ARMS[name].perturbed for name in args.arms}):
                    make_seed(experiment, devices(), perturbed)
            if failed := run(experiment, args.arms, groups, deadline):
                raise Failure(f"failed: {', '.join(failed)}")
    except (BadArguments, InputError) as error:
        print(f"converge: error: {error}", file=sys.stderr)
        return 2
    except (Failure, KeyboardInterrupt) as stop:
        print(f"converge: {str(stop) or 'stopped'}", file=sys.stderr)
        return 3
    return converge_verdict.main([str(experiment.results)])


if __name__ == "__main__":
    for stop in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(stop) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(stop, signal.default_int_handler)
    sys.exit(main())
