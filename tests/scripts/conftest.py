"""An experiment of converge.sh for the tests of its verdict."""

from pathlib import Path

import converge_plot
import converge_verdict
import pytest
from converge_arms import Settings, write_settings
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
