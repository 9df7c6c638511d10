"""Counts what FSDP2 gathers."""

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather


class CountingAllGather(DefaultAllGather):
    """FSDP2's all-gather, counting for one rank."""

    bytes_sent = 0
    numbers_received = 0

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args, **options):
        self.bytes_sent += input_tensor.nbytes
        self.numbers_received += output_tensor.numel()
        return super().__call__(output_tensor, input_tensor, *args, **options)


def count_all_gathers(model: nn.Module) -> CountingAllGather:
    """Counts the all-gathers of all FSDP2 units in `model` from now on."""
    counter = CountingAllGather()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(counter)
    return counter
