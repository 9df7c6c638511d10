"""What torchtitan 0.3 needs besides `titan_fp8.cpu_host.prepare` to run without an accelerator."""

import functools
from collections.abc import Callable
from typing import Any

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


def fit_for_the_cpu(parse_args: Callable) -> Callable:
    """Wraps ConfigManager.parse_args: no large models, nor FlexAttention, which has no backward."""

    @functools.wraps(parse_args)
    def parse_for_the_cpu(self: Any, args: list[str] | None = None) -> Any:
        config = parse_args(self, args)
        if (spec := config.model_spec) is not None:
            check_size(f"{spec.name} {spec.flavor}", spec.model.build)
            use_sdpa(spec.model)
        return config

    return parse_for_the_cpu
