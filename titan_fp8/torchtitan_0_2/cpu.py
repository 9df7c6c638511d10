"""What torchtitan 0.2 needs besides `titan_fp8.cpu_host.prepare` to run without an accelerator."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from titan_fp8.torchtitan_0_2 import patches

FLAGS = {"--optimizer.implementation": ("foreach",)}
"""Flags that the CPU needs, unless the command line sets them: the default optimizer, fused, does
not accept DTensors on the CPU."""

SEED_WARNING = (
    "Training starts without a checkpoint: on the CPU every rank draws the same values for its "
    "shards. Let one process write a seed checkpoint (NGPU=1, flags --checkpoint.enable "
    "--checkpoint.create_seed_checkpoint) and name its folder in --checkpoint.initial_load_path."
)


def prepare() -> None:
    """Applies the patches that torchtitan 0.2 needs on the CPU; imports torchtitan."""
    patches.CPU_HISTC.apply(_counting_integers)
    patches.CPU_PERMUTE_INDICES.apply(_cpu_indices)
    patches.CPU_SEED_WARNING.apply(_warning_of_unseeded_start)


def train() -> None:
    """Runs `python -m torchtitan.train`."""
    from torchtitan.train import Trainer, main

    main(Trainer)


def _counting_integers(histc: Callable) -> Callable:
    @functools.wraps(histc)
    def histc_of_integers(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if input.is_floating_point():
            return histc(input, *args, **kwargs)
        return histc(input.float(), *args, **kwargs).to(input.dtype)

    return histc_of_integers


def _cpu_indices(fill_indices_wrapper: Callable) -> Callable:
    from torchtitan.models.moe import kernels

    return kernels.fill_indices_cpu


def _warning_of_unseeded_start(load: Callable) -> Callable:
    from torchtitan.tools.logging import logger

    @functools.wraps(load)
    def load_or_warn(self: Any, step: int = -1) -> bool:
        loaded = load(self, step)
        if not loaded and torch.distributed.get_world_size() > 1:
            logger.warning(SEED_WARNING)
        return loaded

    return load_or_warn
