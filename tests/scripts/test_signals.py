"""Signals: a script that is ended ends all processes that it has started.

They run torchrun, but its two ranks only sleep.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLEEP = "import os, time; open(f'{os.environ[\"RANKS\"]}.{os.getpid()}', 'w'); time.sleep(300)"


@pytest.fixture
def start(tmp_path):
    """Starts scripts in a copy of the repository, where Python is a stub, and ends what is left."""
    for folder in ("scripts", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "rank.py").write_text(SLEEP)
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
        case "$*" in
            *distributed.run*) exec {sys.executable} -m torch.distributed.run \
                --nproc_per_node 2 {tmp_path}/rank.py ;;
            *device_count*) echo 0 ;;
        esac""")
    python.chmod(0o755)

    def call(*command: str) -> subprocess.Popen:
        variables = {"TITAN_FP8_PYTHON": python, "RANKS": tmp_path / "rank"}
        script = [tmp_path / "scripts" / command[0], *command[1:]]
        return subprocess.Popen(
            script,
            env=os.environ | {name: str(value) for name, value in variables.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=with_default_signals,
        )

    yield call
    for pid in running(tmp_path):
        with contextlib.suppress(ProcessLookupError):  # It may have ended by now.
            os.kill(pid, signal.SIGKILL)


def with_default_signals() -> None:
    """A shell cannot trap what its parent ignores, as jobs in the background and nohup do."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def running(folder: Path) -> list[int]:
    """The processes of scripts in this folder: they have its name in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"RANKS={folder}/rank".encode() in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:  # of another user, or ended
            continue
    return found


def wait_until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.1)


def end(script: subprocess.Popen, folder: Path, number: int) -> None:
    """Sends a signal when both ranks run."""
    wait_until(lambda: len([*folder.glob("rank.[0-9]*")]) == 2)
    assert len(running(folder)) > 5  # ranks, torchrun, tee, sed and shells
    script.send_signal(number)
    assert script.wait(60) == 128 + number
    wait_until(lambda: not running(folder))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_quickstart_ends_torchrun_and_its_ranks(start, tmp_path, number):
    end(start("quickstart.sh"), tmp_path, number)


def test_quickstart_ends_what_takes_no_signal(start, tmp_path):
    """torchrun that has lost the signal, and ranks in sessions of their own."""
    (tmp_path / "python").write_text(f"""#!/bin/bash
        case "$*" in
            *distributed.run*)
                trap '' TERM
                for _ in 1 2; do setsid {sys.executable} {tmp_path}/rank.py & done
                wait ;;
            *device_count*) echo 0 ;;
        esac""")
    end(start("quickstart.sh"), tmp_path, signal.SIGINT)


def test_a_second_quickstart_is_refused(start, tmp_path):
    (tmp_path / "python").write_text(f"""#!/bin/sh
        case "$*" in
            *distributed.run*) exec {sys.executable} {tmp_path}/rank.py ;;
            *device_count*) echo 0 ;;
        esac""")
    first = start("quickstart.sh")
    wait_until(lambda: [*tmp_path.glob("rank.[0-9]*")])
    second = start("quickstart.sh", "--steps", "5")
    assert second.wait(60) == 2
    assert "another quickstart is writing to outputs/quickstart/llama3" in second.stdout.read()
    assert first.poll() is None


def test_quickstart_keeps_folders_of_others(start, tmp_path):
    config = (ROOT / "configs/llama3_debug.toml").read_bytes()
    checksum = subprocess.run("cksum", input=config, capture_output=True).stdout.split()[0].decode()
    mine = tmp_path / f"outputs/quickstart/llama3/seed-{checksum}/mine"
    mine.parent.mkdir(parents=True)
    mine.touch()
    script = start("quickstart.sh")
    assert script.wait(60) == 2 and "is not of a quickstart" in script.stdout.read()
    assert mine.exists()
