"""The two model converters that `[model] converters` of a TOML lists."""

import functools

import torch
from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_fp8 import (
    activation_checkpointing,
    gradient_reduction,
    graph_passes,
    profiler_ranges,
    recomputation,
)
from titan_fp8.checks import ConversionReport, permutation_of
from titan_fp8.conversion import check_device, errors_prefixed, log_conversion
from titan_fp8.fsdp import gather_in_fp8, requantize
from titan_fp8.gradient_copies import copy_by_kernel
from titan_fp8.linear import DEFAULT_FILTER_FQNS, FP8Linear, convert_linears
from titan_fp8.recipe import BF16, get_recipe
from titan_fp8.torchtitan_0_2 import (
    health,
    input_stream,
    patches,
    peer_exchange,
    permutation,
    token_exchange,
)
from titan_fp8.torchtitan_0_2.config import GROUPED_MM, LINEAR, experts_recipe
from titan_fp8.torchtitan_0_2.experts import (
    FP8GroupedExperts,
    convert_experts,
    is_grouped_experts,
)
from titan_fp8.torchtitan_0_2.feed_forward import fuse_feed_forwards
from titan_fp8.torchtitan_0_2.moe import GatherMoE, route_by_gathers
from titan_fp8.torchtitan_0_2.moe_block import compile_up_to_experts

SPLIT_BACKWARD_SCHEDULES = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")
"""Pipeline schedules, in lower case, that compute input and weight gradients separately."""
WITHOUT_FSDP2 = ("simple_fsdp.", "compiler_toolkit.", "autoparallel.")
"""torchtitan's experiments that shard parameters without FSDP2, as `model.name` begins."""


class _Converter(QuantizationConverter):
    """What both converters do besides the conversion itself."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        super().__init__(job_config, parallel_dims)
        self.job_config, self.parallel_dims = job_config, parallel_dims
        compile_config = job_config.compile
        self.gathers_in_fp8 = False
        self.without_fsdp2 = job_config.model.name.startswith(WITHOUT_FSDP2)
        self.uses_fsdp2 = parallel_dims.fsdp_enabled and not self.without_fsdp2
        self.compiles = compile_config.enable and "model" in compile_config.components

    def prepare(self, recipe: str, emulate: bool) -> None:
        """Checks that the job can run FP8 layers and applies their patches; nothing for bf16.

        Also turns autograd's multithreading off.
        """
        if recipe == BF16:
            return
        check_device(utils.device_type, emulate)
        if utils.device_type == "cuda":
            input_stream.install()
        self.check_schedule()
        self.check_health()
        # Backward runs on the thread that calls it, not on another one for the GPU. Where the GPU
        # waits for the CPU, compiled code is faster then. torchtitan 0.3 does this in every job.
        torch.autograd.set_multithreading_enabled(False)
        health.install(self.job_config)
        if self.uses_fsdp2:
            patches.GRADIENT_COPIES.apply(copy_by_kernel)
            patches.GRADIENT_REDUCTION.apply(
                gradient_reduction.in_bf16, gradient_reduction.noting_accumulation
            )
            patches.PROFILER_RANGES.apply(profiler_ranges.while_profiling)
        patches.SAC_POLICY.apply(activation_checkpointing.with_fp8_policy)
        patches.CHECKPOINT_RANGES.apply(profiler_ranges.without_profiler_ops)
        if self.compiles and not self.checkpoints_all_blocks():
            patches.RECOMPUTABLE_QUANTIZERS.apply(recomputation.with_recomputable_quantizers)
        if self.compiles and self.job_config.activation_checkpoint.mode in ("full", "selective"):
            patches.CHECKPOINT_MARKS.apply(recomputation.CompleteMarks.after)
        if self.compiles:
            patches.FEWER_OPS.apply(graph_passes.FewerOps.after)
        if self.job_config.parallelism.enable_async_tensor_parallel:
            warn_async_tp()

    def checkpoints_all_blocks(self) -> bool:
        ac = self.job_config.activation_checkpoint
        return ac.mode == "full" or (
            ac.mode == "selective" and ac.selective_ac_option in ("op", "0", "1")
        )

    def check_schedule(self) -> None:
        """ValueError for a pipeline schedule that this torch version cannot run with FP8 layers."""
        schedule = self.job_config.parallelism.pipeline_parallel_schedule
        splits = schedule.lower() in SPLIT_BACKWARD_SCHEDULES
        if self.parallel_dims.pp_enabled and splits and torch.__version__ < "2.13":
            raise ValueError(
                f"parallelism.pipeline_parallel_schedule = {schedule!r}: on torch "
                f"{torch.__version__} the backward of a torch.autograd.Function cannot be split, "
                "and FP8 layers are such functions; use a schedule that does not split backward, "
                "such as 'Interleaved1F1B', or torch 2.13"
            )

    def check_health(self) -> None:
        """ValueError for health of a model whose weights are gathered whenever they are read."""
        dims = self.parallel_dims
        if not (self.without_fsdp2 and (dims.fsdp_enabled or dims.dp_replicate_enabled)):
            return
        quantize = self.job_config.quantize
        for name, section in ((LINEAR, quantize.linear), (GROUPED_MM, quantize.grouped_mm)):
            if freq := section.titan_fp8.health_freq:
                raise ValueError(
                    f"[{name}] health_freq = {freq}: with model.name = "
                    f"{self.job_config.model.name!r} it must be 0, because the model does not use "
                    "FSDP2"
                )

    def gather_in_fp8(self, model: nn.Module, kind: type[nn.Module], section: str) -> None:
        """Makes FSDP2, if the plan has it, gather the weights of converted layers in FP8."""
        if not self.parallel_dims.fsdp_enabled:
            return
        if not self.uses_fsdp2:
            logger.info(
                f"titan_fp8: [{section}] fsdp_all_gather has no effect: model.name = "
                f"{self.job_config.model.name!r} does not use FSDP2, and weights are gathered in "
                "high precision"
            )
            return
        report = gather_in_fp8(model, kind)
        self.gathers_in_fp8 = True
        logger.info(
            f"titan_fp8: [{section}] FSDP2 gathers {len(report.converted)} weights in FP8"
            + (
                f"; these in high precision:\n{ConversionReport(left=report.left)}"
                if report.left
                else ""
            )
        )

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Has the shards that FSDP2 gathers in FP8 quantized. Ops quantize all other operands."""
        if self.gathers_in_fp8:
            requantize(model if isinstance(model, list) else [model])


class LinearConverter(_Converter):
    """`quantize.linear.titan_fp8`: nn.Linear to FP8Linear."""

    def convert(self, model: nn.Module) -> None:
        section = self.job_config.quantize.linear.titan_fp8
        self.prepare(section.recipe, section.emulate)
        is_default = section.filter_fqns == [*DEFAULT_FILTER_FQNS]
        with errors_prefixed(f"[{LINEAR}]"):
            report = convert_linears(
                model,
                recipe=section.recipe,
                filter_fqns=None if is_default else section.filter_fqns,
                emulate=section.emulate,
            )
        log_conversion("linears", section.recipe, report)
        if fused := fuse_feed_forwards(model):
            logger.info(f"titan_fp8: {fused} feed-forwards run fused")
        if section.fsdp_all_gather and section.recipe != BF16:
            self.gather_in_fp8(model, FP8Linear, LINEAR)
        if section.recipe != BF16 and not report.converted:
            logger.warning(
                f"titan_fp8: [{LINEAR}] converted nothing in this model; the table above says why"
            )


class GroupedMMConverter(_Converter):
    """`quantize.grouped_mm.titan_fp8`: GroupedExperts to FP8GroupedExperts."""

    def convert(self, model: nn.Module) -> None:
        section = self.job_config.quantize.grouped_mm.titan_fp8
        recipe = experts_recipe(self.job_config.quantize)
        self.check_model(model)
        self.prepare(recipe, section.emulate)
        with errors_prefixed(f"[{GROUPED_MM}]"):
            report = convert_experts(
                model,
                recipe=recipe,
                fqns=section.fqns,
                emulate=section.emulate,
                compile_backend=self.job_config.compile.backend if self.compiles else None,
            )
        if recipe != BF16:
            alignment = get_recipe(recipe).alignment
            patches.TOKEN_GROUP_ALIGNMENT.apply(lambda _: alignment)
        log_conversion("grouped experts", recipe, report)
        if section.fsdp_all_gather and recipe != BF16:
            self.gather_in_fp8(model, FP8GroupedExperts, GROUPED_MM)
        if permutation_of(section.permutation, recipe) == "gather":
            self.permute_by_gathers(model, requested=section.permutation is not None)
            if recipe != BF16 and self.compiles:
                self.compile_blocks(model)

    def check_model(self, model: nn.Module) -> None:
        """ValueError for a model without experts."""
        if not any(map(is_grouped_experts, model.modules())):
            job = self.job_config.model
            raise ValueError(
                f"model.converters = {job.converters}: {GROUPED_MM!r} is for MoE models, and "
                f"{job.name} {job.flavor} has no experts: drop it there, and the section "
                f"[{GROUPED_MM}] if there is one"
            )

    def permute_by_gathers(self, model: nn.Module, requested: bool) -> None:
        """Converts the MoE layers; warns if the user `requested` it and the model has none."""
        layers = route_by_gathers(model)
        if layers and self.parallel_dims.ep_enabled:
            patches.PERMUTATION.apply(
                lambda _: permutation.permute, lambda _: permutation.unpermute
            )
            patches.TOKEN_EXCHANGE.apply(
                lambda _: token_exchange.all_to_all_single,
                lambda _: token_exchange.all_to_all_single_autograd,
            )
            self.exchange_tokens(model)
        if layers:
            logger.info(f"titan_fp8: {layers} MoE layers permute their tokens by gathers")
        elif requested:
            logger.warning(
                f'titan_fp8: [{GROUPED_MM}] permutation = "gather" changes nothing: no MoE layer '
                "of this model uses torchtitan's permutation"
            )

    def exchange_tokens(self, model: nn.Module) -> None:
        """Lets the MoE layers exchange tokens by themselves, where that is possible.

        Raises:
            RuntimeError: exchange = "fp8", and hooks of torchtitan cannot be replaced.
        """
        section = self.job_config.quantize.grouped_mm.titan_fp8
        hooks = (
            patches.TOKEN_DISPATCH.apply(lambda _: token_exchange.token_dispatch),
            patches.TOKEN_COMBINE.apply(peer_exchange.combine_unless_exchanged),
        )
        if not all(hooks):
            if section.exchange == "fp8":
                raise RuntimeError(
                    f'[{GROUPED_MM}] exchange = "fp8": not with this version of torchtitan'
                )
            return
        for layer in model.modules():
            if isinstance(layer, GatherMoE):
                layer.exchange = section.exchange
                layer.exchange_capacity = section.exchange_capacity

    def compile_blocks(self, model: nn.Module) -> None:
        """Compiles MoE blocks up to the experts; under TP they have hooks that forbid it."""
        if self.parallel_dims.tp_enabled:
            return
        if blocks := compile_up_to_experts(model, self.job_config.compile.backend):
            logger.info(f"titan_fp8: {blocks} MoE blocks are compiled up to the experts")


@functools.cache
def warn_async_tp() -> None:
    logger.warning(
        "titan_fp8: async tensor parallelism overlaps aten.mm with collectives, but not FP8 GEMMs, "
        "which are other ops: converted linears run without that overlap"
    )


register_model_converter(LinearConverter, LINEAR)
register_model_converter(GroupedMMConverter, GROUPED_MM)
