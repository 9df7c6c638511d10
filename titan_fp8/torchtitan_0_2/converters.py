"""The two model converters, as torchtitan finds them in `[model] converters`."""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.utils import set_token_group_alignment_size_m
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_fp8.checks import ConversionReport
from titan_fp8.linear import convert_linears
from titan_fp8.ops import kernels_for
from titan_fp8.recipe import BF16, get_recipe
from titan_fp8.torchtitan_0_2.checkpointing import adapt_checkpointing
from titan_fp8.torchtitan_0_2.config import GROUPED_MM, LINEAR
from titan_fp8.torchtitan_0_2.experts import convert_experts
from titan_fp8.torchtitan_0_2.feed_forward import fuse_feed_forwards
from titan_fp8.torchtitan_0_2.fsdp import reduce_over_one_rank_by_copies
from titan_fp8.torchtitan_0_2.moe import route_by_gathers
from titan_fp8.torchtitan_0_2.permutation import permute_by_gathers
from titan_fp8.torchtitan_0_2.rematerialize import recompute_fp8_inputs

SPLIT_BACKWARD = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")
"""Pipeline schedules that run the backward of inputs and that of weights apart, in lower case."""


class _Converter(QuantizationConverter):
    """What both converters do around the conversion itself."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        super().__init__(job_config, parallel_dims)
        self.job_config, self.parallel_dims = job_config, parallel_dims
        compile_config = job_config.compile
        self.compiles = compile_config.enable and "model" in compile_config.components

    def prepare(self, recipe: str, emulate: bool) -> None:
        """Readies torchtitan for FP8 layers, which `recipe = "bf16"` does not need."""
        if recipe == BF16:
            return
        if emulate or utils.device_type != "cuda" or not torch.cuda.is_available():
            announce_emulation()
        else:
            kernels_for(torch.device("cuda", torch.cuda.current_device()))
        self.check_schedule()
        adapt_checkpointing()
        if self.compiles:
            ac = self.job_config.activation_checkpoint
            all_blocks = ac.mode == "full" or (
                ac.mode == "selective" and ac.selective_ac_option in ("op", "0", "1")
            )
            recompute_fp8_inputs(checkpointed=all_blocks)
        if self.job_config.parallelism.enable_async_tensor_parallel:
            warn_async_tp()

    def check_schedule(self) -> None:
        """ValueError for a pipeline schedule that this torch cannot run around FP8 layers."""
        schedule = self.job_config.parallelism.pipeline_parallel_schedule
        splits = schedule.lower() in SPLIT_BACKWARD
        if self.parallel_dims.pp_enabled and splits and torch.__version__ < (2, 13):
            raise ValueError(
                f"parallelism.pipeline_parallel_schedule = {schedule!r}: on torch "
                f"{torch.__version__} backward in two parts fails at autograd functions in Python, "
                "as FP8 layers are; allowed are schedules that run it at once, such as "
                "'Interleaved1F1B', or torch 2.13"
            )

    def log(self, what: str, recipe: str, report: ConversionReport) -> None:
        count, total = len(report.converted), len(report.converted) + len(report.left)
        logger.info(f"titan_fp8: converted {count} of {total} {what}, {recipe}\n{report}")

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: scales are computed where they are used."""


class LinearConverter(_Converter):
    """`quantize.linear.titan_fp8`: nn.Linear to FP8Linear."""

    def convert(self, model: nn.Module) -> None:
        section = self.job_config.quantize.linear.titan_fp8
        self.prepare(section.recipe, section.emulate)
        with naming(LINEAR):
            report = convert_linears(
                model,
                recipe=section.recipe,
                filter_fqns=section.filter_fqns,
                emulate=section.emulate,
            )
        self.log("linears", section.recipe, report)
        if fused := fuse_feed_forwards(model):
            logger.info(f"titan_fp8: {fused} feed-forwards run fused")
        if section.recipe != BF16 and not report.converted:
            logger.warning(f"titan_fp8: [{LINEAR}] converted nothing in this model")


class GroupedMMConverter(_Converter):
    """`quantize.grouped_mm.titan_fp8`: GroupedExperts to FP8GroupedExperts."""

    def convert(self, model: nn.Module) -> None:
        section = self.job_config.quantize.grouped_mm.titan_fp8
        recipe = section.recipe or self.job_config.quantize.linear.titan_fp8.recipe
        self.prepare(recipe, section.emulate)
        with naming(GROUPED_MM):
            report = convert_experts(
                model,
                recipe=recipe,
                fqns=section.fqns,
                emulate=section.emulate,
                compile_backend=self.job_config.compile.backend if self.compiles else None,
            )
        if recipe != BF16:
            # Beyond the Literal of its signature, which torchtitan does not enforce.
            set_token_group_alignment_size_m(get_recipe(recipe).alignment)
            if self.parallel_dims.ep_enabled:
                reduce_over_one_rank_by_copies()
        self.log("grouped experts", recipe, report)
        if (section.permutation or ("host" if recipe == BF16 else "gather")) == "gather":
            self.permute_by_gathers(model, asked=section.permutation is not None)

    def permute_by_gathers(self, model: nn.Module, asked: bool) -> None:
        """Replaces torchtitan's permutation; warns where it was `asked` for and there is none."""
        adapt_checkpointing()
        layers = route_by_gathers(model)
        if layers and self.parallel_dims.ep_enabled:
            permute_by_gathers()
        if layers:
            logger.info(f"titan_fp8: {layers} MoE layers permute their tokens by gathers")
        elif asked:
            logger.warning(
                f'titan_fp8: [{GROUPED_MM}] permutation = "gather" changes nothing: no MoE layer '
                "of this model has torchtitan's permutation"
            )


@contextlib.contextmanager
def naming(section: str) -> Iterator[None]:
    """Puts the TOML section in front of the ValueErrors of a conversion."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"[{section}] {error}") from None


@functools.cache
def announce_emulation() -> None:
    """Says once a run that FP8 is emulated, and keeps such a run from reporting a speed."""
    logger.warning(
        "titan_fp8: FP8 is emulated in FP32 arithmetic: the numbers are those of the recipe, "
        "the speed is not, so tps, tflops and mfu read 0"
    )
    MetricsProcessor.ntokens_since_last_log = property(lambda self: 0, lambda self, count: None)


@functools.cache
def warn_async_tp() -> None:
    logger.warning(
        "titan_fp8: async tensor parallelism looks for aten.mm next to collectives and does not "
        "see FP8 GEMMs: converted linears run without that overlap"
    )


register_model_converter(LinearConverter, LINEAR)
register_model_converter(GroupedMMConverter, GROUPED_MM)
