"""What torchtitan 0.2 needs besides `titan_fp8.cpu_host.prepare` to run without an accelerator."""

import functools
from collections.abc import Callable
from typing import Any

import torch

FLAGS = {"--optimizer.implementation": ("foreach",)}
"""Flags that the CPU needs, unless the command line sets them: the default optimizer, fused, does
not accept DTensors on the CPU."""


def train() -> None:
    """Runs `python -m torchtitan.train`."""
    from torchtitan.train import Trainer, main

    main(Trainer)


def counting_integers(histc: Callable) -> Callable:
    """Wraps torch.histc: the router counts integers, and the CPU's kernel takes floats only."""

    @functools.wraps(histc)
    def histc_of_integers(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if input.is_floating_point():
            return histc(input, *args, **kwargs)
        return histc(input.float(), *args, **kwargs).to(input.dtype)

    return histc_of_integers


def cpu_indices(fill_indices_wrapper: Callable) -> Callable:
    """torchtitan's CPU version of the Triton kernel that the token permutation calls."""
    from torchtitan.models.moe import kernels

    return kernels.fill_indices_cpu
