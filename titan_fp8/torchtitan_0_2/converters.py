"""The two model converters that `[model] converters` of a TOML lists."""

import logging

import torch
from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe import utils as moe_utils
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_fp8.compile import apply_patches
from titan_fp8.fsdp import gather_in_fp8, requantize
from titan_fp8.modules.conversion import check_device, convert_and_log, log_gathers
from titan_fp8.modules.linear import DEFAULT_FILTER_FQNS, FP8Linear, convert_linears
from titan_fp8.modules.report import ConversionReport
from titan_fp8.patches import log_once
from titan_fp8.recipe import BF16, get_recipe
from titan_fp8.torchtitan_0_2 import health
from titan_fp8.torchtitan_0_2.config import GROUPED_MM, LINEAR, check_sizes, experts_recipe
from titan_fp8.torchtitan_0_2.experts import FP8GroupedExperts, convert_experts
from titan_fp8.torchtitan_0_2.feed_forward import fuse_feed_forwards
from titan_fp8.torchtitan_0_2.speedups import speed_up

SPLIT_BACKWARD_SCHEDULES = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")
"""Pipeline schedules, in lower case, that compute input and weight gradients separately."""
WITHOUT_FSDP2 = ("simple_fsdp.", "compiler_toolkit.", "autoparallel.")
"""torchtitan's experiments that shard parameters without FSDP2, as `model.name` begins."""


class _Converter(QuantizationConverter):
    """What both converters do besides the conversion itself."""

    name: str
    kind: str
    """What is converted, for logs."""
    layer_class: type[nn.Module]
    report: ConversionReport
    """What `convert` has converted, and why not the rest."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        super().__init__(job_config, parallel_dims)
        check_sizes(job_config, parallel_dims)
        self.job_config, self.parallel_dims = job_config, parallel_dims
        compile_config = job_config.compile
        quantize = job_config.quantize
        if self.name == LINEAR:
            self.section, self.recipe = quantize.linear.titan_fp8, quantize.linear.titan_fp8.recipe
        else:
            self.section, self.recipe = quantize.grouped_mm.titan_fp8, experts_recipe(job_config)
        self.gathers_in_fp8 = False
        self.without_fsdp2 = job_config.model.name.startswith(WITHOUT_FSDP2)
        self.uses_fsdp2 = parallel_dims.fsdp_enabled and not self.without_fsdp2
        self.compiles = compile_config.enable and "model" in compile_config.components

    def convert_layers(self, model: nn.Module) -> ConversionReport:
        """The conversion itself, in place."""
        raise NotImplementedError

    def convert(self, model: nn.Module) -> None:
        """Converts in place; logs a report on what might be converted."""
        section, recipe = self.section, self.recipe
        if recipe != BF16:
            self.prepare(section.emulate)
        self.report = convert_and_log(
            model, section.where, self.kind, recipe, self.convert_layers, fuse_feed_forwards
        )
        for fqn, *_ in self.report.converted:
            vars(model.get_submodule(fqn))["health_freq"] = section.health_freq
        gathers = section.fsdp_all_gather and recipe != BF16
        if gathers and self.uses_fsdp2:
            self.gathers_in_fp8 = True
            report = gather_in_fp8(model, self.layer_class)
            log_gathers(section.where, f"{len(report.converted)} weights", report)
        elif gathers and self.parallel_dims.fsdp_enabled:
            logger.info(
                f"titan_fp8: {section.where} fsdp_all_gather has no effect: model.name = "
                f"{self.job_config.model.name!r} does not use FSDP2"
            )
        ours = [name for name in self.job_config.model.converters if name in (LINEAR, GROUPED_MM)]
        if ours[-1] == self.name:  # Once for both converters, when all is converted.
            speed_up(model, self.job_config, self.parallel_dims, self.uses_fsdp2, self.compiles)

    def prepare(self, emulate: bool) -> None:
        """Checks that the job can run FP8 layers, and applies their patches."""
        check_device(utils.device_type, emulate)
        self.check_schedule()
        self.check_health()
        health.install(self.job_config)
        apply_patches(compiles=self.compiles, recomputes=not self.checkpoints_all_blocks())
        if self.job_config.parallelism.enable_async_tensor_parallel:
            log_once(
                logging.WARNING,
                "titan_fp8: async tensor parallelism overlaps aten.mm with collectives, but not "
                "FP8 GEMMs, which are other ops: converted linears run without that overlap",
            )

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
        dims, freq = self.parallel_dims, self.section.health_freq
        is_sharded = dims.fsdp_enabled or dims.dp_replicate_enabled
        if freq and self.without_fsdp2 and is_sharded:
            raise ValueError(
                f"[{self.name}] health_freq = {freq}: with model.name = "
                f"{self.job_config.model.name!r} it must be 0, because the model does not use FSDP2"
            )

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Has the shards that FSDP2 gathers in FP8 quantized. Ops quantize all other operands."""
        if self.gathers_in_fp8:
            requantize(model if isinstance(model, list) else [model])


class LinearConverter(_Converter):
    """`quantize.linear.titan_fp8`: nn.Linear to FP8Linear."""

    name, kind, layer_class = LINEAR, "linears", FP8Linear

    def convert_layers(self, model: nn.Module) -> ConversionReport:
        filter_fqns = self.section.filter_fqns
        return convert_linears(
            model,
            recipe=self.recipe,
            filter_fqns=None if filter_fqns == [*DEFAULT_FILTER_FQNS] else filter_fqns,
            emulate=self.section.emulate,
        )


class GroupedMMConverter(_Converter):
    """`quantize.grouped_mm.titan_fp8`: GroupedExperts to FP8GroupedExperts."""

    name, kind, layer_class = GROUPED_MM, "grouped experts", FP8GroupedExperts

    def convert_layers(self, model: nn.Module) -> ConversionReport:
        report = convert_experts(
            model,
            recipe=self.recipe,
            fqns=self.section.fqns,
            emulate=self.section.emulate,
            compile_backend=self.job_config.compile.backend if self.compiles else None,
        )
        if self.recipe != BF16:
            # torchtitan's type for it allows 8, 16 and 32; at 128 no 1x128 block crosses experts.
            moe_utils.set_token_group_alignment_size_m(get_recipe(self.recipe).alignment)
        return report


register_model_converter(LinearConverter, LINEAR)
register_model_converter(GroupedMMConverter, GROUPED_MM)
