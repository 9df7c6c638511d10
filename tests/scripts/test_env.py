"""env.sh: which Python it chooses, and what it installs where."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOR_TESTS_ONLY = ("mypy", "transformers")


@pytest.fixture
def prepare(tmp_path):
    """Sources env.sh of a copy of the repository and runs commands; nothing is really installed.

    The python3 on PATH is this one without the packages that only tests need.
    """
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/env.sh", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    site, python = tmp_path / "site", tmp_path / "bin/python3"
    site.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(FOR_TESTS_ONLY):
            (site / entry.name).symlink_to(entry)
    python.parent.mkdir()
    start = f'#!/bin/sh\n[ "$2" = venv ] || PYTHONPATH={site} exec {sys.executable} -S "$@"\n'
    python.write_text(start)
    python.chmod(0o755)
    (tmp_path / "bin/nvidia-smi").symlink_to("/bin/false")
    env = {name: value for name, value in os.environ.items() if name != "TITAN_FP8_PYTHON"}
    stubs = "install_into() { echo install $1 $2 ${@: -1}; }"

    def call(commands: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", "-euc", f"source scripts/env.sh; {stubs}; {commands}"],
            cwd=tmp_path,
            env=env | {"PATH": f"{python.parent}:{env['PATH']}"},
            capture_output=True,
            text=True,
        )

    return call


def test_a_python_without_what_tests_need_is_used_and_left_alone(prepare, tmp_path):
    result = prepare("prepare_env; echo $python; prepare_env scripts; echo $python")
    assert result.stdout == "python3\npython3\n"
    assert not (tmp_path / ".venv").exists()


def test_what_tests_need_is_installed_for_tests_once(prepare, tmp_path):
    venv = tmp_path / ".venv"
    result = prepare("prepare_env dev; echo $python; prepare_env dev")
    assert "lacks mypy" in result.stdout and result.stdout.count("install ") == 1
    assert f"install {venv}" in result.stdout and f"-e{tmp_path}[dev]\n{venv}" in result.stdout


def test_a_venv_of_others_is_never_installed_into(prepare, tmp_path):
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(tmp_path / "bin/python3")
    (tmp_path / ".venv/stamp").write_text("unfinished\n")
    result = prepare("prepare_env dev")
    assert result.returncode == 2 and "install " not in result.stdout
    assert f"these scripts have not created {tmp_path}/.venv, and it lacks mypy" in result.stderr
    python.unlink()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    result = prepare("prepare_env dev; echo $python")
    assert result.stdout == f"{python}\n"


def test_an_environment_of_others_for_torchtitan_0_3_is_kept(prepare, tmp_path):
    for name in ("stamp", "notes"):
        (tmp_path / "venv").mkdir(exist_ok=True)
        (tmp_path / "venv" / name).write_text("mine")
    result = prepare("python=python3; make_venv_0_3 venv stamp shared package")
    assert result.returncode == 2 and "these scripts have not created venv" in result.stderr
    assert {file.read_text() for file in (tmp_path / "venv").iterdir()} == {"mine"}
    assert (tmp_path / "venv/notes").exists()


def test_an_environment_for_scripts_grows_when_tests_run(prepare, tmp_path):
    start = f'#!/bin/sh\n[ "$2" = venv ] || exec {sys.executable} -S "$@"\n'
    (tmp_path / "bin/python3").write_text(start)
    result = prepare("prepare_env; prepare_env dev; prepare_env")
    installed = [line for line in result.stdout.splitlines() if line.startswith("install ")]
    assert [line.rpartition("[")[2] for line in installed] == ["scripts]", "dev]"]
