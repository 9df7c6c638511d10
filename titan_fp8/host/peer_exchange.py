"""Tokens between the ranks of experts, by writes into each other's GPU memory.

docs/exchange.md explains the design. The CPU launches and never waits. It learns of what went wrong
on the GPU by `failure`.
"""

import functools
import itertools
import math
import socket
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_fp8.host.exchange import Arrived, Exchange, Plan
from titan_fp8.host.gpu_failure import GpuFailure
from titan_fp8.host.symmetric_buffers import SymmetricBuffers
from titan_fp8.layouts import BLOCK, E4M3, cdiv, round_up

TIMEOUT_S = 300.0


class ArrivedRows(NamedTuple):
    """As `Arrived`, in high precision, as `gather_rows` takes it."""

    x: Tensor  # (R, K)
    slots: Tensor  # (C,) int32, as in `Arrived`; -1 past the last group, too
    weight: Tensor | None  # (R, k) FP32: the scores by slot, if they have been sent
    k: int


@dataclass(eq=False)
class PeerPlan(Plan):
    """The plan of a PeerExchange. `arrive` writes `rows`."""

    order: Tensor  # (T, k) integers: where each copy is among this rank's; -1 if not sent
    chosen: Tensor  # (T, k) integers: its expert
    offset: Tensor  # (experts,) int32: `order` plus this is its row at its receiver
    filled: Tensor  # (local experts,) int32: where the padding of each group begins


class PeerExchange(Exchange[PeerPlan]):
    """Tokens by writes into symmetric memory, which also holds what `arrive` and `deliver` return.

    These two take turns, and kernels that read what they return are launched before the next call
    of the exchange. Each call has a barrier. So by the barrier of a call all ranks have read what
    the call before it has brought, and the call after it may write that memory again.

    All ranks of the group make it together, with the same arguments.

    Args:
        group: NCCL ranks of one host, at most 32.
        tokens: the most tokens that a rank has in a batch.
        top_k: the experts of a token.
        dim: the channels of a token, a multiple of 16.
        experts: of all ranks; a multiple of the ranks. Rank r has the r-th part of them.
        capacity: the rows that a rank can receive, padding included. `rows_for` computes it.
        dtype: of the tokens: FP8, for which sums return in bf16; or bf16 or FP32, for which rows
            return in the same.
        alignment: to whose multiples the rows of each expert are padded, at most 128.
        timeout_s: how long a GPU waits for the others.
        key: the setting of the capacity, for errors.

    Raises:
        ValueError: other arguments than these.
        RuntimeError: the GPUs cannot reach each other's memory.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        tokens: int,
        top_k: int,
        dim: int,
        experts: int,
        capacity: int,
        dtype: torch.dtype = E4M3,
        alignment: int = BLOCK,
        timeout_s: float = TIMEOUT_S,
        key: str = "exchange_capacity",
    ):
        from titan_fp8.kernels import exchange as kernels

        self.kernels, self.key = kernels, key
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        if not 1 <= self.ranks <= kernels.MAX_RANKS:
            raise ValueError(f"a group of {self.ranks} ranks: at most {kernels.MAX_RANKS} exchange")
        if dim % 16:
            raise ValueError(f"dim = {dim}: allowed are multiples of 16")
        if experts % self.ranks:
            raise ValueError(f"{experts} experts on {self.ranks} ranks: allowed are multiples")
        if tokens * top_k * self.ranks >= 2**31:
            raise ValueError(f"{tokens} tokens x {top_k} x {self.ranks} ranks: at most 2^31 - 1")
        self.tokens, self.top_k, self.experts, self.alignment = tokens, top_k, experts, alignment
        self.in_fp8 = dtype == E4M3
        self.capacity = round_up(capacity, BLOCK)
        self.timeout_ns = int(timeout_s * 1e9)
        self.device = torch.device("cuda", torch.cuda.current_device())
        i32, f32 = torch.int32, torch.float32
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "flags": ((kernels.FLAG_WORDS,), i32),
            "table": ((self.ranks, experts), i32),
            "slots": ((self.capacity,), i32),
            "weight": ((self.capacity,) if self.in_fp8 else (self.ranks * tokens, top_k), f32),
            "places": ((self.ranks * tokens, top_k), i32),
            "dscores": ((tokens, top_k), f32),
            "s": ((self.ranks * tokens if self.in_fp8 else 0, cdiv(dim, BLOCK)), f32),
            "q": ((self.ranks * tokens, dim), dtype),
            "back": ((tokens * top_k, dim), torch.bfloat16 if self.in_fp8 else dtype),
        }
        buffers = SymmetricBuffers(group, shapes, self.device)
        self.memory, self.deltas = buffers.memory, buffers.deltas
        self.flags, self.table, self.slots = buffers["flags"], buffers["table"], buffers["slots"]
        self.weight, self.places = buffers["weight"], buffers["places"]
        self.back, self.dscores = buffers["back"], buffers["dscores"]
        self.q, self.s = buffers["q"], buffers["s"]
        self.flags.zero_()
        torch.cuda.synchronize()
        self.failure = GpuFailure(self._describe)
        self.index = torch.arange(self.capacity, dtype=i32, device=self.device)
        dist.barrier(group, device_ids=[self.device.index])

    def _describe(self, code: int, needed: int) -> str:
        """What the words say that a kernel has written to `failure`."""
        kind, rank = code >> 8 << 8, code & 255
        if kind == self.kernels.TIMED_OUT.value:
            return (
                f"exchange of tokens: rank {self.rank} of the experts' group has waited "
                f"{self.timeout_ns / 1e9:g} s for rank {rank}, which has died or hangs"
            )
        return (
            f"{self.key}: rank {rank} of the experts' group would get {needed} rows, padding "
            f"included; the capacity is {self.capacity}. Raise the key, or balance the routing"
        )

    def plan(self, order: Tensor, chosen: Tensor, counts: Tensor, slots: Tensor) -> PeerPlan:
        """As `Exchange.plan`; slots may be anything.

        Raises:
            ValueError: other shapes.
            RuntimeError: an exchange has failed before.
        """
        t, k = order.shape
        if t > self.tokens or k != self.top_k or chosen.shape != order.shape:
            raise ValueError(
                f"order has shape {tuple(order.shape)} and chosen {tuple(chosen.shape)}: allowed "
                f"are (T, {self.top_k}) with T up to {self.tokens}"
            )
        if counts.shape != (self.experts,):
            raise ValueError(f"counts has shape {tuple(counts.shape)}: not ({self.experts},)")
        self._barrier(counts.contiguous(), self.table)
        offset, ends, filled = self.kernels.places(
            self.table, self.failure.words, self.rank, self.alignment, self.capacity
        )
        rows = order.new_empty(order.shape, dtype=torch.int32)
        return PeerPlan(rows, ends, order.contiguous(), chosen.contiguous(), offset, filled)

    def arrive(self, q: Tensor, s: Tensor, scores: Tensor, plan: PeerPlan) -> Arrived:
        self._send(q, s, scores, plan)
        return Arrived(self.q, self.s, self.slots, self.weight, self.top_k)

    def arrive_rows(self, x: Tensor, scores: Tensor | None, plan: PeerPlan) -> ArrivedRows:
        """As `arrive`, of tokens x (T, dim) as they are, and of scores if any."""
        self._send(x, None, scores, plan)
        slots = torch.where(self.index < plan.ends[-1], self.slots, -1)
        return ArrivedRows(self.q, slots, None if scores is None else self.weight, self.top_k)

    def _send(self, q: Tensor, s: Tensor | None, scores: Tensor | None, plan: PeerPlan) -> None:
        if q.dtype != self.q.dtype:
            raise ValueError(f"tokens are {q.dtype}: allowed is {self.q.dtype}")
        if scores is not None and scores.dtype != torch.float32:
            raise ValueError(f"scores are {scores.dtype}: allowed is torch.float32")
        self.kernels.send(
            q, s, None if scores is None else scores.contiguous(), plan.order, plan.chosen,
            plan.offset, plan.ends, plan.filled, self.deltas, self.rank,
            self.q, None if s is None else self.s, self.weight, self.slots, self.places, plan.rows,
        )  # fmt: skip
        self._barrier()

    def deliver(
        self, y: Tensor, plan: PeerPlan, scores: Tensor | None, dscores: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As `Exchange.deliver`. After `arrive_rows` no rows are summed; scores, dscores: None."""
        if y.dtype != self.back.dtype:
            raise ValueError(f"rows that return are {y.dtype}: allowed is {self.back.dtype}")
        self.kernels.deliver(
            y, None if scores is None else self.weight, dscores, self.slots, self.places,
            plan.ends, self.deltas, self.back, self.dscores, self.in_fp8,
        )  # fmt: skip
        self._barrier()
        t = len(plan.rows)
        if dscores is not None:
            dscores = torch.where(plan.order < 0, 0, self.dscores[:t])
        return self.back[: plan.rows.numel()], dscores

    def _barrier(self, counts: Tensor | None = None, table: Tensor | None = None) -> None:
        self.failure.check()
        self.kernels.barrier(
            self.flags, self.deltas, self.failure.words, self.rank, self.timeout_ns, counts, table
        )


@functools.cache
def reach_each_other(group: ProcessGroup) -> bool:
    """Whether each rank's GPU can write to the memory of the others; a collective at first.

    Ranks that see one GPU each, all of them under the same index, are not told apart by PyTorch's
    symmetric memory.
    """
    device, visible = torch.cuda.current_device(), range(torch.cuda.device_count())
    reach = [d for d in visible if d != device and torch.cuda.can_device_access_peer(device, d)]
    ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(ranks, (socket.gethostname(), device, reach), group=group)
    return all(
        host == other_host and other in reach
        for (host, _, reach), (other_host, other, _) in itertools.permutations(ranks, 2)
    )


def rows_for(
    tokens: int, top_k: int, experts: int, ranks: int, factor: float, copies: int | None = None
) -> int:
    """The capacity for `factor` times the rows that a rank gets from balanced routing.

    Padding comes on top: at most one block for each local expert. The result never exceeds what any
    routing needs.

    Args:
        copies: those that each rank sends; by default one for each expert of its tokens.
    """
    local = experts // ranks
    copies = tokens * top_k if copies is None else copies
    worst = ranks * min(copies, tokens * min(top_k, local))
    return min(worst, math.ceil(copies * factor)) + local * BLOCK
