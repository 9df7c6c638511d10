"""Parallel plans on GPUs, compiled and launched from the command line: the losses of one GPU.

Tensor, pipeline and context parallelism on two GPUs, and FlexAttention inside op-level checkpoints;
`scripts/bench plans` measures plans at full size. All runs of a model start from the same seed
checkpoint and see the same batches, so their losses differ by rounding only.
"""

import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "tests/helpers")]

from jobs import log_of
from titan_logs import merge, read_log

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

STEPS = 20
CLOSE = 0.005
"""Largest relative difference of two losses at the same step."""
TIMEOUT = 300
RECIPES = ("blockwise", "rowwise")
PLANS = {
    plan: [f"--parallelism.{plan}_parallel_degree", 2] for plan in ("tensor", "pipeline", "context")
}
FLEX = ["--model.flavor", "debugmodel_flex_attn", "--training.seq_len", 256]
CHECKPOINTS = ["--activation_checkpoint.mode", "selective"]
CHECKPOINTS += ["--activation_checkpoint.selective_ac_option", "op"]


def train(model: str, recipe: str, folder: Path, flags: list[object], ranks: int = 1) -> str:
    """Trains a debug model with bf16 parameters and without FSDP2; returns the log."""
    command = [ROOT / "scripts" / "train.sh", ROOT / "configs" / f"{model}_debug.toml"]
    command += ["--quantize.linear.titan_fp8.recipe", recipe, "--job.dump_folder", folder]
    command += ["--parallelism.data_parallel_shard_degree", 1, "--training.dtype", "bfloat16"]
    command += ["--parallelism.expert_parallel_degree", 1]
    command += ["--validation.no_enable", "--checkpoint.enable", *flags]
    return log_of(command, TIMEOUT, NGPU=str(ranks), LOG_RANK="0,1")


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """A function that trains a model from its seed checkpoint and returns the losses by step."""
    seeds, results = {}, {}

    def of(model: str, recipe: str, flags: list[object], ranks: int = 1) -> dict[int, float]:
        if model not in seeds:
            folder = tmp_path_factory.mktemp(model)
            train(model, "bf16", folder, ["--checkpoint.create_seed_checkpoint"])
            seeds[model] = folder / "checkpoint" / "step-0"
        key = (model, recipe, *flags)
        if key not in results:
            flags = [*flags, "--checkpoint.load_only", "--compile.enable"]
            flags += ["--checkpoint.initial_load_path", seeds[model]]
            flags += ["--training.steps", STEPS, "--lr_scheduler.warmup_steps", STEPS // 4]
            log = train(model, recipe, tmp_path_factory.mktemp("run"), flags, ranks)
            converted = [int(count) for count in re.findall(r"titan_fp8: converted (\d+) of", log)]
            assert converted and min(converted) > 0
            results[key] = merge(read_log(log))["loss"]
        return results[key]

    return of


def compare(one: dict[int, float], other: dict[int, float]) -> None:
    """Asserts that the first run learns and that the other has the same losses."""
    assert one.keys() == other.keys() == set(range(1, STEPS + 1))
    gaps = [other[step] / one[step] - 1 for step in one]
    print(f"at most {max(gaps, key=abs):+.3%}")
    assert one[STEPS] < one[1] - 0.5
    assert max(map(abs, gaps)) < CLOSE, gaps


# The recipes alternate, so that every plan and every model runs with both.
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("model", "plan", "recipe"),
    [
        (model, plan, RECIPES[(i + j) % 2])
        for i, model in enumerate(("llama3", "deepseek_v3"))
        for j, plan in enumerate(PLANS)
    ],
)
def test_a_plan_has_the_losses_of_one_gpu(model, plan, recipe, losses):
    compare(losses(model, recipe, []), losses(model, recipe, PLANS[plan], ranks=2))


@pytest.mark.parametrize(("model", "recipe"), [("llama3", "rowwise"), ("deepseek_v3", "blockwise")])
def test_flex_attention_has_the_same_losses_with_checkpoints(model, recipe, losses):
    compare(losses(model, recipe, FLEX), losses(model, recipe, FLEX + CHECKPOINTS))
