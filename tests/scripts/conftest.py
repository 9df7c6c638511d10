"""Experiments of converge.sh, for the tests of its verdict and of how it runs."""

from pathlib import Path

import converge_plot
import converge_verdict
import pytest
from converge_arms import Settings, write_settings
from convergence_jobs import TOML, TRAIN
from convergence_runs import EVERY, STEPS, WARMUP, write_arm


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """An experiment with the baseline alone; plots, which take long, are not drawn."""
    settings = Settings("tiny", STEPS, WARMUP, EVERY, tokens=512, config="", text="", flags=[])
    write_settings(tmp_path, settings)
    write_arm(tmp_path, "bf16", gaps=0.0)
    monkeypatch.setattr(converge_plot, "draw", lambda *_: None)
    return tmp_path


@pytest.fixture
def judge(results, capsys):
    def call() -> tuple[int, str]:
        status = converge_verdict.main([str(results)])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return call


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A repository with one model, "m", and the train.sh of convergence_jobs.py.

    It has no GPU, and no verdict.
    """
    # These import torchtitan, which tests/conftest.py must first prepare for the CPU.
    import converge
    import converge_experiment
    import converge_jobs

    for folder in ("scripts", "configs", "text"):
        (tmp_path / folder).mkdir()
    (tmp_path / "configs/m.toml").write_text(TOML)
    (tmp_path / "text/text.jsonl").write_text("".join(f'{{"text": "{i}"}}\n' for i in range(99)))
    train = tmp_path / "scripts/train.sh"
    train.write_text(TRAIN)
    train.chmod(0o755)
    for module in (converge_experiment, converge_jobs):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    for module in (converge, converge_experiment):
        monkeypatch.setattr(module, "CONFIGS", tmp_path / "configs")
    monkeypatch.setattr(converge, "POLL", 0.02)
    monkeypatch.setattr(converge, "devices", tuple)
    monkeypatch.setattr(converge.converge_verdict, "main", lambda argv: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.fixture
def run(root, capsys):
    import converge

    def call(*args: str) -> tuple[int, str]:
        status = converge.main(["m", *args])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return call
