"""Runs the convergence experiment: one model, several arms, and the verdict on them.

    ./scripts/converge.sh MODEL [--arms ARM,ARM,...] [--steps N] [--minutes M] [--out DIR]
                          [--no-checkpoints] [-- FLAG ...]

MODEL is a TOML of configs/convergence, which also says on how many GPUs an arm runs: the product of
its degrees of parallelism. As many arms run in parallel as the GPUs allow. Without a GPU they run
one after the other, with FP8 emulated. FLAGs are passed to torchtitan, in every arm.

Results are in outputs/converge/MODEL or DIR: a folder for each arm with its log, TensorBoard events
and held_out.jsonl, and the verdict of converge_verdict.py. The same command continues where it was
stopped: finished arms are not run again, and others resume from their last checkpoint.
--minutes stops it after that time. The checkpoints of a finished arm are deleted.

With --no-checkpoints every arm initializes its weights from the TOML's seed and cannot be resumed:
for models whose checkpoints take longer than the run.

Exit status: that of the verdict; 2 for bad arguments; 3 if it was stopped, or arms failed.
"""

import argparse
import hashlib
import json
import math
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import converge_verdict
from converge_arms import ARMS, DEFAULT_ARMS, Arm, Settings, read_settings, write_settings
from converge_jobs import ROOT, Job, devices, launch, stop_all, tail
from converge_stats import read_held_out
from titan_logs import InputError
from torchtitan.config import ConfigManager

try:
    import tomllib
except ImportError:
    import tomli as tomllib

CONFIGS = ROOT / "configs/convergence"
POLL = 2.0  # seconds
REPORT = 30.0  # seconds between two lines of progress
DEGREES = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree")
DEGREES += ("pipeline_parallel_degree", "context_parallel_degree")


class Failure(Exception):
    """What keeps the experiment from going on; the message says why."""


@dataclass
class Experiment:
    """A model, its TOML and the folder of its results.

    Attributes:
        config: the TOML, with torchtitan's defaults and with the flags.
    """

    toml: Path
    config: dict[str, Any]
    results: Path
    settings: Settings
    checkpoints: bool

    @property
    def ranks(self) -> int:
        return ranks_of(self.config)

    @property
    def corpus(self) -> Path:
        return Path(self.config["training"]["dataset_path"])

    def folder(self, name: str) -> Path:
        return self.results / name

    def seed(self, perturbed: int) -> Path:
        name = f"seed_ulp_{perturbed}" if perturbed else "seed"
        return self.results / name / "checkpoint/step-0"

    def is_done(self, name: str) -> bool:
        return self.settings.steps in read_held_out(self.folder(name))


def ranks_of(config: dict[str, Any]) -> int:
    return math.prod(config["parallelism"][degree] for degree in DEGREES)


def digest(*contents: bytes) -> str:
    total = hashlib.sha256()
    for content in contents:
        total.update(hashlib.sha256(content).digest())
    return total.hexdigest()[:16]


def texts(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).glob("*.jsonl"))
    if not found:
        raise Failure(
            f"no text in {folder}: scripts/prepare_data.py makes it (docs/convergence.md)"
        )
    return found


def open_experiment(args: argparse.Namespace) -> Experiment:
    """Reads the TOML and checks it against what the results folder holds already.

    Raises:
        Failure: the TOML, the text or the earlier results do not fit.
    """
    toml = CONFIGS / f"{args.model}.toml"
    without_flags = json.dumps(tomllib.loads(toml.read_text()), sort_keys=True).encode()
    # As the jobs will read it. torchtitan exits with 2 after flags that it does not know.
    config = ConfigManager().parse_args(["--job.config_file", str(toml), *args.flags]).to_dict()
    training, validation = config["training"], config["validation"]
    steps, every, ranks = args.steps or training["steps"], validation["freq"], ranks_of(config)
    if steps % every:
        raise Failure(f"{steps} steps are no multiple of validation.freq = {every}")
    if ranks < 1:
        raise Failure(f"{toml.name} must say every degree of parallelism, not -1")
    if config["debug"]["seed"] is None:
        raise Failure(f"{toml.name} must set debug.seed, or arms would start from other weights")
    read = [*texts(training["dataset_path"]), *texts(validation["dataset_path"])]
    batch = training["global_batch_size"]
    batch = batch if batch > 0 else training["local_batch_size"] * ranks
    settings = Settings(
        model=args.model,
        steps=steps,
        warmup=steps // 10,
        every=every,
        tokens=batch * training["seq_len"],
        config=digest(without_flags),
        text=digest(*(file.read_bytes() for file in read)),
        flags=[*args.flags, *(["--checkpoint.no_enable"] if args.no_checkpoints else [])],
    )
    results = (args.out or ROOT / "outputs/converge" / args.model).resolve()
    results.mkdir(parents=True, exist_ok=True)
    before = read_settings(results)
    if before is None:
        write_settings(results, settings)
    elif before != settings:
        raise Failure(f"{results} holds an experiment with other settings: name another --out")
    return Experiment(toml, config, results, settings, not args.no_checkpoints)


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
    job = launch(experiment.toml, seed.parents[1], gpus[:1], 1, flags)
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
        drop_unusable_checkpoints(experiment, name)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return launch(experiment.toml, folder, gpus, experiment.ranks, flags)


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
    """Disjoint groups of GPUs, one for each arm that can run at the same time."""
    gpus = devices()
    if not gpus:
        return [()]
    if len(gpus) < ranks:
        raise Failure(f"an arm needs {ranks} GPUs, this machine has {len(gpus)}")
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
    if ARMS[job.name].role == "resumed" and job.step >= due and not mark.exists():
        mark.write_text(f"step {job.step}\n")
        job.kill()


def run(experiment: Experiment, names: list[str], deadline: float) -> list[str]:
    """Runs arms until all are finished; returns those that failed.

    Raises:
        Failure: the deadline came first.
    """
    queue = [name for name in names if not experiment.is_done(name)]
    free, jobs, failed = slots(experiment.ranks), [], []
    places, reported = len(free), 0.0
    try:
        while queue or jobs:
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
            if time.monotonic() > deadline and jobs:
                raise Failure("the time is up: the same command goes on")
    finally:
        stop_all(jobs)
    return failed


def progress(jobs: list[Job], steps: int) -> Iterator[str]:
    yield f"{datetime.now():%H:%M:%S}"
    for job in jobs:
        state = "starting" if job.loss is None else f"{job.step}/{steps} loss {job.loss:.4f}"
        yield f" {job.name} {state} "


def finish(experiment: Experiment, job: Job, queue: list[str], failed: list[str]) -> None:
    """What follows the end of a job: nothing, a second launch, or a failure."""
    folder = experiment.folder(job.name)
    if experiment.is_done(job.name):
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
    needs = [name for name in args.arms if ARMS[name].twin]
    if args.no_checkpoints and needs:
        parser.error(f"--no-checkpoints: {needs[0]} needs checkpoints")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    deadline = time.monotonic() + 60 * args.minutes
    try:
        experiment = open_experiment(args)
        if experiment.checkpoints:
            for perturbed in sorted({ARMS[name].perturbed for name in args.arms}):
                make_seed(experiment, devices(), perturbed)
        if failed := run(experiment, args.arms, deadline):
            raise Failure(f"failed: {', '.join(failed)}")
    except (Failure, InputError, KeyboardInterrupt) as stop:
        print(f"converge: {str(stop) or 'stopped'}", file=sys.stderr)
        return 3
    return converge_verdict.main([str(experiment.results)])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
