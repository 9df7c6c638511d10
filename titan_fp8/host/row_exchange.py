"""Tokens in high precision, between GPUs that write to each other's memory (`PeerExchange`).

A token is sent once to each rank that has one of its experts, and copied there. So is, in backward,
the gradient of its output. If scores weight the copies, they go with it, and each row is multiplied
and rounded as it would be before an all-to-all. The experts' outputs, and in backward the gradients
of their inputs, return row by row, and their owner sums them. So all values are those of the
all-to-alls, bit for bit.
"""

from typing import Any

import torch
from torch import Tensor

from titan_fp8.functional.function import Function, no_double_backward
from titan_fp8.host.peer_exchange import PeerExchange, PeerPlan
from titan_fp8.host.permute import wait_for_collective
from titan_fp8.ops import call


def _rows(x: Tensor, scores: Tensor | None, exchange: PeerExchange, plan: PeerPlan) -> Tensor:
    """What this rank's experts get of all ranks' x (T, dim), times scores (T, k) if any."""
    x = wait_for_collective(x).contiguous()
    return call("gather_rows", *exchange.arrive_rows(x, scores, plan))


class SendRows(Function):
    """Tokens x (T, dim) to the rows (C, dim) of this rank's experts, times scores (T, k) if any.

    Rows are sorted by expert, and zero where they are padding, or past the last group.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scores: Tensor | None, exchange: PeerExchange, plan: PeerPlan
    ) -> Tensor:
        ctx.exchange, ctx.plan = exchange, plan
        ctx.save_for_backward(*(() if scores is None else (x, scores)))
        return _rows(x, scores, exchange, plan)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, scores = ctx.saved_tensors or (None, None)
        rows, _ = ctx.exchange.deliver(g.contiguous(), ctx.plan, None)
        dx = call("combine_rows", rows, ctx.plan.rows, scores)
        dscores = None if x is None else call("dot_rows", x, rows, ctx.plan.rows)
        return dx, dscores, None, None


class ReturnRows(Function):
    """The experts' rows y (C, dim), summed for each token (T, dim), times scores (T, k) if any."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, scores: Tensor | None, exchange: PeerExchange, plan: PeerPlan
    ) -> Tensor:
        ctx.exchange, ctx.plan = exchange, plan
        rows, _ = exchange.deliver(y.contiguous(), plan, None)
        # It always saves a tensor, so no recomputation stops before its rows are delivered. The
        # rows are copied, because ranks write to this memory again before backward.
        weighted = () if scores is None else (rows.clone(), scores)
        ctx.save_for_backward(plan.rows, *weighted)
        return call("combine_rows", rows, plan.rows, scores)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        index, *weighted = ctx.saved_tensors
        y, scores = weighted or (None, None)
        dy = _rows(g, scores, ctx.exchange, ctx.plan)
        return dy, None if y is None else call("dot_rows", g, y, index), None, None


def group_sizes(plan: PeerPlan) -> Tensor:
    """The padded rows of each local expert (local experts,) int32."""
    return torch.diff(plan.ends, prepend=plan.ends.new_zeros(1))
