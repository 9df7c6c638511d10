"""Rows between ranks by all-to-alls, in less CPU time than PyTorch's functional collectives take.

Those do in Python what torchtitan's dispatch does not need: they resolve the process group, check
the sizes, and pass through two autograd functions. These functions call the same ops, so activation
checkpointing sees and saves what it did before. torchtitan copies the sums of sent and of received
rows to the CPU one after the other; here they are copied together.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from titan_fp8.compile.activation_checkpointing import inside_checkpoint
from titan_fp8.functional.function import no_double_backward

_c10d = torch.ops._c10d_functional


def all_to_all(x: Tensor, received: list[int], sent: list[int], group_name: str) -> Tensor:
    """Starts to send rows of x (S, ...) to each rank; `wait_for` returns those received.

    There is no gradient. In an op-level checkpoint forward saves what it has received.
    """
    with torch._C._AutoDispatchBelowAutograd(), inside_checkpoint():
        return _c10d.all_to_all_single.default(x, received, sent, group_name)


def wait_for(x: Tensor) -> Tensor:
    """What a collective returns, once it is there."""
    with torch._C._AutoDispatchBelowAutograd():
        return _c10d.wait_tensor.default(x)


def exchange_counts(counts: Tensor, group: ProcessGroup) -> tuple[Tensor, list[list[int]]]:
    """Exchanges the rows for each expert (experts,) between the ranks.

    Returns:
        How many rows come from each rank for each local expert (experts,), rank first; and how many
        this rank sends to, and receives from, each rank. Under op-level checkpointing a
        recomputation gets what forward has saved.
    """
    with torch.no_grad():
        parts = [len(counts) // group.size()] * group.size()
        received = wait_for(all_to_all(counts, parts, parts, group.group_name))
        splits = torch.stack((counts, received)).view(2, group.size(), -1).sum(-1)
        with inside_checkpoint():
            splits = splits.to("cpu")
    return received, splits.tolist()


class ExchangeRows(torch.autograd.Function):
    """Sends rows of x (S, dim) to each rank; returns those received, as AsyncCollectiveTensor.

    Gradients flow through ops on the result. Its `wait()` returns a tensor without gradients, which
    suits the forward of an autograd function, as in `permute.py`. Backward sends the gradient
    of each row back to where it came from.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, received: list[int], sent: list[int], group_name: str
    ) -> Tensor:
        ctx.arguments = sent, received, group_name
        return AsyncCollectiveTensor(all_to_all(x, received, sent, group_name))

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return wait_for(all_to_all(g.contiguous(), *ctx.arguments)), None, None, None
