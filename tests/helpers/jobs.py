"""Training jobs in processes of their own."""

import os
import signal
import subprocess


def log_of(command: list[object], timeout: float, **env: str) -> str:
    """What all ranks of the job print. AssertionError, with its end, unless the job succeeds.

    Nothing of it outlives the call; subprocess.TimeoutExpired after `timeout` s.
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
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, log[-5000:]
    return log
