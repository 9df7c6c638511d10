"""torchtitan with fsdp_all_gather: the same losses, gradients and checkpoints, on gloo ranks.

The models and plans are those of the other tests of parallel plans, the trainer is torchtitan's.
"""

import functools
from pathlib import Path
from unittest import mock

import gloo
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from all_gathers import counting
from plans import LINEAR, Plan
from titan import (
    CHECKPOINTING,
    COMPILE_BLOCKS,
    CONVERTERS,
    ONE_BLOCK,
    parse,
    toml,
    trainer,
    training,
)
from torchtitan.config import JobConfig

if torch.cuda.is_available():
    pytest.skip("ranks on gloo, for machines without a GPU", allow_module_level=True)

import plan_ranks


class LongPlan(Plan):
    """A plan with two sequences for every rank."""

    sequences = property(lambda self: 2 * self.shares)


FSDP_PLANS = (
    (LongPlan("llama3", fsdp=2, pp=2), "blockwise"),
    (LongPlan("deepseek_v3", fsdp=4, ep=4), "blockwise_pow2"),
)
"""Plans for four ranks, and recipes, in bf16.

In FP32 and under tensor parallelism, `test_plans.py` compares FP8 gathers with the oracle.
"""


def flags_for(model: str, on: bool) -> list[str]:
    return [f"--{converter}.no_fsdp_all_gather" for converter in CONVERTERS[model] if not on]


# One forward and backward


def compare_plans(rank: int, folder: Path) -> None:
    for plan, recipe in FSDP_PLANS:
        if rank == 0 and not (folder / plan.model).exists():
            alone = Plan(plan.model)
            model = plan_ranks.build(alone, plan_ranks.configure(alone, "bf16"))
            torch.manual_seed(0)
            plan_ranks.materialize(model)
            state = plan_ranks.ModelWrapper(model).state_dict()
            dcp.save(state, checkpoint_id=folder / plan.model, no_dist=True)
        dist.barrier()
        plan_ranks.fix_routing(plan_ranks.has_whole_router_gradient(plan))
        results = [run(plan, recipe, folder, on) for on in (False, True)]
        assert_same(*results, f"{plan.name}, {recipe}")


def run(plan: Plan, recipe: str, folder: Path, on: bool) -> plan_ranks.Result:
    configure = plan_ranks.configure

    def with_key(*args: object) -> JobConfig:
        config = configure(*args)
        for section in (config.quantize.linear, config.quantize.grouped_mm):
            section.titan_fp8.fsdp_all_gather = on
        return config

    text = plan_ranks.batch(plan.sequences)
    with mock.patch.object(plan_ranks, "configure", with_key), counting() as (gathered, _):
        result = plan_ranks.run(plan, recipe, folder, text, "bfloat16")
    assert bool(gathered) == on
    return result


def assert_same(a: plan_ranks.Result, b: plan_ranks.Result, what: str) -> None:
    assert a.grads.keys() == b.grads.keys()
    assert (a.output is None) == (b.output is None)
    assert a.output is None or torch.equal(a.output, b.output), what
    different = [name for name, grad in a.grads.items() if not torch.equal(grad, b.grads[name])]
    assert not different, f"{what}: {different}"


def test_every_plan_computes_the_same(tmp_path):
    gloo.spawn(compare_plans, 4, tmp_path)


# Training


class Job:
    """torchtitan's trainer on this rank, with the same text and flags for all jobs."""

    def __init__(self, folder: Path, text: Path, model: str):
        folder.mkdir(exist_ok=True)
        self.config = functools.partial(parse, folder, toml(model, CONVERTERS[model]))
        self.model, self.folder = model, folder
        self.flags = [*training(text, folder), "--optimizer.lr", 1e-2]
        if model == "deepseek_v3":
            self.flags += ["--parallelism.expert_parallel_degree", 2]

    def losses(self, *flags: object, on: bool, steps: int = 2) -> list[float]:
        """Losses and norms of gradients; the last checkpoint is loaded first and one is saved.

        `quantized` then has the number of shards of each quantization.
        """
        torch._dynamo.reset()
        logged: list[float] = []

        def log(step: int, loss: float, largest: float, norm: float, **_: object) -> None:
            logged.extend((loss, norm))

        config = self.config(*self.flags, *flags_for(self.model, on), *flags)
        with trainer(config) as t, counting() as (gathered, self.quantized):
            t.checkpointer.load()
            t.metrics_processor.should_log = lambda step: True
            t.metrics_processor.log = log
            batches = t.batch_generator(t.dataloader)
            for _ in range(steps):
                t.step += 1
                t.train_step(batches)
                t.checkpointer.save(t.step)
        assert bool(gathered) == on
        return logged


POW2 = f"--{LINEAR}.recipe", "blockwise_pow2"
TWO_BATCHES = ("--training.global_batch_size", 8)
WAYS: dict[str, list[tuple[object, ...]]] = {
    "llama3": [
        (*TWO_BATCHES, *POW2, "--parallelism.fsdp_reshard_after_forward", "never"),
    ],
    "deepseek_v3": [
        (*COMPILE_BLOCKS, *CHECKPOINTING["op"], *ONE_BLOCK, *TWO_BATCHES),
    ],
}
"""Flags: gradient accumulation, one gather a step, torch.compile, activation checkpointing.
"""


def compare_ways(rank: int, folder: Path, text: Path, all_ways: dict) -> None:
    for model, ways in all_ways.items():
        job = Job(folder / f"{model}-{rank}", text, model)
        for flags in ways:
            routing = ("--debug.moe_force_load_balance",) if model == "deepseek_v3" else ()
            before = job.losses(*flags, *routing, on=False)
            after = job.losses(*flags, *routing, on=True)
            assert len(before) == 4 and before == after, (model, flags, before, after)
            # In the second step all weights together, and none again.
            *_, before_last, last = job.quantized
            assert before_last == 1 and last > 9, (model, flags)


def test_training_is_the_same_in_every_mode(tmp_path, text):
    gloo.spawn(compare_ways, 2, tmp_path, text, WAYS)


def test_recomputed_experts_that_several_ranks_share(tmp_path, text):
    """Backward recomputes the last block before FSDP2 has gathered its experts for backward."""
    ways = {"deepseek_v3": [(*CHECKPOINTING["full"], *POW2)]}
    gloo.spawn(compare_ways, 4, tmp_path, text, ways)


# Checkpoints


SAVE = ("--checkpoint.enable", "--checkpoint.interval", 1)


def convert_back_and_forth(rank: int, folder: Path, text: Path) -> None:
    """Each run loads the checkpoint of the run before: model, optimizer and all."""
    job = Job(folder / "job", text, "deepseek_v3")
    bf16 = (f"--{LINEAR}.recipe", "bf16")
    for flags, on in ((bf16, False), ((), True), (bf16, False)):
        job.losses(*SAVE, *flags, on=on, steps=1)
    if rank == 0:
        first, *others = (contents(job.folder / "checkpoint" / f"step-{i}") for i in range(1, 4))
        for part in ("experts.w2", "attention.wo.weight", "exp_avg"):
            assert any(part in name for name in first), part
        assert all(each == first for each in others)


def contents(checkpoint: Path) -> dict[str, tuple]:
    """What a checkpoint holds: name -> shape, dtype and the places of shards."""
    state = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {name: meta for name, meta in state.items() if hasattr(meta, "chunks")}
    return {n: (m.size, m.properties.dtype, str(m.chunks)) for n, m in tensors.items()}


def continue_crosswise(rank: int, folder: Path, text: Path) -> None:
    losses = {}
    for on in (False, True):
        job = Job(folder / str(on), text, "llama3")
        before = job.losses(*SAVE, on=on)
        losses[on] = before + job.losses(*SAVE, on=not on, steps=1)
    assert losses[True] == losses[False], losses


def test_checkpoints_load_both_ways_and_look_alike(tmp_path, text):
    gloo.spawn(convert_back_and_forth, 2, tmp_path, text)


def test_a_run_continues_alike_with_and_without(tmp_path, text):
    gloo.spawn(continue_crosswise, 2, tmp_path, text)
