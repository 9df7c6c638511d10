"""Experts that exchange their tokens in FP8, in place of torchtitan's all-to-alls in bf16.

A token is quantized once, before it is copied for its experts, and so is the gradient of the
output. fprop and dgrad read what travels; the columns that wgrad reads are quantized again from
that (the op `gather_1x128_128x1_t`). Scores multiply the scales. The experts' outputs and the
gradients of the tokens return in bf16, summed over the experts of a rank. The gradients of scores
are computed where the experts are (the op `swiglu_dscores`).

torchtitan exchanges tokens in hooks on the experts. Here the experts do it: `GatherMoE` calls them
with its tokens, and an `Exchanged` in place of the counts, which the hooks let pass. GPUs of one
host write to each other's memory (`PeerExchange`). Elsewhere all-to-alls move the same bytes.

An `Exchanged` can also have the hooks exchange tokens in high precision without waiting for the CPU
(`row_exchange.py`), for steps that are captured as a CUDA graph.
"""

import functools
import socket
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torchtitan.models.moe import utils as moe_utils
from torchtitan.tools.logging import logger

from titan_fp8.functional.bodies import (
    DTypes,
    ProductSpec,
    feed_forward,
    feed_forward_backward,
    quantized,
)
from titan_fp8.functional.function import Function, no_double_backward
from titan_fp8.functional.product import spec_of
from titan_fp8.functional.weights import Weight, operands_of
from titan_fp8.host.all_to_all import all_to_all, exchange_counts, wait_for
from titan_fp8.host.peer_exchange import Arrived, PeerExchange, rows_for
from titan_fp8.host.permute import Permutation, permutation_by_expert
from titan_fp8.host.torchtitan_0_2.row_exchange import ReturnRows, SendRows, group_sizes
from titan_fp8.layouts import BLOCK, E4M3
from titan_fp8.ops import call, run


class AllToAllPlan(NamedTuple):
    """As `PeerPlan`, of an AllToAllExchange."""

    slots: Tensor  # (R,) int64: the copies that this rank sends, sorted by expert
    order: Tensor  # (T, k): the row of each copy in what comes back, -1 if not sent
    summands: Tensor  # (T · k, k): those of each sum
    rows: Tensor  # (T, k): the sum of a rank, at its first copy; -1 elsewhere
    ends: Tensor  # (local experts,) int32: of the padded groups that arrive
    permutation: Permutation  # of what arrives
    sent: list[int]  # the copies for each rank
    received: list[int]  # those from each rank


class AllToAllExchange:
    """The steps of `PeerExchange` by all-to-alls, on any devices and hosts.

    The CPU waits for sizes. `group` has any backend.
    """

    def __init__(self, group: ProcessGroup):
        self.group = group

    def plan(self, order: Tensor, chosen: Tensor, counts: Tensor, slots: Tensor) -> AllToAllPlan:
        """As `PeerExchange.plan`."""
        received, (sent, arriving) = exchange_counts(counts, self.group)
        permutation, sizes = permutation_by_expert(
            received, self.group.size(), sum(arriving), BLOCK
        )
        ends = sizes.cumsum(0, dtype=torch.int32)
        # The copies (T, k, k) that go to the same rank as copy (T, k), if it is the first of them.
        owner = chosen // (len(counts) // self.group.size())
        owner = torch.where(order < 0, -1, owner)
        same = owner[:, :, None] == owner[:, None, :]
        first = ~same.tril(-1).any(2) & (order >= 0)
        summands = torch.where(same & first[:, :, None], order[:, None, :], -1)
        identity = torch.arange(order.numel(), device=order.device).view_as(order)
        rows = torch.where(first, identity, -1)
        summands = summands.view(-1, order.shape[1])
        return AllToAllPlan(slots, order, summands, rows, ends, permutation, sent, arriving)

    def arrive(self, q: Tensor, s: Tensor, scores: Tensor, plan: AllToAllPlan) -> Arrived:
        """As `PeerExchange.arrive`, in one all-to-all of bytes."""
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
        """As `PeerExchange.deliver`, but rows are summed by their owner."""
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


# As the bodies of `bodies.py`. The weights and their scales come after the constants.


def _forward(
    ops: Any, q: Tensor, s: Tensor, slots: Tensor, scores: Tensor, k: int, offs: Tensor,
    before: bool, for_wgrad: bool, spec: ProductSpec, *weights: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    weight = scores if before else None
    operands = spec.feed_forward.gather.on(ops, q, s, slots, offs, weight, k)
    return feed_forward(ops, operands, offs, for_wgrad, spec, *weights)


def _backward(
    ops: Any, q: Tensor, s: Tensor, slots: Tensor, scores: Tensor, k: int, offs: Tensor,
    before: bool, dtypes: DTypes, spec: ProductSpec, *saved: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    weight = None if before else scores
    operands = spec.feed_forward.gather.on(ops, q, s, slots, offs, weight, k)
    return feed_forward_backward(
        ops, operands, offs, dtypes, spec, *saved, scores=scores, before=before
    )


class _ExchangedSwiGLU(Function):
    """out (T, N) of tokens x (T, K): their experts' outputs, weighted by scores (T, k) and summed.

    `before`: the scores weight the copies of the tokens instead of the outputs. `for_wgrad`:
    backward computes a gradient that reads the columns of x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scores: Tensor,
        exchange: Any,
        plan: Any,
        before: bool,
        for_wgrad: bool,
        spec: ProductSpec,
        *weights: Weight,
    ) -> Tensor:
        x = x.detach().contiguous()
        for_fprop, for_dgrad = operands_of(weights, spec.dtype)
        arrived = _arrive(x, scores, exchange, plan, spec)
        arguments = *arrived, plan.ends, before, for_wgrad, spec, *for_fprop
        y, *saved = run(_forward, *arguments, emulate=spec.emulate)
        sums, _ = exchange.deliver(y, plan, None if before else scores)
        ctx.exchange, ctx.plan, ctx.before, ctx.spec = exchange, plan, before, spec
        ctx.dtypes = [w.dtype for w in weights]
        ctx.x_dtype = x.dtype
        ctx.save_for_backward(scores, *for_dgrad, *saved)
        return call("combine_rows", sums, plan.rows)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, g: Tensor) -> Any:
        exchange, plan, before, spec = ctx.exchange, ctx.plan, ctx.before, ctx.spec
        scores, *saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[7:]
        arrived = _arrive(g.contiguous(), scores, exchange, plan, spec)
        # All ranks must deliver, whether they need dx and dscores or not.
        dtypes = spec.dtype, *[d if need else None for d, need in zip(ctx.dtypes, needs)]
        arguments = *arrived, plan.ends, before, dtypes, spec, *saved
        dx, *gradients, dscores = run(_backward, *arguments, emulate=spec.emulate)
        sums, dscores = exchange.deliver(dx, plan, scores if before else None, dscores)
        dx = call("combine_rows", sums, plan.rows).to(ctx.x_dtype)
        dws = [gradients.pop(0) if need else None for need in needs]
        return dx, dscores, None, None, None, None, None, *dws


def _arrive(x: Tensor, scores: Tensor, exchange: Any, plan: Any, spec: ProductSpec) -> Arrived:
    """Quantizes tokens, and exchanges them."""
    q, s = run(quantized, x.to(spec.dtype), None, False, spec, emulate=spec.emulate)
    return exchange.arrive(q, s, scores, plan)


def exchanged_swiglu(
    x: Tensor,
    scores: Tensor,
    w1: Weight,
    w2: Weight,
    w3: Weight,
    exchange: PeerExchange | AllToAllExchange,
    plan: Any,
    *,
    recipe: str = "blockwise",
    emulate: bool = False,
    score_before_experts: bool = False,
) -> Tensor:
    """The experts of tokens x (T, dim), on all ranks, with FP8 on the wire; differentiable.

    Args:
        x: (T, dim) bf16; with an AllToAllExchange also FP32.
        scores: (T, k) FP32.
        w1, w3: (local experts, H, dim). w2: (local experts, dim, H).
        plan: what `exchange.plan` has returned for these tokens.
        recipe: a blockwise one.
        score_before_experts: the scores weight the copies of the tokens, not the outputs.
    """
    spec = spec_of(x, {"w1": w1, "w2": w2, "w3": w3}, recipe, emulate, aligned=True)
    for_wgrad = torch.is_grad_enabled() and (w1.requires_grad or w3.requires_grad)
    options = score_before_experts, for_wgrad, spec
    return _ExchangedSwiGLU.call(x, scores, exchange, plan, *options, w1, w2, w3)


class Exchanged:
    """How the tokens of a MoE layer go to their experts.

    No dataclass and no tuple: FSDP2 would cast the tensors of these.

    Args:
        order, chosen, counts, slots: as in `PeerExchange.plan`.
        scores: (T, k) FP32.
        before: the scores weight the copies of the tokens, not the outputs.
        capacity: the rows that a rank can get, relative to balanced routing.
        timeout_s: as in `PeerExchange`.
        in_fp8: the experts exchange the tokens, in FP8; otherwise the hooks do.
    """

    def __init__(
        self,
        order: Tensor,
        chosen: Tensor,
        counts: Tensor,
        slots: Tensor,
        scores: Tensor,
        *,
        before: bool,
        capacity: float,
        timeout_s: float,
        in_fp8: bool,
    ):
        self.routing = order, chosen, counts, slots
        self.scores, self.before, self.in_fp8 = scores, before, in_fp8
        self.capacity, self.timeout_s = capacity, timeout_s
        self.group: ProcessGroup | None = None

    def dispatch(self, x: Tensor, experts: nn.Module, mesh: DeviceMesh) -> tuple[Tensor, Any]:
        """The arguments of the experts, for tokens x (T, dim); the hook before them calls it.

        In FP8 they are the tokens and this; otherwise rows (C, dim) and the sizes of their groups.
        """
        self.group = mesh.get_group()
        weight: Any = next(experts.parameters())
        whole = weight.device_mesh
        if self.before and "etp" in (whole.mesh_dim_names or ()):
            # Each rank has a part of what the experts compute, and of the gradients. The hook does
            # the same to the tokens.
            scores = DTensor.from_local(self.scores, whole["etp"], (Replicate(),))
            self.scores = scores.to_local(grad_placements=(Partial(),))
        if self.in_fp8:
            return x, self
        self.exchange = self._by_peers(x, x.dtype, moe_utils.TOKEN_GROUP_ALIGN_SIZE_M)
        self.plan = self.exchange.plan(*self.routing)
        scores_before = self.scores if self.before else None
        rows = SendRows.call(x, scores_before, self.exchange, self.plan)
        return rows, group_sizes(self.plan)

    def combine(self, y: Tensor) -> Tensor:
        """The tokens' outputs (T, dim), from what experts return; the hook after them calls it."""
        if self.in_fp8:
            return y
        return ReturnRows.call(y, None if self.before else self.scores, self.exchange, self.plan)

    def run(
        self, x: Tensor, w1: Weight, w2: Weight, w3: Weight, recipe: str, emulate: bool
    ) -> Tensor:
        """The experts' outputs for tokens x, combined: (T, dim)."""
        assert self.group is not None, "only the hooks of expert parallelism say which ranks"
        exchange: PeerExchange | AllToAllExchange
        if x.is_cuda and x.dtype == torch.bfloat16 and reach_each_other(self.group):
            exchange = self._by_peers(x, E4M3, BLOCK)
        else:
            exchange = AllToAllExchange(self.group)
        plan = exchange.plan(*self.routing)
        return exchanged_swiglu(
            x, self.scores, w1, w2, w3, exchange, plan,
            recipe=recipe, emulate=emulate, score_before_experts=self.before,
        )  # fmt: skip

    def _by_peers(self, x: Tensor, dtype: torch.dtype, alignment: int) -> PeerExchange:
        order, _, counts, slots = self.routing
        sizes = *x.shape, order.shape[1], len(counts), len(slots), self.capacity
        assert self.group is not None
        return _peer_exchange(self.group, *sizes, self.timeout_s, dtype, alignment)


@functools.cache
def reach_each_other(group: ProcessGroup) -> bool:
    """Whether each rank's GPU can write to the memory of the others; a collective at first.

    Ranks that see one GPU each, all of them under the same index, are not told apart by PyTorch's
    symmetric memory.
    """
    mine = here, device = socket.gethostname(), torch.cuda.current_device()
    all_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(all_ranks, mine, group=group)
    del all_ranks[group.rank()]
    reachable = all(
        host == here and other != device and torch.cuda.can_device_access_peer(device, other)
        for host, other in all_ranks
    )
    answers: list[Any] = [None] * group.size()
    dist.all_gather_object(answers, reachable, group=group)
    return all(answers)


@functools.cache
def _peer_exchange(
    group: ProcessGroup,
    tokens: int,
    dim: int,
    top_k: int,
    experts: int,
    copies: int,
    factor: float,
    timeout_s: float,
    dtype: torch.dtype,
    alignment: int,
) -> PeerExchange:
    """The exchange of batches of this size. The layers of a model use it one after the other."""
    exchange = PeerExchange(
        group, tokens=tokens, top_k=top_k, dim=dim, experts=experts,
        capacity=rows_for(tokens, top_k, experts, group.size(), factor, copies),
        dtype=dtype, alignment=alignment, timeout_s=timeout_s,
        key="[quantize.grouped_mm.titan_fp8] exchange_capacity",
    )  # fmt: skip
    logger.info(
        f"titan_fp8: {group.size()} GPUs exchange tokens by writing to each other's memory, "
        f"{exchange.memory.nbytes / 2**20:.0f} MiB of each; experts have room for "
        f"{exchange.capacity} rows"
    )
    return exchange
