"""Which speed-ups of `titan_fp8/host/` a job of torchtitan 0.2 gets. None of them is FP8.

| | speed-up                                         | key           | needs                    |
|-|--------------------------------------------------|---------------|--------------------------|
|1| backward runs on the thread that calls it        | host_speedups |                          |
|2| FSDP2 sends bf16 gradients, marks fewer ranges   | host_speedups | FSDP2                    |
|3| steps are CUDA graphs (`cuda_graph.py`)          | cuda_graph    | 1, a GPU; with EP also 4 |
|4| tokens are permuted by gathers                   | permutation   | torchtitan's MoE layers  |
|5| the exchange of tokens takes less CPU time       |               | 4, expert parallelism    |
|6| tokens are exchanged in FP8                      | exchange      | 5, experts in FP8        |
|7| others are exchanged without waiting for the CPU | cuda_graph    | 3, 5                     |
|8| MoE blocks are compiled up to the experts        | host_speedups | 4, torch.compile, no TP  |

`permutation` is "gather" by default with `host_speedups`. Number 5 is on where it can be.
"""

import torch
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from titan_fp8.compile.activation_checkpointing import with_fp8_policy
from titan_fp8.host import speed_up_fsdp2
from titan_fp8.host.peer_exchange import TIMEOUT_S
from titan_fp8.host.torchtitan_0_2.moe import GatherMoE, route_by_gathers
from titan_fp8.host.torchtitan_0_2.moe_block import compile_up_to_experts
from titan_fp8.host.torchtitan_0_2.token_dispatcher import ExchangeSettings
from titan_fp8.host.torchtitan_0_2.token_exchange import token_combine, token_dispatch
from titan_fp8.patches import SAC_POLICY
from titan_fp8.recipe import BF16
from titan_fp8.torchtitan_0_2 import patches
from titan_fp8.torchtitan_0_2.config import experts_recipe, host_speedups_of, permutation_of
from titan_fp8.torchtitan_0_2.cuda_graph import capture_steps
from titan_fp8.torchtitan_0_2.experts import FP8GroupedExperts


def speed_up(
    model: nn.Module,
    job_config: JobConfig,
    parallel_dims: ParallelDims,
    uses_fsdp2: bool,
    compiles: bool,
) -> None:
    """Switches on what the table says, in its order, and in place.

    `model` is converted, but not yet parallelized and compiled.
    """
    on = host_speedups_of(job_config)
    if on:
        # Backward runs on the thread that calls it, not on another one for the GPU. Where the GPU
        # waits for the CPU, compiled code is faster then. torchtitan 0.3 does this in every job.
        torch.autograd.set_multithreading_enabled(False)
        if uses_fsdp2:
            speed_up_fsdp2()
    captures = capture_steps(model, job_config, parallel_dims)
    if permutation_of(job_config) == "host":
        return
    layers = _permute_by_gathers(model, job_config)
    _exchange_tokens(layers if parallel_dims.ep_enabled else [], job_config, captures)
    # Under TP, MoE blocks have hooks that forbid it.
    may_compile = on and compiles and not parallel_dims.tp_enabled
    if may_compile and (blocks := compile_up_to_experts(model, job_config.compile.backend)):
        # In these blocks it takes the checkpoint's dispatch mode away from ops that are not saved.
        SAC_POLICY.apply(with_fp8_policy)
        logger.info(f"titan_fp8: {blocks} MoE blocks are compiled up to the experts")


def _permute_by_gathers(model: nn.Module, job_config: JobConfig) -> list[GatherMoE]:
    """Number 4. Returns the layers that now do; warns if the key asks for it and there are none."""
    section = job_config.quantize.grouped_mm.titan_fp8
    layers = route_by_gathers(model)
    if layers:
        logger.info(f"titan_fp8: {len(layers)} MoE layers permute their tokens by gathers")
    elif section.permutation is not None:
        logger.warning(
            f'titan_fp8: {section.where} permutation = "gather" changes nothing: no MoE layer of '
            "this model uses torchtitan's permutation"
        )
    return layers


def _exchange_tokens(layers: list[GatherMoE], job_config: JobConfig, captures: bool) -> None:
    """Numbers 5 to 7, for the layers of expert parallelism.

    Raises:
        RuntimeError: torchtitan's hooks could not be replaced, and without them there is no FP8.
    """
    section, comm = job_config.quantize.grouped_mm.titan_fp8, job_config.comm
    timeout_s = max(TIMEOUT_S, comm.init_timeout_seconds, comm.train_timeout_seconds)
    has_hooks = bool(layers) and patches.TOKEN_EXCHANGE.apply(
        lambda _: token_dispatch, lambda _: token_combine
    )
    in_fp8: list[GatherMoE] = []
    if section.exchange == "fp8" and experts_recipe(job_config) != BF16:
        where = f'{section.where} exchange = "fp8"'
        in_fp8 = [layer for layer in layers if isinstance(layer.experts, FP8GroupedExperts)]
        if not in_fp8:
            logger.warning(
                f"titan_fp8: {where} changes nothing: no MoE layer exchanges tokens by it"
            )
        elif not has_hooks:
            raise RuntimeError(f"{where}: not with the hooks of this version of torchtitan")
        else:
            logger.info(f"titan_fp8: {len(in_fp8)} MoE layers exchange their tokens in FP8")
    exchanging = layers if captures and has_hooks else in_fp8
    for layer in exchanging:
        layer.exchange = ExchangeSettings(section.exchange_capacity, timeout_s, layer in in_fp8)
