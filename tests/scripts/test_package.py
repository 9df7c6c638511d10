"""What pip installs, without this repository beside it."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USE = """
import runpy, torch, titan_fp8
try:
    runpy.run_module("titan_fp8.plan", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
from torchtitan.models.moe.moe import GroupedExperts
assert titan_fp8.__file__.startswith({folder!r}), titan_fp8.__file__
x, weight, bias, weights = map(torch.randn, [(32, 32), (16, 32), (16,), (2, 16, 32)])
offs, linear = torch.tensor([16, 32], dtype=torch.int32), torch.nn.Linear(32, 32)
model = torch.nn.ModuleDict(dict(linear=linear, experts=GroupedExperts(32, 32, 2, True)))
{python}
assert y.shape == (32, 16) and report.converted and type(linear) is torch.nn.Linear
"""
CONFIG = """
[job]
custom_config_module = "titan_fp8.plugin"
[model]
name = "llama3"
flavor = "debugmodel"
converters = ["quantize.linear.titan_fp8"]
"""


def run(*command: object, cwd: Path, **variables: str) -> str:
    env = {**os.environ, **variables}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked: its files, and no others, are what the wheel is built from."""
    folder = tmp_path_factory.mktemp("sdist")
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    copy = folder / "copy"
    files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, files):
        if (ROOT / name).exists() and not name.startswith("docs/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-c", build, cwd=copy)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_the_wheel_works_without_the_repository(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    options = ("--no-deps", "--no-build-isolation", "--no-compile", "--target", folder)
    run(sys.executable, "-m", "pip", "install", "-q", *options, source, cwd=tmp_path)
    data = [p for p in (ROOT / "titan_fp8").rglob("*") if p.suffix in (".c", ".json")]
    assert data and all((folder / p.relative_to(ROOT)).exists() for p in data)
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    (python,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    use = USE.format(folder=str(folder), python=python)
    (tmp_path / "job.toml").write_text(CONFIG)
    plan = ("job.toml", "--parallelism.data_parallel_shard_degree", "1")
    said = run(sys.executable, "-c", use, *plan, cwd=tmp_path, PYTHONPATH=str(folder))
    assert "attention.wq" in said
