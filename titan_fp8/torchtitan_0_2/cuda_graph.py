"""`cuda_graph`: whether a job captures steps (`host/torchtitan_0_2/step_graph.py`), or why not."""

import torch
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_fp8 import fsdp
from titan_fp8.host.peer_exchange import reach_each_other
from titan_fp8.host.torchtitan_0_2.step_graph import WARM_UP, StepGraph, after_step
from titan_fp8.torchtitan_0_2 import patches
from titan_fp8.torchtitan_0_2.config import host_speedups_of, permutation_of


def capture_steps(model: nn.Module, job_config: JobConfig, parallel_dims: ParallelDims) -> bool:
    """Has the trainer capture its steps, if `cuda_graph` says so, and returns whether it does.

    Then checkpoints preserve no state of a random number generator: a capture cannot read it. The
    speed-ups have put backward on the thread that calls it; another's work would not be captured.

    Raises:
        ValueError: no step of this job can be captured.
    """
    section = job_config.quantize.linear.titan_fp8
    key, has_gpu = f"{section.where} cuda_graph", utils.device_type == "cuda"
    captures = section.cuda_graph and has_gpu and host_speedups_of(job_config)
    if section.cuda_graph and not captures:
        lacking = "host_speedups" if has_gpu else "a CUDA GPU"
        logger.warning(f"titan_fp8: {key} changes nothing without {lacking}")
    if not captures:
        fsdp.runs_on(None)
        return False
    if reason := _why_not(model, job_config, parallel_dims):
        raise ValueError(f"{key} = True: {reason}")
    may_draw, without = not _preserves_rng_state(job_config), ""
    if not may_draw:
        job_config.activation_checkpoint.preserve_rng_state = False
        without = ". activation_checkpoint.preserve_rng_state is false now, which changes nothing "
        without += "without dropout"
    stream = torch.cuda.Stream()
    fsdp.runs_on(stream)
    steps = StepGraph(key, stream, job_config, may_draw)
    patches.STEP_GRAPH.apply(steps.forward_backward_step, steps.close, after_step)
    logger.info(
        f"titan_fp8: {key}: after {WARM_UP} steps, forward, loss and backward are captured as a "
        f"CUDA graph, if nothing in them waits for the CPU{without}"
    )
    return True


def _why_not(model: nn.Module, job_config: JobConfig, dims: ParallelDims) -> str | None:
    """Which setting forbids a CUDA graph of a step, and what is allowed; None if none does."""
    parallelism, optimizer = job_config.parallelism, job_config.optimizer
    dropouts = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    reasons = {
        "model.name must not be flux, whose trainer has a forward_backward_step of its own": (
            job_config.model.name.startswith("flux")
        ),
        "parallelism.pipeline_parallel_degree must be 1": dims.pp_enabled,
        "data parallelism needs FSDP: parallelism.data_parallel_shard_degree must not be 1": (
            dims.dp_replicate_enabled and not dims.fsdp_enabled
        ),
        f"under expert parallelism {job_config.quantize.grouped_mm.titan_fp8.where} permutation "
        'must be "gather", as with host_speedups = True': (
            dims.ep_enabled and permutation_of(job_config) != "gather"
        ),
        'parallelism.expert_parallel_comm_backend must be "standard"': (
            dims.ep_enabled and parallelism.expert_parallel_comm_backend != "standard"
        ),
        # Its workspace is replaced when an evaluation needs more.
        "parallelism.enable_async_tensor_parallel must be false": (
            parallelism.enable_async_tensor_parallel
        ),
        "fault_tolerance.enable must be false": job_config.fault_tolerance.enable,
        "training.enable_cpu_offload must be false": job_config.training.enable_cpu_offload,
        "optimizer.early_step_in_backward must be false": optimizer.early_step_in_backward,
        "activation_checkpoint.preserve_rng_state must be false, or the model without dropout": (
            _preserves_rng_state(job_config) and any(dropout.p > 0 for dropout in dropouts)
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            return reason
    if dims.ep_enabled and not reach_each_other(dims.get_mesh("ep").get_group()):
        return "under expert parallelism GPUs must reach each other's memory, and they do not"
    return None


def _preserves_rng_state(job_config: JobConfig) -> bool:
    checkpoint = job_config.activation_checkpoint
    return checkpoint.mode in ("full", "selective") and checkpoint.preserve_rng_state
