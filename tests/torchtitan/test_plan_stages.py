"""The stages that `titan_fp8.plan` counts, beside those that torchtitan builds."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm

from titan_fp8.plan import times
from titan_fp8.plan.command import config_run
from titan_fp8.plan.stages import stages_per_rank
from titan_fp8.plan.step import predict

ROOT = Path(__file__).parents[2]
RANKS, BLOCKS = 2, 6
SCHEDULES = ("1F1B", "gpipe", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "DualPipeV")
pytestmark = pytest.mark.usefixtures("fresh_torchtitan")


@pytest.fixture
def ranks():
    """The degrees of parallelism of a pipeline of RANKS that do not communicate."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    degrees = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1, "etp": 1}
    yield ParallelDims(**degrees, pp=RANKS, world_size=RANKS)
    dist.destroy_process_group()


def config_of(schedule, size=None, first=1, last=1, parts=None) -> JobConfig:
    config = JobConfig()
    config.training.local_batch_size = 4 * RANKS
    p = config.parallelism
    p.pipeline_parallel_degree, p.pipeline_parallel_schedule = RANKS, schedule
    p.pipeline_parallel_layers_per_stage, p.module_fqns_per_model_part = size, parts
    p.pipeline_parallel_first_stage_less_layers = first
    p.pipeline_parallel_last_stage_less_layers = last
    return config


def built(config: JobConfig, dims: ParallelDims) -> int | None:
    """The stages that torchtitan builds on a rank, or None if it refuses them."""
    with torch.device("meta"):
        model = nn.ModuleDict({name: nn.Linear(1, 1) for name in ("tok_embeddings", "output")})
        model["layers"] = nn.ModuleDict({str(i): nn.Linear(1, 1) for i in range(BLOCKS)})
    try:
        _, parts, *_ = pipeline_llm(
            model,
            dims,
            config,
            torch.device("cpu"),
            SimpleNamespace(n_layers=BLOCKS),
            lambda part, dims, config: part,
            nn.MSELoss(),
        )
    except (ValueError, AssertionError, ZeroDivisionError, IndexError):
        return None
    return len(parts)


def counted(config: JobConfig) -> int | None:
    try:
        return stages_per_rank(config.parallelism, RANKS, BLOCKS)
    except ValueError:
        return None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layers_per_stage_make_as_many_stages_as_in_torchtitan(schedule, ranks):
    found = {}
    for size, first, last in itertools.product((None, *range(10)), (0, 1, 3), (0, 1, 3)):
        config = config_of(schedule, size, first, last)
        found[size, first, last] = counted(config)
        assert found[size, first, last] == built(config, ranks), (size, first, last)
    looped = {None, 2, 3, 4} if schedule in ("Interleaved1F1B", "LoopedBFS") else {None, 2}
    assert set(found.values()) == ({None, 1} if schedule in SCHEDULES[:2] else looped)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [None, 2, 4])
def test_listed_parts_are_as_many_stages_as_in_torchtitan(schedule, size, ranks):
    for count in range(9):
        config = config_of(schedule, size, parts=[[f"layers.{i}"] for i in range(count)])
        stages = built(config, ranks)
        if schedule in SCHEDULES[:2] and stages and stages > 1:
            # torchtitan drops all but the first, so the model would never be run to its end.
            stages = None
        assert counted(config) == stages, count


def test_more_stages_shorten_the_bubble():
    """8 micro-batches on 4 ranks, with two stages per rank by default, or three of 3 layers."""
    flags = [
        *("--parallelism.data_parallel_shard_degree", "2", "--training.global_batch_size", "-1"),
        *("--parallelism.pipeline_parallel_degree", "4", "--training.local_batch_size", "8"),
        *("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"),
    ]
    three = ["--parallelism.pipeline_parallel_layers_per_stage", "3"]
    runs = [
        config_run(str(ROOT / "configs/llama3_8b.toml"), each, None)
        for each in (flags, [*flags, *three])
    ]
    two, three = (predict(run, times.load("h200")).parts["attention"] for run in runs)
    assert three / two == pytest.approx((1 + 3 / 8 / 3) / (1 + 3 / 8 / 2))
