"""A `PeerExchange` without GPUs: gloo moves the rows, and what is not written holds NaN.

Memory that is symmetric on GPUs is one buffer here, too, which each exchange writes anew.
"""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from titan_fp8.host.peer_exchange import ArrivedRows, PeerPlan
from titan_fp8.host.torchtitan_0_2 import step_graph, token_dispatcher
from titan_fp8.layouts import round_up
from titan_fp8.torchtitan_0_2 import cuda_graph


def use_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets jobs with `cuda_graph` run on the CPU, whose ranks exchange rows by these peers."""
    monkeypatch.setattr(token_dispatcher, "PeerExchange", Peers)
    monkeypatch.setattr(cuda_graph, "reach_each_other", lambda group: True)
    monkeypatch.setattr(cuda_graph, "utils", SimpleNamespace(device_type="cuda"))
    monkeypatch.setattr(step_graph, "running_on", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", type("Stream", (), {}))
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)


class Peers:
    """As `PeerExchange` of rows in high precision."""

    def __init__(self, group, *, tokens, top_k, dim, experts, capacity, dtype, alignment, **_):
        self.group, self.rank, self.top_k = group, group.rank(), top_k
        self.local, self.tokens = experts // group.size(), tokens
        self.capacity, self.alignment = capacity, alignment
        self.memory = self.q = torch.empty(group.size() * tokens, dim, dtype=dtype)
        self.weight = torch.empty(group.size() * tokens, top_k)
        self.back = torch.empty(tokens * top_k, dim, dtype=dtype)

    def plan(self, order: Tensor, chosen: Tensor, counts: Tensor, slots: Tensor) -> PeerPlan:
        places: list[int] = []
        ends, first = [], self.rank * self.local
        batches = self._gather((order, chosen))
        for expert in range(first, first + self.local):
            begin = len(places)
            for rank, (order_of, chosen_of) in enumerate(batches):
                own = ((chosen_of == expert) & (order_of >= 0)).flatten().nonzero().flatten()
                places += (own + rank * self.tokens * self.top_k).tolist()
            size = max(round_up(len(places) - begin, self.alignment), self.alignment)
            places += [-1] * (begin + size - len(places))
            ends.append(len(places))
        assert len(places) <= self.capacity
        identity = torch.arange(order.numel(), dtype=torch.int32).view_as(order)
        rows = torch.where(order < 0, -1, identity)
        return PeerPlan(rows, torch.tensor(ends, dtype=torch.int32), order, chosen, places, None)

    def arrive_rows(self, x: Tensor, scores: Tensor | None, plan: PeerPlan) -> ArrivedRows:
        for buffer in (self.q, self.weight):
            buffer.fill_(float("nan"))
        for rank, (x_of, scores_of) in enumerate(self._gather((x, scores))):
            begin = rank * self.tokens
            self.q[begin : begin + len(x_of)] = x_of
            if scores is not None:
                self.weight[begin : begin + len(x_of)] = scores_of
        slots = torch.full((self.capacity,), -1, dtype=torch.int32)
        slots[: len(plan.offset)] = torch.tensor(plan.offset)
        return ArrivedRows(self.q, slots, None if scores is None else self.weight, self.top_k)

    def deliver(self, y: Tensor, plan: PeerPlan, scores: None) -> tuple[Tensor, None]:
        self.back.fill_(float("nan"))
        for y_of, places in self._gather((y[: len(plan.offset)], plan.offset)):
            slots = torch.tensor(places) - self.rank * self.tokens * self.top_k
            own = (slots >= 0) & (slots < len(self.back)) & (torch.tensor(places) >= 0)
            self.back[slots[own]] = y_of[own]
        return self.back[: plan.rows.numel()], None

    def _gather(self, mine: Any) -> list[Any]:
        every: list[Any] = [None] * self.group.size()
        detached = [t.detach().clone() if isinstance(t, Tensor) else t for t in mine]
        dist.all_gather_object(every, detached, group=self.group)
        return every
