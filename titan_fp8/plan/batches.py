"""How a rank's batch is cut into micro-batches, and plans that torchtitan refuses later."""

from dataclasses import dataclass
from typing import Any

from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import get_train_spec

from titan_fp8.plan.stages import stages_per_rank


@dataclass(frozen=True)
class Batches:
    """The work of a rank in a step.

    Attributes:
        sequences: in a micro-batch.
        micro_batches: per step and rank.
        rounds: how often a step accumulates gradients. Without pipeline parallelism a round is one
            micro-batch; with it, a round fills and drains the pipeline once.
        stages: of the pipeline, per rank; 1 without one.
    """

    sequences: int
    micro_batches: int
    rounds: int
    stages: int


def read_batches(config: Any, dims: ParallelDims, args: Any) -> Batches:
    """The batches of a config, whose model has these args of torchtitan's.

    Raises:
        ValueError: a value is not allowed, or sizes do not divide each other.
    """
    training, ranks = config.training, dims.dp_replicate * dims.dp_shard
    batch, whole = training.local_batch_size, training.global_batch_size
    for key in ("local_batch_size", "seq_len"):
        if getattr(training, key) < 1:
            raise ValueError(
                f"training.{key} = {getattr(training, key)}: allowed are positive numbers"
            )
    if whole > 0 and whole % (batch * ranks):
        raise ValueError(
            f"training.global_batch_size = {whole}: allowed are multiples of {batch * ranks}, "
            f"training.local_batch_size times {ranks} data-parallel ranks"
        )
    rounds = whole // (batch * ranks) if whole > 0 else 1
    if not dims.pp_enabled:
        return Batches(batch, rounds, rounds, stages=1)
    size = config.parallelism.pipeline_parallel_microbatch_size
    if size < 1 or batch % size:
        raise ValueError(
            f"parallelism.pipeline_parallel_microbatch_size = {size}: allowed are divisors of "
            f"training.local_batch_size = {batch}"
        )
    if get_train_spec(config.model.name).pipelining_fn is None:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree = {dims.pp}: allowed is 1, since torchtitan has "
            f"no pipeline for model.name = {config.model.name!r}"
        )
    stages = stages_per_rank(config.parallelism, dims.pp, args.n_layers)
    return Batches(size, rounds * batch // size, rounds, stages)


def check_divisible(args: Any, dims: ParallelDims) -> None:
    """Checks what torchtitan finds out only when the model runs.

    Args:
        args: of torchtitan's model.

    Raises:
        ValueError: heads or experts cannot be divided between the ranks.
    """
    for heads in ("n_heads", "n_kv_heads"):
        count = getattr(args, heads, None)
        if count and count % dims.tp:
            raise ValueError(
                f"parallelism.tensor_parallel_degree = {dims.tp}: allowed are divisors of "
                f"{heads} = {count}"
            )
    if not dims.ep_enabled:
        return
    experts = getattr(getattr(args, "moe_args", None), "num_experts", None)
    ranks = dims.dp_shard * dims.cp * dims.tp // dims.etp
    for count, what in ((experts, "experts"), (ranks, "ranks of FSDP, CP and TP")):
        if count and count % dims.ep:
            raise ValueError(
                f"parallelism.expert_parallel_degree = {dims.ep}: allowed are divisors of {count}, "
                f"the number of {what}"
            )
