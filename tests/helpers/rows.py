"""Experts whose rows travel in high precision, by peers or by all-to-alls."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from titan_fp8.host.all_to_all import ExchangeRows, exchange_counts
from titan_fp8.host.permute import Combine, Expand, sort_back, sort_by_expert
from titan_fp8.host.row_exchange import ReturnRows, SendRows, group_sizes


def exchanged_rows(
    x: Tensor,
    scores: Tensor,
    routing: tuple[Tensor, ...],
    experts: Callable[[Tensor, Tensor], Tensor],
    before: bool,
    alignment: int,
    peers: Any = None,
) -> Tensor:
    """The outputs (T, dim) of tokens x.

    Args:
        routing: order, chosen, counts and slots, as in `Exchange.plan`.
        experts: computes rows, given the sizes of their groups, which are padded to `alignment`.
        before: scores (T, k) weight what is sent, not what returns.
        peers: a PeerExchange; without it, all-to-alls.
    """
    order, _, counts, slots = routing
    first, last = (scores, None) if before else (None, scores)
    if peers is not None:
        plan = peers.plan(*routing)
        y = experts(SendRows.apply(x, first, peers, plan), group_sizes(plan))
        return ReturnRows.apply(y, last, peers, plan)
    group = dist.group.WORLD
    received, (sent, arriving) = exchange_counts(counts, group)
    copies = Expand.apply(x, slots, order, first)
    copies = ExchangeRows.apply(copies, arriving, sent, group.group_name)
    rows, permutation, sizes = sort_by_expert(copies, received, group.size(), alignment)
    y = sort_back(experts(rows, sizes), permutation)
    y = ExchangeRows.apply(y, sent, arriving, group.group_name)
    return Combine.apply(y, slots, order, last)
