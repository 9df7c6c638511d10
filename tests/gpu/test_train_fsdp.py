"""FSDP2 on two GPUs: losses do not depend on whether weights are gathered in FP8.

Compiled, with op-level checkpointing, and launched from the command line, in deterministic mode.
"""

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
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

STEPS = 50
TIMEOUT = 300
SECTIONS = {"llama3": ("linear",), "deepseek_v3": ("linear", "grouped_mm")}


def losses(folder: Path, model: str, recipe: str, gathers: bool, ep: int) -> dict[int, float]:
    """The losses of a debug model by step, in full precision."""
    command = [ROOT / "scripts" / "train.sh", ROOT / "configs" / f"{model}_debug.toml"]
    command += ["--job.dump_folder", folder, "--quantize.linear.titan_fp8.recipe", recipe]
    if not gathers:
        command += [f"--quantize.{name}.titan_fp8.no_fsdp_all_gather" for name in SECTIONS[model]]
    command += ["--parallelism.data_parallel_shard_degree", 2]
    command += ["--parallelism.expert_parallel_degree", ep]
    command += ["--training.steps", STEPS, "--lr_scheduler.warmup_steps", STEPS // 4]
    command += ["--compile.enable", "--activation_checkpoint.mode", "selective"]
    command += ["--activation_checkpoint.selective_ac_option", "op"]
    command += ["--debug.deterministic", "--debug.seed", 7, "--metrics.log_freq", 1]
    command += ["--metrics.enable_tensorboard", "--validation.no_enable", "--checkpoint.no_enable"]
    log = log_of(command, TIMEOUT, NGPU="2", LOG_RANK="0")
    # Each converter says so.
    assert log.count("weights in FP8") == (len(SECTIONS[model]) if gathers else 0)
    return read_run(folder, recipe).series["loss"]


@pytest.mark.parametrize(
    ("model", "recipe", "ep"),
    [
        ("llama3", "blockwise", 1),
        ("llama3", "blockwise_pow2", 1),
        ("deepseek_v3", "blockwise", 1),
        ("deepseek_v3", "blockwise", 2),
    ],
)
def test_losses_are_those_of_gathers_in_high_precision(tmp_path, model, recipe, ep):
    high, fp8 = (losses(tmp_path / str(g), model, recipe, g, ep) for g in (False, True))
    assert high.keys() == set(range(1, STEPS + 1)) and high[STEPS] < high[1] - 0.5
    assert fp8 == high
