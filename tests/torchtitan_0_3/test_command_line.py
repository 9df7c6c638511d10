"""`--override.imports` on torchtitan's command line, from its parsing to the end of training."""

import os
import re
import sys

import pytest
import titan_0_3
import torch

from titan_fp8 import cpu_host


@pytest.fixture
def train(text, tmp_path, monkeypatch, capfd):
    """Trains torchtitan's own llama3_debugmodel for a step, and returns the log."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**rank, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setitem(os.environ, name, value)

    def main(override: str) -> str:
        flags = titan_0_3.flags(text, tmp_path, "--training.steps", 1)
        command = ["cpu_host", "--module", "llama3", "--config", "llama3_debugmodel"]
        monkeypatch.setattr(sys, "argv", [*command, *flags, "--override.imports", override])
        cpu_host.main()
        return re.sub(r"\x1b\[[0-9;]*m", "", "".join(capfd.readouterr()))

    yield main
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_an_override_trains_in_fp8(train):
    log = train('titan_fp8.torchtitan_0_3.rowwise={"filter_fqns": ["lm_head", "wo"]}')
    assert "titan_fp8: converted 24 of 31 linears, rowwise" in log
    assert re.search(r"layers\.0\.attention\.wo +256 x 256 +- +filtered by \"wo\"", log)
    assert re.search(r"step: +1 +loss: +\d", log)


def test_a_mistake_ends_the_run_before_its_first_step(train, capfd):
    with pytest.raises(ValueError, match="FP8LinearConverter: filter_fqns = .'typo'.: no module"):
        train('titan_fp8.torchtitan_0_3.blockwise={"filter_fqns": ["typo"]}')
    assert "step:" not in capfd.readouterr().err
