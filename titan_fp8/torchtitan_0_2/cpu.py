"""What torchtitan 0.2 needs besides `titan_fp8.cpu_host.prepare` to run without an accelerator."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from titan_fp8.cpu_host import check_size, warning_of_unseeded_start
from titan_fp8.torchtitan_0_2.patches import TORCHTITAN_ON_CPU

FLAGS = {"--optimizer.implementation": ("foreach",)}
"""Flags that the CPU needs, unless the command line sets them: the default optimizer, fused, does
not accept DTensors on the CPU."""


def prepare() -> None:
    """Applies TORCHTITAN_ON_CPU."""
    from torchtitan.models.moe.kernels import fill_indices_cpu

    makes = warning_of_unseeded_start, counting_integers, lambda _: fill_indices_cpu
    TORCHTITAN_ON_CPU.apply(*makes)


def train() -> None:
    """Runs `python -m torchtitan.train`.

    Raises:
        ValueError: the model is too large for this machine.
    """
    from torchtitan.train import Trainer, main

    class CPUTrainer(Trainer):
        def init_distributed(self) -> Any:  # Before it come only the config's own imports.
            check_model(self.job_config)
            return super().init_distributed()

    main(CPUTrainer)


def check_model(job_config: Any) -> None:
    """Refuses a model that is too large for this machine."""
    from titan_fp8.torchtitan_0_2.config import model_of

    spec, args = model_of(job_config)
    name = f"{job_config.model.name} {job_config.model.flavor}"
    check_size(name, lambda: spec.model_cls(args))


def counting_integers(histc: Callable) -> Callable:
    """Wraps torch.histc: the router counts integers, and the CPU's kernel takes floats only."""

    @functools.wraps(histc)
    def histc_of_integers(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if input.is_floating_point():
            return histc(input, *args, **kwargs)
        return histc(input.float(), *args, **kwargs).to(input.dtype)

    return histc_of_integers
