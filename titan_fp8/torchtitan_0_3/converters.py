"""The two converters for `model_registry(flavor, converters=[...])`, and what they check.

Like torchtitan's own, they replace configs in the tree of a model, before it is built.
"""

from dataclasses import dataclass, field

from torchtitan.components import lora
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.module import Module
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_fp8 import activation_checkpointing, graph_passes, recomputation
from titan_fp8.checks import (
    ConversionReport,
    check_common_settings,
    check_host_speedups,
    check_patterns,
    check_permutation,
    check_recipe,
)
from titan_fp8.conversion import check_device, errors_prefixed, log_conversion
from titan_fp8.recipe import BF16
from titan_fp8.torchtitan_0_3 import fsdp, health, patches
from titan_fp8.torchtitan_0_3.experts import convert_experts
from titan_fp8.torchtitan_0_3.feed_forward import fuse_feed_forwards
from titan_fp8.torchtitan_0_3.host import speed_up
from titan_fp8.torchtitan_0_3.linear import DEFAULT_FILTER_FQNS, convert_linears

LINEAR = "FP8LinearConverter"
EXPERTS = "FP8GroupedExpertsConverter"


class FP8LinearConverter(QuantizationConverter):
    """FP8 for the linear layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        recipe: str = "blockwise"
        """How operands are scaled: "blockwise", "blockwise_pow2", "rowwise" or
        "rowwise_with_gw_hp"; "bf16" converts nothing."""

        filter_fqns: list[str] = field(default_factory=lambda: list(DEFAULT_FILTER_FQNS))
        """Linears whose qualified name contains one of these are left in high precision."""

        emulate: bool = False
        """Computes the same numbers in FP32 arithmetic, on any device; slow. CPUs always do."""

        fsdp_all_gather: bool = False
        """With FSDP2 or HSDP each rank quantizes its shard of a weight, once a step, and FP8 is
        gathered. The values are the same."""

        health_freq: int = 0
        """Every so many steps, log what FP8 does to the operands of each layer: underflow, error
        and scales, to TensorBoard and the log. 0: never."""

        host_speedups: bool | None = None
        """Whether to use what speeds FSDP2 and the dispatch of tokens up and is not FP8: bf16
        gradients sent as bf16, ranges marked only for a running profiler, permutation by gathers.
        The default is True with FP8, and False with recipe "bf16"."""

        def __post_init__(self) -> None:
            check_recipe(f"{LINEAR}: recipe", self.recipe)
            check_patterns(f"{LINEAR}: filter_fqns", self.filter_fqns)
            check_common_settings(f"{LINEAR}:", self)
            check_host_speedups(f"{LINEAR}: host_speedups", self.host_speedups)

    def __init__(self, config: Config):
        self.config = config

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Converts in place and returns its argument; logs a report on every linear."""
        config = self.config
        prepare(config.recipe, config.emulate)
        speed_up(model_config, config.recipe, config.host_speedups)
        with errors_prefixed(f"{LINEAR}:"):
            check_model(model_config, config)
            report = convert_linears(
                model_config,
                recipe=config.recipe,
                filter_fqns=config.filter_fqns,
                emulate=config.emulate,
            )
        log_conversion("linears", config.recipe, report)
        gather_in_fp8(LINEAR, config, model_config, report)
        if config.health_freq and report.converted:
            health.observe(model_config, report, config.health_freq)
        if fused := fuse_feed_forwards(model_config):
            logger.info(f"titan_fp8: {fused} feed-forwards run fused")
        if config.recipe != BF16 and not report.converted:
            logger.warning(f"titan_fp8: {LINEAR} converted nothing in this model")
        return model_config


class FP8GroupedExpertsConverter(QuantizationConverter):
    """FP8 for the grouped GEMMs of MoE experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        recipe: str = "blockwise"
        """As in FP8LinearConverter."""

        fqns: list[str] = field(default_factory=lambda: ["experts"])
        """Grouped experts whose qualified name contains one of these are converted."""

        emulate: bool = False
        """Computes the same numbers in FP32 arithmetic, on any device; slow. CPUs always do."""

        fsdp_all_gather: bool = False
        """As in FP8LinearConverter."""

        health_freq: int = 0
        """As in FP8LinearConverter."""

        host_speedups: bool | None = None
        """As in FP8LinearConverter."""

        permutation: str | None = None
        """How tokens are sorted by expert, and back. "gather": by gathers in forward and backward,
        padding each expert's tokens. "host": by torchtitan's own dispatcher. The values are the
        same except for the order of sums and for roundings of weighted outputs to the dtype of the
        activations. The default is "gather" with `host_speedups`, and otherwise "host"."""

        def __post_init__(self) -> None:
            check_recipe(f"{EXPERTS}: recipe", self.recipe)
            check_patterns(f"{EXPERTS}: fqns", self.fqns)
            if not self.fqns:
                raise ValueError(
                    f"{EXPERTS}: fqns = []: it would convert nothing; name the experts to convert "
                    "or leave the converter out"
                )
            check_common_settings(f"{EXPERTS}:", self)
            check_host_speedups(f"{EXPERTS}: host_speedups", self.host_speedups)
            check_permutation(f"{EXPERTS}: permutation", self.permutation)

    def __init__(self, config: Config):
        self.config = config

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Converts in place and returns its argument; logs a report on every experts module."""
        config = self.config
        if not any(model_config.traverse(GroupedExperts.Config)):
            raise ValueError(
                f"{EXPERTS} is for MoE models, and this one has no experts: leave it out"
            )
        prepare(config.recipe, config.emulate)
        with errors_prefixed(f"{EXPERTS}:"):
            check_model(model_config, config)
        speed_up(model_config, config.recipe, config.host_speedups, config.permutation)
        with errors_prefixed(f"{EXPERTS}:"):
            report = convert_experts(
                model_config, recipe=config.recipe, fqns=config.fqns, emulate=config.emulate
            )
        log_conversion("grouped experts", config.recipe, report)
        gather_in_fp8(EXPERTS, config, model_config, report)
        if config.health_freq and report.converted:
            health.observe(model_config, report, config.health_freq)
        return model_config


Settings = FP8LinearConverter.Config | FP8GroupedExpertsConverter.Config


def prepare(recipe: str, emulate: bool) -> None:
    """Checks that FP8 layers can run here, and applies their patches; nothing for bf16."""
    if recipe == BF16:
        return
    check_device(utils.device_type, emulate)
    patches.SAC_POLICY.apply(activation_checkpointing.with_fp8_policy)
    patches.RECOMPUTABLE_QUANTIZERS.apply(recomputation.with_recomputable_quantizers)
    patches.FEWER_OPS.apply(graph_passes.FewerOps.after)


def check_model(model: Module.Config, settings: Settings) -> None:
    """Checks that this model can be converted as `settings` say.

    Raises:
        ValueError: it has been converted by LoRA, whose frozen parameters a conversion would train;
            or its health shall be observed and it does not use FSDP2.
    """
    if settings.recipe == BF16:
        return
    adapters, frozen = lora._lora_class_cache.values(), lora._frozen_config_class_cache.values()
    for fqn, config, *_ in model.traverse(Module.Config, recurse=True):
        if config._owner in adapters or type(config) in frozen:
            raise ValueError(
                f"recipe = {settings.recipe!r}: LoRA has already converted {fqn or 'the model'}. "
                "Put the FP8 converters before LoRAConverter; an override of the command line "
                "always comes after it"
            )
    if settings.health_freq and not uses_fsdp2(model):
        raise ValueError(
            f"health_freq = {settings.health_freq}: it must be 0 for models of "
            "torchtitan.experiments.graph_trainer, which do not use FSDP2"
        )


def uses_fsdp2(model: Module.Config) -> bool:
    """Whether torchtitan shards this model by FSDP2, if the plan shards it."""
    modules = [each.__module__ for each in type(model).__mro__]
    return not any(each.startswith("torchtitan.experiments.graph_trainer") for each in modules)


def gather_in_fp8(
    converter: str, settings: Settings, model: Module.Config, converted: ConversionReport
) -> None:
    """Makes FSDP2 gather the converted weights in FP8, if `settings` say so, and logs a report."""
    if not settings.fsdp_all_gather or settings.recipe == BF16:
        return
    if not uses_fsdp2(model):
        logger.warning(
            "titan_fp8: fsdp_all_gather = True changes nothing: models of "
            "torchtitan.experiments.graph_trainer do not use FSDP2"
        )
        return
    report = fsdp.gather_in_fp8(model, converted)
    left = f", in high precision:\n{ConversionReport(left=report.left)}" if report.left else ""
    logger.info(
        f"titan_fp8: {converter}: FSDP2 gathers the weights of {len(report.converted)} modules in "
        f"FP8{left}"
    )
