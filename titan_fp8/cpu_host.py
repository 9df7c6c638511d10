"""torchtitan on a machine without an accelerator.

    python -m titan_fp8.cpu_host <torchtitan's own arguments>

torchtitan 0.2.2 takes a machine without an accelerator for a CUDA machine and fails in its first
call of torch.cuda, although FSDP2, tensor, expert and pipeline parallelism all run on gloo.
`prepare` applies the patches of `ON_CPU` in torchtitan_0_2/patches.py, which says what each is for;
`main` then runs `torchtitan.train`. Importing this module changes nothing.

`main` also selects the foreach optimizer unless the command line names one: torchtitan's default,
fused, does not take DTensors on the CPU. Context parallelism does not run on the CPU, whose
attention op has no sharding strategy.
"""

import functools
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from titan_fp8.torchtitan_0_2 import patches


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
    # Before the first import of torchtitan, and so before the other patches, which import it.
    patches.CPU_DEVICE_TYPE.apply(lambda _: lambda: "cpu")
    patches.CPU_DEVICE_MODULE.apply(*map(_constant, _device_module()))
    patches.CPU_GRADIENT_SUM.apply(_reducing_by_sum)
    patches.CPU_HISTC.apply(_counting_integers)
    patches.CPU_PERMUTE_INDICES.apply(_cpu_indices)
    patches.CPU_SEED_WARNING.apply(_warning_of_unseeded_start)


def _constant(value: Callable) -> Callable:
    return lambda original: value


def _device_module() -> tuple[Callable, ...]:
    """The functions of torch.cpu, in the order of `CPU_DEVICE_MODULE`."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = SimpleNamespace(name="CPU", total_memory=memory)
    return (
        lambda device=None: properties.name,
        lambda device=None: properties,
        lambda device=None: {},
        lambda device=None: None,
        lambda: None,
        lambda: 0,
    )


def _reducing_by_sum(set_divide_factor: Callable) -> Callable:
    @functools.wraps(set_divide_factor)
    def set_divide_factor_and_sum(self: Any, factor: float) -> None:
        set_divide_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    return set_divide_factor_and_sum


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
            logger.warning(
                "Training starts without a checkpoint: on the CPU every rank draws the same values"
                " for its shards. Let one process write a seed checkpoint (NGPU=1, flags"
                " --checkpoint.enable --checkpoint.create_seed_checkpoint) and name its folder in"
                " --checkpoint.initial_load_path."
            )
        return loaded

    return load_or_warn


def main() -> None:
    """Runs `python -m torchtitan.train` with the same arguments, on the CPU."""
    if torch.cuda.is_available():
        sys.exit("titan_fp8.cpu_host: this machine has a GPU, launch -m torchtitan.train")
    prepare()
    if not any(arg.startswith("--optimizer.implementation") for arg in sys.argv):
        sys.argv += ["--optimizer.implementation", "foreach"]
    from torchtitan.train import Trainer
    from torchtitan.train import main as train

    train(Trainer)


if __name__ == "__main__":
    main()
