"""Settings that CUDA graphs exclude. torchtitan 0.3 captures forward and backward by default."""

import functools
from collections.abc import Callable
from typing import Any

from torchtitan.protocols.module import Module
from torchtitan.tools import utils

from titan_fp8.torchtitan_0_3 import patches

_WHY = {
    "fsdp_all_gather": "CUDA graphs cannot gather weights in FP8",
    "health_freq": "what runs in a CUDA graph cannot be observed",
}
"""Fields of the configs of FP8 modules, and why they exclude CUDA graphs."""


def check_settings() -> None:
    """Makes torchtitan's check of a training refuse CUDA graphs if such a field is set."""
    patches.CUDA_GRAPHS_CHECK.apply(_with_fp8_settings)


def _with_fp8_settings(validate: Callable) -> Callable:
    """Wraps torchtitan's check of the CUDA graphs of a training."""

    @functools.wraps(validate)
    def validate_with_fp8_settings(self: Any) -> None:
        validate(self)
        if (
            utils.device_type != "cuda"
            or self.training.disable_cuda_graphs
            or self.model_spec is None
        ):
            return
        for fqn, config, *_ in self.model_spec.model.traverse(Module.Config, recurse=True):
            for key, why in _WHY.items():
                if value := getattr(config, key, 0):
                    raise ValueError(
                        f"{key} = {value}, at {fqn}: {why}; set training.disable_cuda_graphs = True"
                    )

    return validate_with_fp8_settings
