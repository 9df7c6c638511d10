"""Trains many short runs, in arms that differ in one thing each, on all GPUs of this machine.

    python scripts/converge/run.py CONFIG [--arms A,B] [--seeds 1-12] [--minutes 9] [-- FLAG ...]

CONFIG is the TOML of a torchtitan job that lists titan_fp8's converters; a name without a folder is
a TOML beside this file. The seed of a run decides about its initial weights and the order of its
text, so the runs of one seed are pairs. Each ends with a line in the results file, and a run that
has its line there, or in a file after --known, is not repeated: the same command continues what was
stopped. With --minutes it stops in time, and starts no run that would not end by then.

FLAGs go to torchtitan in every run, and are part of what the runs must have in common.

Exit status: 0 when all runs are done, 1 if a process failed, 2 for bad arguments, and 3 if time was
up before.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import text as texts

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GRACE = 30.0
"""Seconds after --minutes that processes may take to end by themselves."""


@dataclass(frozen=True)
class Arm:
    """What the runs of an arm have in common, and differ in from those of other arms.

    Attributes:
        recipe: of titan_fp8, or None: its converters are replaced by torchao's.
        torchao: torchao's recipe for linears; its experts are always rowwise.
        converter: a model converter that is applied after those of the TOML.
        ulp: whether initial weights are moved to a neighboring number.
    """

    recipe: str | None = "bf16"
    torchao: str = ""
    converter: str = ""
    ulp: bool = False


ARMS = {
    "bf16": Arm(),
    "null": Arm(ulp=True),
    "blockwise": Arm("blockwise"),
    "rowwise": Arm("rowwise"),
    "blockwise_pow2": Arm("blockwise_pow2"),
    "rowwise_with_gw_hp": Arm("rowwise_with_gw_hp"),
    "torchao_rowwise": Arm(None, "rowwise"),
    "torchao_tensorwise": Arm(None, "tensorwise"),
    "errors": Arm(converter="converge.errors"),
    "control": Arm(converter="converge.control"),
}


@dataclass
class Job:
    """A process, or one per GPU, that trains runs of one arm one after another."""

    arm: str
    slot: int
    log: Path
    process: subprocess.Popen


def experiment(toml: Path, text: Path, flags: list[str]) -> str:
    """What the runs that are compared must have in common.

    Raises:
        ValueError: `text` is no text.
    """
    contents = [toml.read_bytes(), str(texts.read(text).digest).encode(), *map(str.encode, flags)]
    return f"{zlib.crc32(b'|'.join(contents)):08x}"


def commit() -> str:
    """The commit of this repository; the variable COMMIT names it for a copy without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=7"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() or os.environ.get("COMMIT", "unknown")


def done(files: list[Path], toml: Path, key: str) -> set[tuple[str, int]]:
    """The arms and seeds that have a line in one of the files.

    Raises:
        ValueError: a line is of the same model, but of another TOML, text or other flags.
    """
    found = set()
    for file in files:
        for line in file.read_text().splitlines():
            run = json.loads(line)
            if run["model"] != toml.stem:
                continue
            if run["experiment"] != key:
                raise ValueError(
                    f"{file} has runs of {toml.stem} with another TOML, another text or other "
                    "flags: name another results file"
                )
            found.add((run["arm"], run["seed"]))
    return found


def divided(missing: dict[str, list[int]], slots: int) -> list[tuple[str, list[int]]]:
    """Arms with seeds, so many at least that no slot is idle while there are runs for it."""
    parts = -(-slots // max(1, len(missing)))
    return [
        (arm, seeds[part::parts])
        for arm, seeds in missing.items()
        for part in range(min(parts, len(seeds)))
    ]


def launcher(gpus: int) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(gpus)]
    return [*command, "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]


def start(arm: str, seeds: list[int], slot: int, args: argparse.Namespace, until: float) -> Job:
    gpus = args.gpus_per_run
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if args.devices:
        mine = args.devices[slot * gpus : (slot + 1) * gpus]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    files = {name: str(getattr(args, name)) for name in ("toml", "text", "results")}
    job = {"arm": arm, "seeds": seeds, "until": until, "about": args.about, "flags": args.flags}
    command = [*launcher(gpus), str(HERE / "worker.py"), json.dumps({**files, **job})]
    log = Path(f"{args.results}.slot{slot}.log")
    with log.open("a") as file:
        file.write(f"{' '.join(command)}\n")
        file.flush()
        process = subprocess.Popen(
            command, env=env, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT
        )
    return Job(arm, slot, log, process)


def run_all(args: argparse.Namespace, missing: dict[str, list[int]]) -> bool:
    """Runs what is missing, until time is up. Returns whether a process failed."""
    until = time.time() + 60 * args.minutes
    slots = max(1, len(args.devices) // args.gpus_per_run)
    queue = divided(missing, slots)
    free, jobs, failed = [*range(slots)], [], False
    try:
        while jobs or (queue and time.time() < until):
            while queue and free and time.time() < until:
                print("arm {}, seeds {}".format(*queue[0]), flush=True)
                jobs.append(start(*queue.pop(0), free.pop(0), args, until))
            time.sleep(0.2)
            for job in [job for job in jobs if job.process.poll() is not None]:
                jobs.remove(job)
                free.append(job.slot)
                if job.process.returncode:
                    failed = True
                    tail = job.log.read_text(errors="replace").splitlines()[-40:]
                    print(f"{job.arm} failed; the end of {job.log}:", *tail, sep="\n", flush=True)
            if time.time() > until + GRACE:
                print(*(f"{job.arm} is stopped" for job in jobs), sep="\n", flush=True)
                break
    finally:
        for job in jobs:
            job.process.terminate()  # torchrun ends its ranks
        for job in jobs:
            job.process.wait()
    return failed


def seeds_of(text: str) -> list[int]:
    """ "1-3,7" means 1, 2, 3 and 7."""
    ranges = (part.split("-") for part in text.split(","))
    return [seed for ends in ranges for seed in range(int(ends[0]), int(ends[-1]) + 1)]


def visible_devices() -> list[str]:
    """The GPUs that the runs may use; none on a machine without."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    code = "import torch; print(torch.cuda.device_count())"
    count = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [str(i) for i in range(int(count.stdout))]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--arms", default=",".join(ARMS), help="default: all")
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-12"), help="default: 1-12")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--gpus-per-run", type=int, default=1)
    parser.add_argument("--text", type=Path, default=ROOT / "outputs/converge/text.npz")
    parser.add_argument("--results", type=Path, default=ROOT / "outputs/converge/results.jsonl")
    parser.add_argument("--known", type=Path, nargs="+", default=[], help="more results files")
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end])
    args.flags = argv[end + 1 :]
    args.toml = Path(args.config)
    if args.toml.parent == Path():
        args.toml = HERE / f"{args.toml.stem}.toml"
    args.arms = args.arms.split(",")
    for arm in args.arms:
        if arm not in ARMS:
            parser.error(f"there is no arm {arm!r}: allowed are {', '.join(ARMS)}")
    for file in (args.toml, args.text, *args.known):
        if not file.is_file():
            parser.error(f"no such file: {file} (docs/convergence.md says what makes it)")
    args.devices = visible_devices()
    if args.devices and len(args.devices) < args.gpus_per_run:
        parser.error(f"--gpus-per-run {args.gpus_per_run}: there are {len(args.devices)} GPUs")
    for name in ("toml", "text", "results"):
        setattr(args, name, getattr(args, name).resolve())
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the jobs
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.touch()
    try:
        key = experiment(args.toml, args.text, args.flags)
        there = done([args.results, *args.known], args.toml, key)
    except ValueError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    missing = {arm: [s for s in args.seeds if (arm, s) not in there] for arm in args.arms}
    missing = {arm: seeds for arm, seeds in missing.items() if seeds}
    args.about = {"model": args.toml.stem, "experiment": key, "commit": commit()}
    failed = run_all(args, missing)
    there = done([args.results, *args.known], args.toml, key)
    left = sum((arm, seed) not in there for arm in args.arms for seed in args.seeds)
    print(f"{len(args.arms) * len(args.seeds) - left} runs are done, {left} are left")
    return 1 if failed else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
