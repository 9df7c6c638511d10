"""The two converters for `model_registry(flavor, converters=[...])`, and what they check.

Like torchtitan's own, they replace configs in the tree of a model, before it is built.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchtitan.components import lora
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.protocols.module import Module
from torchtitan.tools import utils

from titan_fp8.compile import apply_patches
from titan_fp8.host import speed_up_fsdp2
from titan_fp8.modules.conversion import check_device, convert_and_log, errors_prefixed
from titan_fp8.modules.report import ConversionReport
from titan_fp8.modules.settings import ExpertsSettings, LinearSettings
from titan_fp8.recipe import BF16, get_recipe
from titan_fp8.torchtitan_0_3 import fsdp, health, patches
from titan_fp8.torchtitan_0_3.experts import convert_experts
from titan_fp8.torchtitan_0_3.feed_forward import fuse_feed_forwards
from titan_fp8.torchtitan_0_3.linear import DEFAULT_FILTER_FQNS, convert_linears

_NOT_IN_CUDA_GRAPHS = {
    "fsdp_all_gather": "CUDA graphs cannot gather weights in FP8",
    "health_freq": "what runs in a CUDA graph cannot be observed",
}
"""Fields of the configs of FP8 modules. torchtitan 0.3 captures forward and backward by default."""


class _Converter(QuantizationConverter):
    """What both converters do."""

    kind: str
    """What is converted, for logs."""
    convert_configs: Callable[[Module.Config, Any], ConversionReport]
    """The conversion itself, in place, by the settings."""

    def __init__(self, config: Any):
        self.config = config

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Converts in place and returns its argument; logs a report on what might be converted."""
        config, converts = self.config, self.config.recipe != BF16
        if converts:
            check_device(utils.device_type, config.emulate)
            with errors_prefixed(config.where):
                check_model(model_config, config)
            apply_patches()
        if converts if config.host_speedups is None else config.host_speedups:
            speed_up_fsdp2()
        report = convert_and_log(
            model_config,
            config.where,
            self.kind,
            config.recipe,
            lambda model: self.convert_configs(model, config),
            fuse_feed_forwards,
        )
        if config.fsdp_all_gather and converts and get_recipe(config.recipe).has_weight_blocks:
            fsdp.gather_in_fp8(config.where, model_config, report)
        if config.health_freq and report.converted:
            patches.STEP_HEALTH.apply(health.reporting)
        if converts and (config.fsdp_all_gather or config.health_freq):
            patches.CUDA_GRAPHS_CHECK.apply(refusing_settings)
        return model_config


class FP8LinearConverter(_Converter):
    """FP8 for the linear layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(LinearSettings, QuantizationConverter.Config):
        where = "FP8LinearConverter:"
        filter_fqns: list[str] = field(default_factory=lambda: list(DEFAULT_FILTER_FQNS))
        fsdp_all_gather: bool = False

    kind = "linears"
    convert_configs = staticmethod(convert_linears)


class FP8GroupedExpertsConverter(_Converter):
    """FP8 for the grouped GEMMs of MoE experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(ExpertsSettings, QuantizationConverter.Config):
        where = "FP8GroupedExpertsConverter:"
        fsdp_all_gather: bool = False
        host_speedups: bool | None = None
        """As in FP8LinearConverter."""

    kind = "grouped experts"
    convert_configs = staticmethod(convert_experts)


def check_model(model: Module.Config, settings: Any) -> None:
    """ValueError if `settings` do not suit the model.

    LoRA has converted it, whose frozen parameters a conversion would train, or its health shall be
    observed and it does not use FSDP2.
    """
    adapters, frozen = lora._lora_class_cache.values(), lora._frozen_config_class_cache.values()
    for fqn, config, *_ in model.traverse(Module.Config, recurse=True):
        if config._owner in adapters or type(config) in frozen:
            raise ValueError(
                f"recipe = {settings.recipe!r}: LoRA has already converted {fqn or 'the model'}. "
                "Put the FP8 converters before LoRAConverter; an override of the command line "
                "always comes after it"
            )
    if settings.health_freq and not fsdp.uses_fsdp2(model):
        raise ValueError(
            f"health_freq = {settings.health_freq}: it must be 0 for models of "
            "torchtitan.experiments.graph_trainer, which do not use FSDP2"
        )


def refusing_settings(validate: Callable) -> Callable:
    """Wraps torchtitan's check of the CUDA graphs of a training."""

    @functools.wraps(validate)
    def validate_with_fp8_settings(self: Any) -> None:
        validate(self)
        disabled = utils.device_type != "cuda" or self.training.disable_cuda_graphs
        if disabled or self.model_spec is None:
            return
        for fqn, config, *_ in self.model_spec.model.traverse(Module.Config, recurse=True):
            for key, why in _NOT_IN_CUDA_GRAPHS.items():
                if value := getattr(config, key, 0):
                    raise ValueError(
                        f"{key} = {value}, at {fqn}: {why}; set training.disable_cuda_graphs = True"
                    )

    return validate_with_fp8_settings
