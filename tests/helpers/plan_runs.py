"""Runs that tests of `titan_fp8.plan` predict, by torchtitan's flags, and their predictions."""

import functools
from dataclasses import replace
from pathlib import Path

import bench_plans

from titan_fp8.plan import advice, times
from titan_fp8.plan.command import config_run
from titan_fp8.plan.run import Run
from titan_fp8.plan.step import baseline, predict

ROOT = Path(__file__).parents[2]

SHARD = "--parallelism.data_parallel_shard_degree"
TP, CP, PP, EP = (
    f"--parallelism.{kind}_parallel_degree" for kind in ("tensor", "context", "pipeline", "expert")
)
RECIPE, IN_BF16 = "--quantize.linear.titan_fp8.recipe", ("--training.dtype", "bfloat16")
ONE, FOUR = (SHARD, "1", "--training.global_batch_size", "-1"), (SHARD, "4")
SHORT, BATCH_1 = ("--training.seq_len", "2048"), ("--training.local_batch_size", "1")
ONE_GPU = (*ONE, *BATCH_1, *IN_BF16, "--activation_checkpoint.mode", "none")
FSDP_2 = (*ONE, SHARD, "2", *BATCH_1, "--metrics.log_freq", "5")
EP_2 = (SHARD, "2", *IN_BF16, EP, "2")
PP_2, PP_4, CP_2 = (PP, "2"), (*ONE, SHARD, "2", PP, "4"), (CP, "2")
TP_2 = (*ONE, TP, "2")
FLAVORS = ("--job.custom_config_module", "bench_plans_plugin")
HIGH = ("--quantize.linear.titan_fp8.no_fsdp_all_gather",)
HIGH_BOTH = (*HIGH, "--quantize.grouped_mm.titan_fp8.no_fsdp_all_gather")


def benchmarked(name: str) -> tuple[str, ...]:
    """The flags of a plan of scripts/bench_plans.py, which logs every five steps."""
    return (*bench_plans.PLANS[name].flags(), *FLAVORS, "--metrics.log_freq", "5")


PLANS = {
    "one GPU": ONE_GPU,
    "FSDP 2": benchmarked("llama3-8b-fsdp2"),
    "FSDP 2, 2048 tokens": benchmarked("llama3-8b-fsdp2-2048"),
    "FSDP 2, 4 x 2048 tokens": benchmarked("llama3-8b-fsdp2-2048x4"),
    "FSDP 2, 1 x 4096": benchmarked("deepseek-16b-fsdp2"),
    "FSDP 4": benchmarked("llama3-8b-fsdp4"),
    "FSDP 4, 2048 tokens": benchmarked("llama3-8b-fsdp4-2048"),
    "HSDP 2 x 2": benchmarked("llama3-8b-hsdp2x2"),
    "TP 2, FSDP 2": benchmarked("llama3-8b-tp2-fsdp2"),
    "TP 4": benchmarked("llama3-8b-tp4"),
    "CP 2, FSDP 2": benchmarked("llama3-8b-cp2-fsdp2"),
    "PP 2, FSDP 2": benchmarked("llama3-8b-pp2-fsdp2"),
    "DDP 4, 8 layers": benchmarked("llama3-8b-ddp4"),
    "EP 2": (*benchmarked("deepseek-16b-ep2"), *HIGH_BOTH),
    "EP 2, gathers in FP8": benchmarked("deepseek-16b-ep2"),
    "EP 4": benchmarked("deepseek-16b-ep4"),
    "EP 4, TP 2": benchmarked("deepseek-16b-ep4-tp2-fsdp2"),
    "EP 2, TP 2, ETP 2": benchmarked("deepseek-16b-ep2-tp2-fsdp2"),
    "EP 2, PP 2, 8 layers": benchmarked("deepseek-16b-ep2-pp2"),
}
"""The runs of docs/benchmarks/plan/runs_h200.json, by the names that they have there."""


@functools.cache
def run_of(config: str, flags: tuple[str, ...], ngpu: int | None = None) -> Run:
    return config_run(str(ROOT / "configs" / f"{config}.toml"), list(flags), ngpu)


def with_slow_cpu(factor: float = 3) -> times.Times:
    """The H200 with a CPU that takes `factor` times as long."""
    h200 = times.load("h200")
    slow = {}
    for key, value in h200.host.items():
        if isinstance(value, dict):
            slow[key] = {each: factor * us for each, us in value.items()}
        elif key.endswith("_us"):
            slow[key] = factor * value
    return replace(h200, host=h200.host | slow)


def speed(run: Run, of: times.Times) -> float:
    return predict(baseline(run), of).ms / predict(run, of).ms


def advice_of(run: Run, of: times.Times) -> list[str]:
    return advice.advice(run, advice.changes(run, of), of)
