"""Runs a training job as a command."""

import os
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from converge_jobs import kill_tree


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
