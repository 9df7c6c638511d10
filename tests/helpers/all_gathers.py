"""Counts what FSDP2 gathers, and what is quantized for it."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from titan_fp8.fsdp import sharded_weight
from titan_fp8.functional.weights import GatheredWeight


@contextlib.contextmanager
def counting() -> Iterator[tuple[list[tuple], list[int]]]:
    """An element for each GatheredWeight, and the number of shards of each quantization."""
    gathered: list[tuple] = []
    quantized: list[int] = []
    new, quantize = GatheredWeight.__new__, sharded_weight.quantize_shards

    def gather(*args):
        gathered.append(args)
        return new(*args)

    def count(shards):
        quantized.append(len(shards))
        quantize(shards)

    with (
        mock.patch.object(GatheredWeight, "__new__", gather),
        mock.patch.object(sharded_weight, "quantize_shards", count),
    ):
        yield gathered, quantized


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
