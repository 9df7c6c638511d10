"""The arms and the processes of a convergence experiment."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import converge
import converge_jobs
import pytest
from converge_arms import ARMS, Arm
from converge_experiment import BadArguments, check_arm


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_compiler_is_deterministic_if_the_job_is(deterministic):
    found = converge_jobs.environment((), 1, deterministic).get("TORCHINDUCTOR_DETERMINISTIC")
    assert found == ("1" if deterministic else None)


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


def test_remaining_time():
    jobs = []
    for step, seconds in ((50, 100.0), (25, 100.0)):
        job = converge_jobs.Job("a", (), None, Path(), 0, step=step)
        job.first = (time.monotonic() - seconds, 0)
        jobs.append(job)
    # 2 and 4 seconds a step: 300 s until the slower one ends, then one round of 100 steps at 3 s
    assert converge.remaining(jobs, 2, 2, 100) == "0:10:00 left"


def test_an_arm_without_a_logged_step_is_starting():
    starting = converge_jobs.Job("a", (), None, Path(), 0)
    assert converge.remaining([starting], 0, 1, 100) == ""
    _, *arms = converge.progress([starting, replace(starting, name="b", step=7, loss=2.5)], 100)
    assert arms == [" a starting ", " b 7/100 loss 2.5000 "]


def test_every_arm_is_one_change():
    """From other weights, it is one change of the bf16 arm from these, and repeats another arm."""
    for name, arm in ARMS.items():
        assert arm.twin is None or ARMS[arm.twin].recipe == arm.recipe
        repeated = arm.recipe != "bf16" or arm.converter
        if repeated and arm.perturbed:
            assert Arm("bf16", perturbed=arm.perturbed) in ARMS.values()
            assert replace(arm, perturbed=0) in ARMS.values()
        others = arm.reordered, arm.rounding
        assert sum(map(bool, (repeated or arm.perturbed, *others))) <= 1, name
        assert arm.recipe == "bf16" or not arm.converter, name


@pytest.mark.parametrize("experts", ["blockwise", "rowwise"])
def test_a_recipe_of_experts_would_hold_for_bf16_arms_too(experts):
    section = {"recipe": experts}
    config = {"checkpoint": {"interval": 1}, "training": {"dtype": "float32"}}
    config |= {"quantize": {"grouped_mm": {"titan_fp8": section}}}
    with pytest.raises(BadArguments, match=f"recipe = '{experts}' would be the recipe of experts"):
        check_arm("bf16", config, 100)
    for allowed in (None, "bf16"):
        section["recipe"] = allowed
        check_arm("bf16", config, 100)
