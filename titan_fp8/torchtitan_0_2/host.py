"""The door to `titan_fp8/host/`: what speeds torchtitan 0.2 up and is not FP8, behind one key."""

import torch
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_fp8 import fsdp
from titan_fp8.compile.activation_checkpointing import with_fp8_policy
from titan_fp8.host import speed_up_fsdp2
from titan_fp8.host.peer_exchange import TIMEOUT_S, reach_each_other
from titan_fp8.host.torchtitan_0_2.moe import GatherMoE, route_by_gathers
from titan_fp8.host.torchtitan_0_2.moe_block import compile_up_to_experts
from titan_fp8.host.torchtitan_0_2.step_graph import WARM_UP, StepGraph
from titan_fp8.host.torchtitan_0_2.token_exchange import token_combine, token_dispatch
from titan_fp8.modules.checks import permutation_of
from titan_fp8.patches import SAC_POLICY
from titan_fp8.recipe import BF16
from titan_fp8.torchtitan_0_2 import patches
from titan_fp8.torchtitan_0_2.config import experts_recipe, host_speedups_of
from titan_fp8.torchtitan_0_2.experts import FP8GroupedExperts


def speed_up(
    model: nn.Module,
    job_config: JobConfig,
    parallel_dims: ParallelDims,
    uses_fsdp2: bool,
    compiles: bool,
) -> None:
    """Switches on what the job has use for, if `host_speedups` says so, in place.

    `permutation` of the experts' section decides about the gathers alone, and overrides it. `model`
    is not yet parallelized and compiled.
    """
    on = host_speedups_of(job_config)
    if on:
        # Backward runs on the thread that calls it, not on another one for the GPU. Where the GPU
        # waits for the CPU, compiled code is faster then. torchtitan 0.3 does this in every job.
        torch.autograd.set_multithreading_enabled(False)
        if uses_fsdp2:
            speed_up_fsdp2()
    captures = _capture_steps(model, job_config, parallel_dims)
    section = job_config.quantize.grouped_mm.titan_fp8
    if permutation_of(section.permutation, on) == "host":
        return
    layers = route_by_gathers(model)
    if layers:
        logger.info(f"titan_fp8: {layers} MoE layers permute their tokens by gathers")
    elif section.permutation is not None:
        logger.warning(
            f'titan_fp8: {section.where} permutation = "gather" changes nothing: no MoE layer of '
            "this model uses torchtitan's permutation"
        )
    has_hooks = False
    if layers and parallel_dims.ep_enabled:
        has_hooks = patches.TOKEN_EXCHANGE.apply(lambda _: token_dispatch, lambda _: token_combine)
    if section.exchange == "fp8" and experts_recipe(job_config.quantize) != BF16:
        _exchange_in_fp8(model, job_config, parallel_dims.ep_enabled, has_hooks)
    if captures and has_hooks:
        for module in model.modules():
            if isinstance(module, GatherMoE) and module.exchange_capacity is None:
                _exchange(module, job_config, in_fp8=False)
    # Under TP, MoE blocks have hooks that forbid it.
    if not (layers and on and compiles) or parallel_dims.tp_enabled:
        return
    if blocks := compile_up_to_experts(model, job_config.compile.backend):
        # In these blocks it takes the checkpoint's dispatch mode away from ops that are not saved.
        SAC_POLICY.apply(with_fp8_policy)
        logger.info(f"titan_fp8: {blocks} MoE blocks are compiled up to the experts")


def _capture_steps(model: nn.Module, job_config: JobConfig, parallel_dims: ParallelDims) -> bool:
    """Has the trainer capture its steps, if `cuda_graph` says so, and returns whether it does.

    Then checkpoints preserve no state of a random number generator: a capture cannot read it.

    Raises:
        ValueError: no step of this job can be captured.
    """
    section = job_config.quantize.linear.titan_fp8
    key = f"{section.where} cuda_graph"
    has = {"a CUDA GPU": utils.device_type == "cuda", "host_speedups": host_speedups_of(job_config)}
    lacking = [name for name, is_there in has.items() if not is_there]
    if lacking or not section.cuda_graph:
        if section.cuda_graph:
            logger.warning(f"titan_fp8: {key} changes nothing without {lacking[0]}")
        fsdp.runs_on(None)
        return False
    if reason := _why_not_captured(model, job_config, parallel_dims):
        raise ValueError(f"{key} = True: {reason}")
    without, may_draw = "", not _preserves_rng_state(job_config)
    if not may_draw:
        job_config.activation_checkpoint.preserve_rng_state = False
        without = (
            ". activation_checkpoint.preserve_rng_state is false now, which changes nothing "
            "without dropout"
        )
    # Another thread's work would belong to no capture.
    torch.autograd.set_multithreading_enabled(False)
    stream = torch.cuda.Stream()
    fsdp.runs_on(stream)
    steps = StepGraph(key, stream, job_config, may_draw)
    patches.STEP_GRAPH.apply(steps.forward_backward_step, steps.close, steps.save)
    logger.info(
        f"titan_fp8: {key}: after {WARM_UP} steps, forward, loss and backward are captured as a "
        f"CUDA graph, if nothing in them waits for the CPU{without}"
    )
    return True


def _preserves_rng_state(job_config: JobConfig) -> bool:
    checkpoint = job_config.activation_checkpoint
    return checkpoint.mode in ("full", "selective") and checkpoint.preserve_rng_state


def _why_not_captured(model: nn.Module, job_config: JobConfig, dims: ParallelDims) -> str | None:
    """Which setting forbids a CUDA graph of a step, and what is allowed; None if none does."""
    experts, parallelism = job_config.quantize.grouped_mm.titan_fp8, job_config.parallelism
    has_dropout = any(
        isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        for module in model.modules()
    )
    permutation = permutation_of(experts.permutation, host_speedups_of(job_config))
    reasons = {
        "parallelism.pipeline_parallel_degree must be 1": dims.pp_enabled,
        "data parallelism needs FSDP: parallelism.data_parallel_shard_degree must not be 1": (
            dims.dp_replicate_enabled and not dims.fsdp_enabled
        ),
        f'under expert parallelism {experts.where} permutation must be "gather", as with '
        "host_speedups = True": dims.ep_enabled and permutation != "gather",
        'parallelism.expert_parallel_comm_backend must be "standard"': (
            dims.ep_enabled and parallelism.expert_parallel_comm_backend != "standard"
        ),
        # Its workspace is replaced when an evaluation needs more.
        "parallelism.enable_async_tensor_parallel must be false": (
            parallelism.enable_async_tensor_parallel
        ),
        "fault_tolerance.enable must be false": job_config.fault_tolerance.enable,
        "training.enable_cpu_offload must be false": job_config.training.enable_cpu_offload,
        "optimizer.early_step_in_backward must be false": (
            job_config.optimizer.early_step_in_backward
        ),
        "activation_checkpoint.preserve_rng_state must be false, or the model without dropout": (
            has_dropout and _preserves_rng_state(job_config)
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            return reason
    if dims.ep_enabled and not reach_each_other(dims.get_mesh("ep").get_group()):
        return "under expert parallelism GPUs must reach each other's memory, and they do not"
    return None


def _exchange_in_fp8(
    model: nn.Module, job_config: JobConfig, ep_enabled: bool, has_hooks: bool
) -> None:
    """Lets converted experts exchange their tokens in FP8; warns if nothing is exchanged.

    Raises:
        RuntimeError: torchtitan's hooks for the exchange are not those that could be replaced.
    """
    where = f'{job_config.quantize.grouped_mm.titan_fp8.where} exchange = "fp8"'
    layers = [
        module
        for module in model.modules()
        if isinstance(module, GatherMoE) and isinstance(module.experts, FP8GroupedExperts)
    ]
    if not (layers and ep_enabled):
        logger.warning(f"titan_fp8: {where} changes nothing: no MoE layer exchanges tokens by it")
        return
    if not has_hooks:
        raise RuntimeError(f"{where}: not with the hooks of this version of torchtitan")
    for layer in layers:
        _exchange(layer, job_config, in_fp8=True)
    logger.info(f"titan_fp8: {len(layers)} MoE layers exchange their tokens in FP8")


def _exchange(layer: GatherMoE, job_config: JobConfig, in_fp8: bool) -> None:
    """Lets the tokens of a layer travel to its experts (`GatherMoE.exchange_capacity`)."""
    comm = job_config.comm
    layer.exchange_capacity = job_config.quantize.grouped_mm.titan_fp8.exchange_capacity
    layer.exchange_timeout_s = max(TIMEOUT_S, comm.init_timeout_seconds, comm.train_timeout_seconds)
    layer.exchanges_in_fp8 = in_fp8
