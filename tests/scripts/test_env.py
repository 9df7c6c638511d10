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
VENV = f"""#!/bin/sh
if [ "$2" = venv ]; then
    mkdir -p "$3/bin" "$3/lib/python3/site-packages"
    printf '#!/bin/sh\\n[ "$2" = pip ] && echo "$@" || exec {sys.executable} "$@"' >"$3/bin/python"
    chmod +x "$3/bin/python"
    exit
fi
"""
"""Creates an environment in which pip only says what it would install."""


@pytest.fixture
def prepare(tmp_path):
    """Sources env.sh of a copy of the repository and runs commands.

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
    python.write_text(f'{VENV}PYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    (tmp_path / "bin/nvidia-smi").symlink_to("/bin/false")
    env = {name: value for name, value in os.environ.items() if name != "TITAN_FP8_PYTHON"}

    def call(commands: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", "-euc", f"source scripts/env.sh; {commands}"],
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


def test_training_needs_what_pip_installs_of_the_package(prepare, tmp_path):
    (tmp_path / "site/matplotlib").unlink()
    for info in (tmp_path / "site").glob("matplotlib-*"):
        info.unlink()
    result = prepare("prepare_env ''; echo $python; prepare_env")
    assert result.stdout.startswith("python3\nenv: the python3 on PATH lacks matplotlib\n")


def test_what_tests_need_is_installed_for_tests_once(prepare, tmp_path):
    result = prepare("prepare_env dev; echo $python; prepare_env dev; prepare_env")
    assert "lacks mypy" in result.stdout and result.stdout.count("installing") == 1
    assert f"{tmp_path}/.venv/bin/python\n" in result.stdout
    assert f"-e{tmp_path}[dev]" in (tmp_path / ".venv/install.log").read_text()


def test_an_environment_for_scripts_grows_when_tests_run(prepare, tmp_path):
    python = tmp_path / "bin/python3"
    python.write_text(f'{VENV}exec {sys.executable} -S "$@"\n')
    result = prepare("prepare_env; prepare_env dev; prepare_env")
    installed = [line for line in result.stdout.splitlines() if "installing" in line]
    assert [line.partition("[")[2].partition("]")[0] for line in installed] == ["scripts", "dev"]


def test_an_installation_that_failed_is_tried_again(prepare, tmp_path):
    python = tmp_path / "bin/python3"
    for pip, status, message in (("exit 1 #", 2, "could not install torch=="), ("echo", 0, "")):
        stub = VENV.replace("&& echo", f"&& {pip}")
        python.write_text(f'{stub}exec {sys.executable} -S "$@"\n')
        result = prepare("prepare_env")
        assert result.returncode == status and message in result.stderr
        assert "installing" in result.stdout


def test_a_venv_of_others_is_never_installed_into(prepare, tmp_path):
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(tmp_path / "bin/python3")
    (tmp_path / ".venv/stamp").write_text("unfinished\n")
    result = prepare("prepare_env dev")
    assert result.returncode == 2 and "installing" not in result.stdout
    assert f"these scripts have not created {tmp_path}/.venv, and it lacks mypy" in result.stderr
    python.unlink()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    result = prepare("prepare_env dev; echo $python")
    assert result.stdout == f"{python}\n"


def test_an_environment_of_others_for_torchtitan_0_3_is_kept(prepare, tmp_path):
    venv = tmp_path / "build/venv-torchtitan-0.3"
    venv.mkdir(parents=True)
    for name in ("stamp", "notes"):
        (venv / name).write_text("mine")
    result = prepare("prepare_torchtitan_0_3")
    assert result.returncode == 2 and f"these scripts have not created {venv}" in result.stderr
    assert {file.name: file.read_text() for file in venv.iterdir()} == dict.fromkeys(
        ("stamp", "notes"), "mine"
    )


@pytest.mark.parametrize("version", ["0.2.2", "0.3.0"])
def test_torchtitan_0_3_has_an_environment_that_shares_packages(prepare, tmp_path, version):
    """Unless the Python that the user names has it."""
    packages = tmp_path / "packages"
    for name, its in (("torch", "2.13.0"), ("torchtitan", version)):
        (packages / f"{name}-{its}.dist-info").mkdir(parents=True)
        (packages / f"{name}-{its}.dist-info/METADATA").write_text(
            f"Name: {name}\nVersion: {its}\n"
        )
        (packages / f"{name}.py").touch()
    stub, venv = tmp_path / "python", tmp_path / "build/venv-torchtitan-0.3"
    stub.write_text(f'{VENV}PYTHONPATH={packages} exec {sys.executable} -S "$@"\n')
    stub.chmod(0o755)
    result = prepare(f"export TITAN_FP8_PYTHON={stub}; prepare_torchtitan_0_3; echo $python")
    if version == "0.3.0":
        assert result.stdout == f"{stub}\n" and not venv.exists()
    else:
        assert result.stdout.endswith(f"{venv}/bin/python\n")
        assert "torchtitan==0.3.0" in (venv / "install.log").read_text()
        (shared,) = venv.rglob("shared.pth")
        has_packages = shared.read_text().endswith("site-packages\n")
        assert has_packages == (sys.version_info >= (3, 11))  # torchtitan 0.3 takes no older one
