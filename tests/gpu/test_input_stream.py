"""Losses do not depend on the stream on which batches are copied.

Launched from the command line, where torchtitan's trainer is the main program.
"""

import os
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "tests/helpers")]

from jobs import log_of
from titan_logs import read_run

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

STEPS, MICRO_BATCHES = 20, 3


def run(folder: Path, inputs: str) -> tuple[dict[int, float], int]:
    """The losses by step, and how often the stream was changed; one GPU."""
    command = [ROOT / "scripts" / "train.sh", ROOT / "configs" / "llama3_debug.toml"]
    command += ["--job.dump_folder", folder, "--job.custom_config_module", "stream_switches"]
    command += ["--training.steps", STEPS, "--lr_scheduler.warmup_steps", STEPS // 4]
    command += ["--training.local_batch_size", 2, "--training.global_batch_size", 2 * MICRO_BATCHES]
    command += ["--debug.deterministic", "--debug.seed", 7, "--metrics.log_freq", 5]
    command += ["--metrics.enable_tensorboard", "--validation.no_enable", "--checkpoint.no_enable"]
    paths = os.pathsep.join([str(ROOT / "tests/helpers"), os.environ.get("PYTHONPATH", "")])
    log = log_of(command, 200, NGPU="1", PYTHONPATH=paths.strip(os.pathsep), INPUT_STREAM=inputs)
    (switches,) = re.findall(r"switched (\d+) times", log)
    return read_run(folder, "blockwise").series["loss"], int(switches)


def test_losses_are_those_of_batches_on_the_main_stream(tmp_path):
    (on, switches), (off, others) = (run(tmp_path / inputs, inputs) for inputs in ("on", "off"))
    # Per step: to the inputs and back for each micro-batch, and back again at the end.
    assert switches - others == STEPS * (2 * MICRO_BATCHES + 1)
    assert on == off and len(on) >= 4
