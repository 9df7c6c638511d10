"""Trains rank 0 of a larger run on one GPU, with collectives that stay on it.

    python scripts/loopback.py RANKS CONFIG [--section.key value ...]

torchtitan builds the model for RANKS ranks and runs rank 0 of them. Each collective returns what it
would if all ranks had the tensors of this one: an all-gather repeats the shard, a sum multiplies by
the number of ranks, and an all-to-all receives from every rank what it sends to rank 0. So shapes,
launches, memory and the work of the CPU are those of the real run, and operands are as random.
Communication is not: a copy within the GPU takes its place. Use it to find out what the CPU costs
under a parallel plan, whether a plan fits into memory, and how two versions of the code compare.

Losses are finite, but they are not those of the real run. With `fsdp_all_gather` a maximum over the
ranks does not find the scales of other ranks' rows, so a part of each product is zero. The sends
and receives of pipeline parallelism are not supported, nor are collectives that torchtitan does not
use.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers "fake")

USAGE = "usage: python scripts/loopback.py RANKS CONFIG [--section.key value ...]"


def _done(result: Any) -> Any:
    future: Future = Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


class Loopback(dist.ProcessGroup):
    """A process group whose ranks all have the tensors of this one.

    PyTorch 2.11 calls the methods whose names it renamed later by their old names.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: Any):
        super().__init__(rank, size)

    def getBackendName(self) -> str:
        return "loopback"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _scale_of(self, op: Any) -> int:
        """What a reduction multiplies by, given that all ranks have the same."""
        return self.size() if op == dist.ReduceOp.SUM else 1

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            tensor.mul_(self._scale_of(opts.reduceOp))
        return _done(tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        return _done(tensors)

    def barrier(self, opts: Any = None) -> Any:
        return _done(None)

    def all_gather_single(self, output: Tensor, shard: Tensor, opts: Any = None) -> Any:
        for part in output.view(self.size(), *shard.shape):
            # FSDP2 gathers in place: its shard is a part of the output.
            if part.data_ptr() != shard.data_ptr():
                part.copy_(shard)
        return _done(output)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], shards: Sequence[Tensor], opts: Any = None
    ) -> Any:
        for output, shard in zip(outputs, shards, strict=True):
            self.all_gather_single(output, shard)
        return _done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any = None
    ) -> Any:
        for parts, tensor in zip(outputs, tensors, strict=True):
            for part in parts:
                part.copy_(tensor)
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        own = tensor.view(self.size(), *output.shape)[self.rank()]
        torch.mul(own, self._scale_of(opts.reduceOp), out=output)
        return _done(output)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any
    ) -> Any:
        for output, tensor in zip(outputs, tensors, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return _done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Any:
        """Every rank sends what this one sends to rank 0.

        Where that has another length, as on the way back from experts that got uneven numbers of
        tokens, rows of the whole tensor take its place.
        """
        outputs = output.split(output_sizes) if output_sizes else output.chunk(self.size())
        inputs = tensor.split(input_sizes) if input_sizes else tensor.chunk(self.size())
        for part in outputs:
            sent = inputs[self.rank()]
            if not len(tensor):
                part.zero_()
            elif len(sent) == len(part):
                part.copy_(sent)
            else:
                part.copy_(tensor[torch.arange(len(part), device=tensor.device) % len(tensor)])
        return _done(output)

    alltoall_base = all_to_all_single


PLUGIN = dist.Backend._BackendPlugin(Loopback, False)
"""In place of PyTorch's backend "fake", whose collectives leave their outputs as they are."""


def main(arguments: list[str]) -> None:
    if len(arguments) < 2 or not arguments[0].isdecimal() or int(arguments[0]) < 1:
        sys.exit(USAGE)
    ranks, config, *flags = arguments
    os.environ |= {"NGPU": ranks, "WORLD_SIZE": ranks, "RANK": "0", "LOCAL_RANK": "0"}
    dist.Backend._plugins["FAKE"] = PLUGIN
    sys.argv = ["train", "--job.config_file", config, "--comm.mode", "fake_backend", *flags]
    if torch.cuda.is_available():
        from torchtitan.train import Trainer
        from torchtitan.train import main as train

        train(Trainer)
    else:
        importlib.import_module("titan_fp8.cpu_host").main()


if __name__ == "__main__":
    main(sys.argv[1:])
