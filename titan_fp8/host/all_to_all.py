"""Tokens between ranks by all-to-alls: rows as they are (`ExchangeRows`), or tokens in FP8.

PyTorch's functional collectives do in Python what torchtitan's dispatch does not need: they resolve
the process group, check the sizes, and pass through two autograd functions. These functions call
the same ops, so activation checkpointing sees and saves what it did before. torchtitan copies the
sums of sent and of received rows to the CPU one after the other; here they are copied together.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from titan_fp8.compile.activation_checkpointing import inside_checkpoint
from titan_fp8.functional.function import no_double_backward
from titan_fp8.host.exchange import Arrived, Exchange, Plan
from titan_fp8.host.permute import Permutation, permutation_by_expert
from titan_fp8.layouts import BLOCK, E4M3
from titan_fp8.ops import call

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


@dataclass(eq=False)
class AllToAllPlan(Plan):
    """The plan of an AllToAllExchange."""

    slots: Tensor  # (R,) int64: the copies that this rank sends, sorted by expert
    order: Tensor  # (T, k): the row of each copy in what comes back, -1 if not sent
    summands: Tensor  # (T · k, k): the rows of each sum in what comes back, -1 for none
    permutation: Permutation  # of what arrives
    sent: list[int]  # the copies for each rank
    received: list[int]  # those from each rank


class AllToAllExchange(Exchange[AllToAllPlan]):
    """Tokens in FP8 by all-to-alls of their copies, within a group of any backend.

    The CPU waits for sizes. Results are new tensors, so any order of calls will do that all ranks
    share. The owner sums the copies of each rank first, as `PeerExchange` does, and rounds.
    """

    def __init__(self, group: ProcessGroup):
        self.group = group

    def plan(self, order: Tensor, chosen: Tensor, counts: Tensor, slots: Tensor) -> AllToAllPlan:
        ranks = self.group.size()
        received, (sent, arriving) = exchange_counts(counts, self.group)
        permutation, sizes = permutation_by_expert(received, ranks, sum(arriving), BLOCK)
        ends = sizes.cumsum(0, dtype=torch.int32)
        # The copies (T, k, k) that go to the same rank as copy (T, k), if it is the first of them.
        rank = torch.where(order < 0, -1, chosen // (len(counts) // ranks))
        same = rank[:, :, None] == rank[:, None, :]
        first = ~same.tril(-1).any(2) & (order >= 0)
        summands = torch.where(same & first[:, :, None], order[:, None, :], -1).flatten(0, 1)
        identity = torch.arange(order.numel(), device=order.device).view_as(order)
        rows = torch.where(first, identity, -1)
        return AllToAllPlan(rows, ends, slots, order, summands, permutation, sent, arriving)

    def arrive(self, q: Tensor, s: Tensor, scores: Tensor, plan: AllToAllPlan) -> Arrived:
        # One all-to-all of bytes moves all three.
        parts = [_bytes(t)[plan.slots // plan.rows.shape[1]] for t in (q, s)]
        parts.append(_bytes(scores.flatten()[plan.slots, None]))
        widths = [part.shape[1] for part in parts]
        sent = torch.cat(parts, 1)
        arrived = wait_for(all_to_all(sent, plan.received, plan.sent, self.group.group_name))
        q, s, weight = (part.contiguous() for part in arrived.split(widths, 1))
        places = plan.permutation.tokens
        weight = call("gather_rows", weight.view(torch.float32), places).flatten()
        return Arrived(q.view(E4M3), s.view(torch.float32), places, weight, 1)

    def deliver(
        self, y: Tensor, plan: AllToAllPlan, scores: Tensor | None, dscores: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        weight = None if scores is None else scores.repeat_interleave(scores.shape[1], 0)
        sums = call("combine_rows", self._back(y, plan), plan.summands, weight)
        if dscores is not None:
            back = self._back(dscores[:, None], plan)
            dscores = call("gather_rows", back, plan.order.flatten()).view(plan.order.shape)
        return sums, dscores

    def _back(self, rows: Tensor, plan: AllToAllPlan) -> Tensor:
        """Rows in expert order, at those who have sent the tokens: (R, dim)."""
        rows = call("gather_rows", rows, plan.permutation.places)
        return wait_for(all_to_all(rows, plan.sent, plan.received, self.group.group_name))


def _bytes(x: Tensor) -> Tensor:
    """Rows of bytes. A contiguous x may have any strides along a dimension of size 1."""
    flat = x.contiguous().as_strided((x.numel(),), (1,))
    return flat.view(torch.uint8).view(len(x), x.shape[1] * x.itemsize)
