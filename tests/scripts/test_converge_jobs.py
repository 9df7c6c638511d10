"""The processes of a convergence experiment."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import converge_jobs
import pytest


@pytest.mark.parametrize("flags", [["--debug.deterministic"], ["--debug.seed", "1"]])
def test_the_compiler_is_deterministic_if_the_job_is(flags):
    found = converge_jobs.environment((), 1, flags).get("TORCHINDUCTOR_DETERMINISTIC")
    assert found == ("1" if "--debug.deterministic" in flags else None)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except OSError:
        return False


def test_kill_ends_ranks_in_process_groups_of_their_own(tmp_path):
    script = "import subprocess as s; s.Popen(['sleep', '60'], start_new_session=True).wait()"
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    job = converge_jobs.Job("a", (), process, Path(), 0)
    while not (ranks := converge_jobs.descendants(process.pid)):
        time.sleep(0.02)
    job.kill()
    assert process.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.02)
