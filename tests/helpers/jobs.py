"""Runs a training job as a command."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path


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


def log_of(command: list[object], timeout: float, **env: str) -> str:
    """The output of all ranks of a job. No process of the job survives the call.

    Raises:
        AssertionError: the job failed; has the end of its output.
        subprocess.TimeoutExpired: it took longer than `timeout` seconds.
    """
    process = subprocess.Popen(
        list(map(str, command)),
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        log, _ = process.communicate(timeout=timeout)
    finally:
        # torchrun starts its ranks in sessions of their own.
        if process.poll() is None:
            kill_tree(process.pid)
    assert process.returncode == 0, log[-5000:]
    return log
