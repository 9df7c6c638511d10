"""converge.py after a driver, a job or the machine was killed, and before a job can do harm."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import converge
import converge_jobs
from converge_arms import read_settings, write_settings
from converge_stats import read_held_out
from convergence_jobs import results

DRIVER = """
import pathlib, sys
import converge_jobs
converge_jobs.ROOT = root = pathlib.Path(sys.argv[1])
converge_jobs.launch(root / "m.toml", root / "out/bf16", (), 1, [], False)
print(flush=True)
sys.stdin.read()
"""


def test_jobs_end_with_a_driver_that_is_killed(tmp_path):
    (tmp_path / "scripts").mkdir()
    train = tmp_path / "scripts/train.sh"
    sleep = f"exec {sys.executable} -c 'import time; time.sleep(60)' \"$@\""
    train.write_text(f"#!/bin/sh\n{sleep}\n")
    train.chmod(0o755)
    environment = {"PYTHONPATH": str(Path(converge.__file__).parent), "PATH": "/usr/bin:/bin"}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert driver.stdout.readline() == b"\n"
    assert len(converge_jobs.left_behind(tmp_path / "out")) == 1
    assert not converge_jobs.left_behind(tmp_path / "ou")
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 20
    while converge_jobs.left_behind(tmp_path / "out"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nothing_starts_beside_a_job_that_was_left_behind(root, run):
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    job = subprocess.Popen([*command, "--job.dump_folder", results(root) / "bf16", "--steps"])
    try:
        status, text = run("--arms", "bf16")
        assert status == 2 and f"are still writing to {results(root)}" in text
        assert f"processes {job.pid}" in text and not (results(root) / "calls").exists()
    finally:
        job.kill()
        job.wait()
    assert run("--arms", "bf16")[0] == 0


def test_an_evaluation_that_was_cut_short_is_dropped_before_the_arm_goes_on(root, run):
    assert run("--arms", "bf16")[0] == 0
    file = results(root) / "bf16/held_out.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    assert run("--arms", "bf16")[0] == 0
    assert sorted(read_held_out(results(root) / "bf16")) == [20, 40, 60, 80, 100]


def test_an_arm_that_ended_before_it_could_be_resumed_was_not_killed(root, run):
    """Without the mark the verdict says that it was not killed."""
    assert run("--arms", "bf16")[0] == 0
    experiment = converge.read_experiment(converge.parse(["m"]))
    mark = results(root) / "bf16_resumed/killed"
    (results(root) / "bf16").rename(mark.parent)  # an arm that has ended
    process = subprocess.Popen(["sleep", "60"])
    job = converge_jobs.Job("bf16_resumed", (), process, Path(), 0, step=100)
    converge.kill_if_due(experiment, job)  # at its last step
    assert not mark.exists() and process.poll() is None
    job.step = 70  # as it was last seen
    converge.kill_if_due(experiment, job)
    assert mark.exists() and process.wait() == -signal.SIGKILL
    converge.finish(experiment, job, [], [])
    assert not mark.exists()
    converge.kill_if_due(experiment, job)  # after its end
    assert not mark.exists()


def test_another_tokenizer_is_another_experiment(root, run):
    (root / "tokenizer").mkdir()
    file = root / "tokenizer/tokenizer.json"
    flags = ("--", "--model.hf_assets_path", str(file.parent))
    file.write_text("a")
    assert run("--arms", "bf16", *flags)[0] == 0
    file.write_text("b")
    status, text = run("--arms", "bf16,blockwise", *flags)
    assert status == 2 and "holds an experiment with other settings" in text
    # Results from before the tokenizer was recorded can be gone on with.
    write_settings(results(root), replace(read_settings(results(root)), tokenizer=""))
    assert run("--arms", "bf16,blockwise", *flags)[0] == 0


def test_a_verdict_needs_tensorboard_files(root, run):
    status, text = run("--arms", "bf16", "--", "--metrics.no_enable_tensorboard")
    assert status == 2 and "metrics.enable_tensorboard = false" in text
