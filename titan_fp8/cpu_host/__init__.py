"""Runs torchtitan on a machine without an accelerator.

    python -m titan_fp8.cpu_host <torchtitan's own arguments>

Without an accelerator torchtitan assumes CUDA and fails at its first call of torch.cuda, although
FSDP2, tensor, expert and pipeline parallelism all run on gloo. `prepare` applies the patch CPU, and
then what cpu.py of the adapter for the installed torchtitan has. `main` runs `torchtitan.train`.
Importing this module changes nothing.

Two things do not run on the CPU: context parallelism, because PyTorch's attention op for the CPU
has no sharding strategy, and torchtitan's profiling, which fails without a GPU.
"""

import functools
import gc
import importlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from titan_fp8 import patches
from titan_fp8.cpu_host import bf16

SEED_WARNING = (
    "Training starts without a checkpoint: on the CPU every rank draws the same values for its "
    "shards. Let one process write a seed checkpoint (NGPU=1, flags --checkpoint.enable "
    "--checkpoint.create_seed_checkpoint) and name its folder in --checkpoint.initial_load_path."
)

BYTES_PER_PARAMETER = 16
"""Of a parameter, its gradient and AdamW's state, in FP32."""

_logger = logging.getLogger()  # torchtitan's own


def prepare() -> None:
    """Makes torchtitan run on the CPU in this process; a second call does nothing.

    Raises:
        RuntimeError: torchtitan has been imported before, for another device.
    """
    utils = sys.modules.get("torchtitan.tools.utils")
    if utils is not None:
        if utils.device_type != "cpu":
            raise RuntimeError(
                "titan_fp8.cpu_host.prepare() came too late: torchtitan is already imported"
                f" and has chosen {utils.device_type!r} as its device"
            )
        return
    patches.CPU.apply(
        lambda _: lambda: "cpu",
        *map(_constant, _device_module()),
        _reducing_by_sum,
        *(_in_fp32(kernel.path) for kernel in patches.BF16_KERNELS),
    )
    _adapter().prepare()


def _adapter() -> ModuleType:
    """The module cpu.py of the adapter for the installed torchtitan."""
    major, minor, *_ = importlib.metadata.version("torchtitan").split(".")
    version = "0_2" if (int(major), int(minor)) < (0, 3) else "0_3"
    return importlib.import_module(f"titan_fp8.torchtitan_{version}.cpu")


def _in_fp32(path: str) -> Callable:
    return (lambda kernel: kernel) if bf16.has_bf16_kernels() else bf16.in_fp32(path)


def _constant(value: Callable) -> Callable:
    return lambda original: value


def memory_of_machine() -> int:
    """In bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_size(name: str, build: Callable[[], torch.nn.Module]) -> None:
    """Refuses a model that this machine has no memory for, by a ValueError."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build().parameters())
    if parameters > (allowed := memory_of_machine() // BYTES_PER_PARAMETER):
        raise ValueError(
            f"{name} has {parameters / 1e9:,.1f} billion parameters, and no GPU was found: allowed "
            f"on this CPU are {allowed / 1e9:,.1f} billion. Use GPUs, or a smaller flavor such as "
            "debugmodel"
        )


def _device_module() -> tuple[Callable, ...]:
    """What torchtitan calls of its device module and torch.cpu lacks, in the order of the patch.

    torch.cpu has current_device, but returns a string, and a barrier needs a number.
    """
    properties = SimpleNamespace(name="CPU", total_memory=memory_of_machine())
    return (
        lambda device=None: properties.name,
        lambda device=None: properties,
        lambda device=None: {},
        lambda device=None: None,
        lambda: None,
        lambda: 0,
    )


def _reducing_by_sum(set_divide_factor: Callable) -> Callable:
    """With a divide factor FSDP2 reduces by PREMUL_SUM, which gloo lacks."""

    @functools.wraps(set_divide_factor)
    def set_divide_factor_and_sum(self: Any, factor: float) -> None:
        set_divide_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    return set_divide_factor_and_sum


def warning_of_unseeded_start(load: Callable) -> Callable:
    """Wraps torchtitan's `CheckpointManager.load`: DTensor has no random numbers for CPU meshes."""

    @functools.wraps(load)
    def load_or_warn(self: Any, step: int = -1) -> bool:
        loaded = load(self, step)
        if not loaded and torch.distributed.get_world_size() > 1:
            _logger.warning(SEED_WARNING)
        return loaded

    return load_or_warn


def main() -> None:
    """Runs `python -m torchtitan.train` with the same arguments, on the CPU."""
    if torch.cuda.is_available() and torch.version.hip:
        sys.exit(
            "titan_fp8.cpu_host: this machine has an AMD GPU, which titan_fp8 does not support: "
            "hide it with HIP_VISIBLE_DEVICES= to train on the CPU, or train on NVIDIA GPUs"
        )
    if torch.cuda.is_available():
        sys.exit("titan_fp8.cpu_host: this machine has a GPU; run `-m torchtitan.train` instead")
    gc.disable()  # as torchtitan's trainer does, but before the imports
    prepare()
    adapter = _adapter()
    for flag, values in adapter.FLAGS.items():
        if not any(arg.startswith(flag) for arg in sys.argv):
            sys.argv += [flag, *values]
            _logger.warning(
                f"titan_fp8: the CPU needs {' '.join((flag, *values))}, which overrides the "
                "config; the command line may say otherwise"
            )
    adapter.train()
