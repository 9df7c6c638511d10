"""torchtitan on a machine without an accelerator.

    python -m titan_fp8.cpu_host <torchtitan's own arguments>

torchtitan 0.2.2 takes a machine with no accelerator for a CUDA one and dies in its first call of
torch.cuda, although FSDP2, tensor, expert and pipeline parallelism all run on gloo. `prepare`
closes the gaps and `main` hands over to `torchtitan.train`; importing this module does nothing.
Each patch answers one fact:

- `torch._utils._get_available_device_type` answers "cpu". torchtitan.tools.utils asks it once,
  while it is imported, so `prepare` has to come before the first import of torchtitan.
- `torch.cpu` gets what the trainer asks of a device module and this one lacks: a name, the memory
  of the machine, memory statistics (none: nothing counts CPU memory, and the log shows -0.00), and
  the current device as a number, which torchtitan passes to a barrier.
- FSDP reduces with a sum and divides afterwards. torchtitan sets a gradient divide factor of its
  own, for which FSDP would use the reduction PREMUL_SUM, and gloo has none.
- `torch.histc` counts integers: the router counts the tokens of each expert with it, and the CPU
  kernel takes floats only.
- The token permutation uses torchtitan's CPU version of its Triton kernel, which has the same
  arguments.
- A sharded start without a checkpoint is warned of. DTensor has no random numbers for CPU meshes,
  so each rank draws the same: the halves of a parameter are equal, experts come in pairs, routers
  tie. A seed checkpoint, written by one process, is a good start.

`main` also asks for the foreach optimizer where the command line names none: torchtitan's default,
fused, takes no DTensor on the CPU. Context parallelism is the one plan that stays out of reach,
because the CPU attention op has no sharding strategy.
"""

import os
import sys
from types import SimpleNamespace

import torch


def prepare() -> None:
    """Make torchtitan run on the CPU in this process; a second call does nothing.

    Raises:
        RuntimeError: torchtitan has been imported before, for another device.
    """
    host = sys.modules.get("torchtitan.tools.utils")
    if host is not None:
        if host.device_type != "cpu":
            raise RuntimeError(
                "titan_fp8.cpu_host.prepare() came too late: torchtitan is already imported"
                f" and has chosen {host.device_type!r} as its device"
            )
        return
    torch._utils._get_available_device_type = lambda: "cpu"
    _complete_device_module()
    _reduce_by_sum()
    _count_integers()
    _permute_on_cpu()
    _warn_of_unseeded_start()


def _complete_device_module() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = SimpleNamespace(name="CPU", total_memory=memory)
    torch.cpu.get_device_name = lambda device=None: properties.name
    torch.cpu.get_device_properties = lambda device=None: properties
    torch.cpu.memory_stats = lambda device=None: {}
    torch.cpu.reset_peak_memory_stats = lambda device=None: None
    torch.cpu.empty_cache = lambda: None
    torch.cpu.current_device = lambda: 0


def _reduce_by_sum() -> None:
    from torch.distributed.fsdp import FSDPModule

    set_divide_factor = FSDPModule.set_gradient_divide_factor

    def set_divide_factor_and_sum(self: FSDPModule, factor: float) -> None:
        set_divide_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_divide_factor_and_sum


def _count_integers() -> None:
    histc = torch.histc

    def histc_of_integers(input: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if input.is_floating_point():
            return histc(input, *args, **kwargs)
        return histc(input.float(), *args, **kwargs).to(input.dtype)

    torch.histc = histc_of_integers


def _permute_on_cpu() -> None:
    from torchtitan.models.moe import kernels

    kernels.fill_indices_wrapper = kernels.fill_indices_cpu


def _warn_of_unseeded_start() -> None:
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.tools.logging import logger

    load = CheckpointManager.load

    def load_or_warn(self: CheckpointManager, step: int = -1) -> bool:
        loaded = load(self, step)
        if not loaded and torch.distributed.get_world_size() > 1:
            logger.warning(
                "Training starts without a checkpoint: on the CPU every rank draws the same values"
                " for its shards. Let one process write a seed checkpoint (NGPU=1, flags"
                " --checkpoint.enable --checkpoint.create_seed_checkpoint) and name its folder in"
                " --checkpoint.initial_load_path."
            )
        return loaded

    CheckpointManager.load = load_or_warn


def main() -> None:
    """What `python -m torchtitan.train` does, with the same arguments, on the CPU."""
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
