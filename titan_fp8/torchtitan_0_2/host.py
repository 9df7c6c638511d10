"""The door to `titan_fp8/host/`: what speeds torchtitan 0.2 up and is not FP8, behind one key."""

import torch
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_fp8.compile.activation_checkpointing import with_fp8_policy
from titan_fp8.host import log_permutation, speed_up_fsdp2
from titan_fp8.host.torchtitan_0_2.input_stream import Streams
from titan_fp8.host.torchtitan_0_2.moe import route_by_gathers
from titan_fp8.host.torchtitan_0_2.moe_block import compile_up_to_experts
from titan_fp8.host.torchtitan_0_2.token_exchange import token_combine, token_dispatch
from titan_fp8.modules.checks import permutation_of
from titan_fp8.torchtitan_0_2 import patches
from titan_fp8.torchtitan_0_2.config import host_speedups_of


def speed_up(
    model: nn.Module,
    job_config: JobConfig,
    parallel_dims: ParallelDims,
    uses_fsdp2: bool,
    compiles: bool,
) -> None:
    """Switches on what the job has use for, if `host_speedups` says so.

    `permutation` of the experts' section decides about the gathers alone, and overrides it.

    Args:
        model: changed in place, before it is parallelized and compiled.
        uses_fsdp2: whether FSDP2 shards it.
        compiles: whether it will be compiled.
    """
    on = host_speedups_of(job_config)
    if on:
        # Backward runs on the thread that calls it, not on another one for the GPU. Where the GPU
        # waits for the CPU, compiled code is faster then. torchtitan 0.3 does this in every job.
        torch.autograd.set_multithreading_enabled(False)
        if utils.device_type == "cuda":
            streams = Streams()
            patches.INPUT_STREAM.apply(streams.train_step, streams.forward_backward_step)
        if uses_fsdp2:
            speed_up_fsdp2()
    section = job_config.quantize.grouped_mm.titan_fp8
    if permutation_of(section.permutation, on) == "host":
        return
    layers = route_by_gathers(model)
    log_permutation(layers, section.permutation, section.where, "permutation")
    if layers and parallel_dims.ep_enabled:
        patches.TOKEN_EXCHANGE.apply(lambda _: token_dispatch, lambda _: token_combine)
    # Under TP, MoE blocks have hooks that forbid it.
    if not (layers and on and compiles) or parallel_dims.tp_enabled:
        return
    if blocks := compile_up_to_experts(model, job_config.compile.backend):
        # In these blocks it takes the checkpoint's dispatch mode away from ops that are not saved.
        patches.SAC_POLICY.apply(with_fp8_policy)
        logger.info(f"titan_fp8: {blocks} MoE blocks are compiled up to the experts")
