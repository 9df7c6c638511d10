"""The processes of the convergence experiment: starting, reading and stopping a training job."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import torch
from titan_logs import read_log

ROOT = Path(__file__).parents[1]
LOG = "train.log"
GRACE = 30.0  # seconds from SIGTERM to SIGKILL
PR_SET_PDEATHSIG = 1  # of prctl(2)


@dataclass
class Job:
    """A process of an arm, on its GPUs."""

    name: str
    gpus: tuple[str, ...]
    process: subprocess.Popen
    log: Path
    log_start: int
    started: float = field(default_factory=time.monotonic)
    first: tuple[float, int] | None = None
    step: int = 0
    loss: float | None = None

    def read(self) -> None:
        """Updates the step and the loss from what the log says since this process started."""
        with self.log.open(encoding="utf-8", errors="replace") as file:
            file.seek(self.log_start)
            losses = [scalar for scalar in read_log(file.read()) if scalar.name == "loss"]
        if losses:
            self.step, self.loss = losses[-1].step, losses[-1].value
            self.first = self.first or (time.monotonic(), self.step)

    def seconds_per_step(self) -> float | None:
        """Without start-up and compilation; None until two steps were seen."""
        if self.first is None or self.step == self.first[1]:
            return None
        return (time.monotonic() - self.first[0]) / (self.step - self.first[1])

    def terminate(self) -> None:
        """Asks torchrun to stop its ranks and itself."""
        if self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        if self.process.poll() is None:
            kill_tree(self.process.pid)


def kill_tree(pid: int) -> None:
    """Kills a process and its descendants: each rank of torchrun has a session of its own."""
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *descendants(child)]
    return found


def left_behind(results: Path) -> list[int]:
    """Processes of jobs that write below a results folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            if os.fsencode(f"--job.dump_folder\0{results}/") in file.read_bytes():
                found.append(int(file.parent.name))
    return found


def devices() -> tuple[str, ...]:
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(visible.split(",")[:count] if visible else map(str, range(count)))


def environment(gpus: tuple[str, ...], ranks: int, deterministic: bool) -> dict[str, str]:
    path = f"{ROOT / 'scripts'}{os.pathsep}{os.environ.get('PYTHONPATH', ROOT)}"
    env = os.environ | {"PYTHONPATH": path, "TITAN_FP8_PYTHON": sys.executable, "LOG_RANK": "0"}
    env |= {"NGPU": str(ranks), "HF_HUB_OFFLINE": "1"}
    if deterministic:
        # Or Inductor times variants of a kernel, and a resumed job may choose another one.
        env["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    return env | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def end_with_parent() -> None:
    """Has this process sent SIGTERM when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def launch(
    toml: Path,
    folder: Path,
    gpus: tuple[str, ...],
    ranks: int,
    flags: list[str],
    deterministic: bool,
) -> Job:
    """Starts a job in a process group of its own; its log is appended to that of the folder.

    Args:
        deterministic: makes the compiler deterministic, too; `debug.deterministic` of the job.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(ROOT / "scripts/train.sh"), str(toml), "--job.dump_folder"]
    command += [str(folder), *flags]
    with (folder / LOG).open("a") as log:
        log_start = log.tell()
        log.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {' '.join(command)}\n")
        log.flush()
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(gpus, ranks, deterministic),
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    return Job(folder.name, gpus, process, folder / LOG, log_start)


def tail(log: Path) -> str:
    return "".join(log.read_text(errors="replace").splitlines(keepends=True)[-30:])


def stop_all(jobs: list[Job]) -> None:
    """Ends all jobs; after GRACE seconds those that did not end on their own are killed."""
    for job in jobs:
        job.terminate()
    end = time.monotonic() + GRACE
    while time.monotonic() < end and any(job.process.poll() is None for job in jobs):
        time.sleep(0.2)
    for job in jobs:
        job.kill()
