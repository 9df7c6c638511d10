"""FP8 needs less memory than bf16: the peaks of four layers on two GPUs.

Compiled, with op-level checkpointing, as big models train. The first four layers of Llama3-8B and
of DeepSeekV3-16B need less than 40 GiB by count.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests/helpers"
sys.path += [str(ROOT / "scripts"), str(HELPERS)]

from jobs import log_of
from titan_logs import read_log

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

STEPS = 5
TIMEOUT = 300


def peak(folder: Path, model: str, recipe: str, batch: tuple[int, int], ep: int) -> float:
    """GiB reserved at the peak of the rank that needs more; `batch` is sequences x tokens."""
    command = [ROOT / "scripts" / "train.sh", ROOT / "configs" / f"{model}_debug.toml"]
    command += ["--job.dump_folder", folder, "--quantize.linear.titan_fp8.recipe", recipe]
    command += ["--experimental.custom_import", "four_layers", "--model.flavor", "four_layers"]
    command += ["--training.local_batch_size", batch[0], "--training.seq_len", batch[1]]
    command += ["--training.steps", STEPS, "--lr_scheduler.warmup_steps", 1]
    command += ["--parallelism.data_parallel_shard_degree", 2]
    command += ["--parallelism.expert_parallel_degree", ep, "--debug.moe_force_load_balance"]
    command += ["--compile.enable", "--activation_checkpoint.mode", "selective"]
    command += ["--activation_checkpoint.selective_ac_option", "op"]
    command += ["--validation.no_enable", "--checkpoint.no_enable", "--metrics.log_freq", 1]
    path = os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])
    log = log_of(command, TIMEOUT, NGPU="2", LOG_RANK="0,1", PYTHONPATH=path)
    assert log.count("weights in FP8") == (0 if recipe == "bf16" else 2 * (1 + (ep > 1)))
    reserved = [scalar.value for scalar in read_log(log) if scalar.name == "memory"]
    assert len(reserved) == 2 * STEPS
    return max(reserved)


@pytest.mark.parametrize(
    ("model", "batch", "ep"), [("llama3", (1, 8192), 1), ("deepseek_v3", (2, 4096), 2)]
)
def test_peaks_are_below_those_of_bf16(tmp_path, model, batch, ep):
    gib = {r: peak(tmp_path / r, model, r, batch, ep) for r in ("bf16", "blockwise")}
    print(gib)
    assert gib["blockwise"] < gib["bf16"], gib
