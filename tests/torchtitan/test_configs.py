"""Every file in configs/ parses through torchtitan and builds, converted, on the meta device."""

from pathlib import Path

import pytest
import torch
from parsing import parse_args
from titan import build, convert
from torchtitan.config import JobConfig

from titan_fp8 import FP8Linear
from titan_fp8.torchtitan_0_2.experts import FP8GroupedExperts

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
# configs/<name>.toml: its GPUs, FP8 linears and FP8 grouped experts. A Llama block has 7 linears. A
# DeepSeek block has 5 around the attention (4 without a query rank), 3 in a dense feed-forward or
# in the shared experts, and one module of grouped experts unless it is dense.
EXPECTED = {
    "llama3_debug": (2, 6 * 7, 0),
    "llama3_8b": (8, 32 * 7, 0),
    "llama3_70b": (64, 80 * 7, 0),
    "deepseek_v3_debug": (2, 6 * 4 + 6 * 3, 5),
    "deepseek_v3_16b": (8, 27 * 4 + 27 * 3, 26),
    "deepseek_v3_671b": (256, 61 * 5 + 61 * 3, 58),
}


def parse(path: Path, *flags: str) -> JobConfig:
    return parse_args(["--job.config_file", path, *flags])


def count(model: torch.nn.Module, kind: type) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def test_every_config_is_expected() -> None:
    assert {path.stem for path in CONFIGS} == set(EXPECTED)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_builds_in_fp8(path: Path) -> None:
    gpus, linears, experts = EXPECTED[path.stem]
    config = parse(path)
    model = convert(config, build(config), gpus)
    assert (count(model, FP8Linear), count(model, FP8GroupedExperts)) == (linears, experts)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_one_flag_makes_it_the_bf16_baseline(path: Path) -> None:
    config = parse(path, "--quantize.linear.titan_fp8.recipe", "bf16")
    model = convert(config, build(config), EXPECTED[path.stem][0])
    assert count(model, FP8Linear) == count(model, FP8GroupedExperts) == 0


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_is_a_convergence_run(path: Path) -> None:
    """It fixes what torchtitan's docs/converging.md asks for, and logs the losses."""
    config = parse(path)
    assert config.debug.seed is not None
    assert config.metrics.enable_tensorboard
    assert config.training.steps >= 100
    assert config.lr_scheduler.warmup_steps == config.training.steps // 5
