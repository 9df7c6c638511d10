"""What torchtitan 0.3 needs besides `titan_fp8.cpu_host.prepare` to run without an accelerator."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from titan_fp8.cpu_host import check_size, warning_of_unseeded_start
from titan_fp8.torchtitan_0_3.patches import TORCHTITAN_ON_CPU

FLAGS = {"--optimizer.implementation": ("foreach",), "--training.disable_cuda_graphs": ()}
"""Settings that the CPU needs, where the command line says nothing else: the default optimizer,
fused, does not take DTensors on the CPU."""


def prepare() -> None:
    """Applies TORCHTITAN_ON_CPU."""
    TORCHTITAN_ON_CPU.apply(warning_of_unseeded_start, fit_for_the_cpu)


def train() -> None:
    """Runs `python -m torchtitan.train`."""
    from torchtitan.train import main

    main()


def use_sdpa(model: Any) -> None:
    """Replaces FlexAttention in a model's config by SDPA, which takes no document masks."""
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.gpt_oss.model import Attention
    from torchtitan.tools.logging import logger

    for fqn, _, parent, attribute in list(model.traverse(FlexAttention.Config)):
        setattr(parent, attribute, ScaledDotProductAttention.Config())
        if isinstance(parent, Attention.Config):
            logger.warning(f"{fqn}: on the CPU this attention runs without its sinks")


def check_model(config: Any) -> None:
    """Refuses a model that is too large for CPUs."""
    spec = config.model_spec
    with torch.device("meta"):
        parameters = sum(p.numel() for p in spec.model.build().parameters())
    trains = not config.checkpoint.create_seed_checkpoint
    check_size(f"{spec.name} {spec.flavor}", parameters, trains)


def fit_for_the_cpu(parse_args: Callable) -> Callable:
    """Wraps ConfigManager.parse_args: no large models, nor FlexAttention, which has no backward."""

    @functools.wraps(parse_args)
    def parse_for_the_cpu(self: Any, args: list[str] | None = None) -> Any:
        config = parse_args(self, args)
        if config.model_spec is not None:
            check_model(config)
            use_sdpa(config.model_spec.model)
        return config

    return parse_for_the_cpu
