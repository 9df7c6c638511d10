"""The exchange of tokens between the experts' ranks, by writes into each other's GPU memory.

docs/exchange.md explains the design. `Exchange` has a rank's symmetric memory and the steps of an
exchange. The differentiable functions are made of them:

    Dispatch   forward: tokens -> rows, in expert order       backward: deliver, sum
    Combine    forward: deliver, weighted sum                 backward: gradients -> rows, weigh
    exchanged_swiglu   both, with experts in FP8 between them: what is sent to experts is FP8, too

The CPU launches and never waits. It learns of what went wrong on the GPU from pinned memory, which
`check` reads. `CollectiveExchange` has the same steps, by all-to-alls, for other hosts and CPUs.
"""

import logging
import math
import threading
import time
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_fp8 import reference
from titan_fp8.functional import Function, no_double_backward
from titan_fp8.gemms import Spec, dgrad, fprop, wgrad
from titan_fp8.layouts import BLOCK, E4M3, cdiv, round_up
from titan_fp8.ops import direct
from titan_fp8.recipe import FeedForwardOps, get_recipe

KEY = "[quantize.grouped_mm.titan_fp8] exchange_capacity"
ALIGN_BYTES = 256
TIMEOUT_S = 300.0

_log = logging.getLogger(__name__)


class Plan(NamedTuple):
    """Where the copies of a batch's tokens go, and what arrives; made by `Exchange.plan`.

    Attributes:
        indices: (T, k) integers: the place of each copy among those of this rank, sorted by expert;
            -1 for a copy that another rank sends.
        chosen: (T, k) integers: the expert of each copy.
        slots: (T, k) int32: the row of each copy in what comes back; -1 as in `indices`.
        offset: (experts,) int32: `indices` plus this is the copy's row at its receiver.
        sizes, ends: (local experts,) int32: the padded sizes of the groups that arrive, their ends.
        filled: (local experts,) int32: where the padding of each group begins.
        origin: (capacity,) int32: where each row came from, as the kernels write it.
    """

    indices: Tensor
    chosen: Tensor
    slots: Tensor
    offset: Tensor
    sizes: Tensor
    ends: Tensor
    filled: Tensor
    origin: Tensor


class Exchange:
    """A rank's part of the exchange within `group`, whose GPUs can write to each other's memory.

    All ranks of the group make it together, with the same arguments, and call the same methods in
    the same order, on one stream each.

    Args:
        group: NCCL ranks of one host, at most 32.
        tokens: the most tokens that a rank has in a batch.
        top_k: the experts of a token.
        dim: the channels of a token, a multiple of 16.
        experts: of all ranks; a multiple of the ranks. Rank r has the r-th part of them.
        capacity: the rows that a rank can receive, padding included. `rows_for` computes it.
        alignment: to whose multiples each expert's rows are padded.
        timeout_s: how long a GPU waits for the others.

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
        alignment: int = BLOCK,
        timeout_s: float = TIMEOUT_S,
    ):
        from torch.distributed import _symmetric_memory as symmetric

        from titan_fp8.kernels import exchange as kernels

        self.kernels = kernels
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        if not 1 <= self.ranks <= kernels.MAX_RANKS:
            raise ValueError(f"a group of {self.ranks} ranks: at most {kernels.MAX_RANKS} exchange")
        if dim % 16:
            raise ValueError(f"dim = {dim}: allowed are multiples of 16")
        if experts % self.ranks:
            raise ValueError(f"{experts} experts on {self.ranks} ranks: allowed are multiples")
        if tokens * top_k * self.ranks >= 2**31:
            raise ValueError(f"{tokens} tokens x {top_k} x {self.ranks} ranks: at most 2^31 - 1")
        self.tokens, self.top_k, self.dim, self.experts = tokens, top_k, dim, experts
        self.local, self.alignment = experts // self.ranks, alignment
        self.capacity = round_up(capacity, BLOCK)
        self.timeout_ns = int(timeout_s * 1e9)
        self.turn = 0
        self.busy: set[str] = set()
        self.device = torch.device("cuda", torch.cuda.current_device())
        sections = cdiv(dim, BLOCK)
        i32, f32, bf16 = torch.int32, torch.float32, torch.bfloat16
        parts = {
            "flags": ((kernels.FLAG_WORDS,), i32),
            "tables": ((2, self.ranks, experts), i32),
            "origin": ((self.capacity,), i32),
            "weight": ((self.capacity,), f32),
            "dots": ((tokens, top_k), f32),
            "scales": ((self.ranks * tokens, sections), f32),
            "rows": ((self.ranks * tokens, dim), bf16),
            "slots": ((tokens * top_k, dim), bf16),
        }
        begins, size = {}, 0
        for name, (shape, dtype) in parts.items():
            begins[name] = size
            size += round_up(torch.Size(shape).numel() * dtype.itemsize, ALIGN_BYTES)
        self.memory = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        views = {
            name: self.memory[begins[name] :][: torch.Size(shape).numel() * dtype.itemsize]
            .view(dtype)
            .view(shape)
            for name, (shape, dtype) in parts.items()
        }
        self.flags, self.tables, self.origin = views["flags"], views["tables"], views["origin"]
        self.weight, self.scales, self.dots = views["weight"], views["scales"], views["dots"]
        self.rows, self.slots = views["rows"], views["slots"]
        as_bytes = self.rows.view(torch.int8).view(-1)
        self.rows_fp8 = as_bytes[: self.rows.numel()].view_as(self.rows)
        self.flags.zero_()
        torch.cuda.synchronize()
        self.handle = symmetric.rendezvous(self.memory, group.group_name)
        begin = self.memory.data_ptr()
        addresses = list(self.handle.buffer_ptrs)
        shift = begin - addresses[self.rank]  # 0, unless buffers have a common header.
        deltas = [(address + shift - begin) // 16 for address in addresses]
        self.deltas = torch.tensor(deltas, dtype=torch.int64, device=self.device)
        self.failure = torch.zeros(2, dtype=i32, pin_memory=True)
        self.identity = torch.arange(tokens * top_k, dtype=i32, device=self.device)
        self.identity = self.identity.view(tokens, top_k)
        dist.barrier(group, device_ids=[self.device.index])
        _report_failures(self)

    @property
    def nbytes(self) -> int:
        """The bytes of symmetric memory."""
        return self.memory.nbytes

    def check(self) -> None:
        """Raises RuntimeError if a GPU kernel has stopped because an exchange was impossible."""
        code, needed = self.failure.tolist()
        if not code:
            return
        kind, rank = code >> 8 << 8, code & 255
        if kind == self.kernels.TIMED_OUT.value:
            raise RuntimeError(
                f"exchange of tokens: rank {self.rank} of the experts' group has waited "
                f"{self.timeout_ns / 1e9:g} s for rank {rank}, which has died or hangs"
            )
        raise RuntimeError(
            f"{KEY}: rank {rank} of the experts' group would get {needed} rows, padding included; "
            f"the capacity is {self.capacity}. Raise the key, or balance the routing"
        )

    def plan(self, index: Tensor, chosen: Tensor, counts: Tensor) -> Plan:
        """Exchanges the counts of a batch, and computes where its copies go.

        Args:
            index, chosen: (T, k) integers, contiguous, as in `Plan`.
            counts: (experts,) integers: this rank's copies for each expert.

        Raises:
            ValueError: other shapes.
            RuntimeError: an exchange has failed before.
        """
        self.check()
        t, k = index.shape
        if t > self.tokens or k != self.top_k or chosen.shape != index.shape:
            raise ValueError(
                f"index has shape {tuple(index.shape)} and chosen {tuple(chosen.shape)}: allowed "
                f"are (T, {self.top_k}) with T up to {self.tokens}"
            )
        if counts.shape != (self.experts,):
            raise ValueError(f"counts has shape {tuple(counts.shape)}: not ({self.experts},)")
        # Another rank may begin its next plan while this one still reads the table of the last.
        self.turn = 1 - self.turn
        table = self.tables[self.turn]
        self._barrier(counts.contiguous(), table)
        offset, sizes, ends, filled = self.kernels.places(
            table, self.failure, self.rank, self.alignment, self.capacity
        )
        slots = torch.where(index < 0, -1, self.identity[:t])
        origin = torch.empty_like(self.origin)
        index, chosen = index.contiguous(), chosen.contiguous()
        return Plan(index, chosen, slots, offset, sizes, ends, filled, origin)

    def rows_of(
        self, x: Tensor, plan: Plan, weight: Tensor | None = None, *, first: bool = False
    ) -> Tensor:
        """Rows (capacity, dim) bf16 in the order of this rank's experts, of all ranks' tokens x.

        Only rows up to the last end of `plan.ends` are written; those of padding are zero.

        Args:
            x: (T, dim) bf16, contiguous.
            weight: (T, k) FP32 multiplies the copies, or None.
            first: the first use of this plan, which fills plan.origin.
        """
        self._send(x, plan, self.rows, weight, first=first)
        return self.kernels.expand(
            self.rows, plan.origin, plan.ends, self.ranks, self.top_k,
            None if weight is None else self.weight,
        )  # fmt: skip

    def operands_of(
        self,
        q: Tensor,
        s: Tensor,
        plan: Plan,
        weight: Tensor | None = None,
        y: Tensor | None = None,
        *,
        scale_fmt: str = "fp32",
        first: bool = False,
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What GEMMs read of the rows of all ranks' tokens in FP8: q (T, dim), s (T, ⌈dim/128⌉).

        Args:
            weight, first: as in `rows_of`; weights multiply the scales.
            y: (capacity, dim) bf16 or None: also returns the dot products of each copy of this
                rank's tokens, without its weight, and its row of y.

        Returns:
            q and s of the rows and of the columns, as `reference.requantize_128x1_t` defines them;
            and the dot products (T, k), symmetric memory, or None.
        """
        from titan_fp8.kernels.hopper.requantize import requantize_128x1_t

        self._send(q.view(torch.int8), plan, self.rows_fp8, weight, s, first=first)
        weights = None if weight is None else self.weight
        dots = None
        operands = requantize_128x1_t(
            self.rows_fp8, self.scales, plan.origin, plan.ends, self.ranks, self.top_k, weights,
            scale_fmt=scale_fmt,
        )  # fmt: skip
        if y is not None:
            _, dots = self._weigh(self.rows_fp8, y, plan, self.scales)
        return operands, dots

    def weigh(self, g: Tensor, weight: Tensor, y: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """Of gradients g (T, dim) bf16: weight · g in expert order, and the weights' own gradients.

        Args:
            weight: (T, k) FP32.
            y: (capacity, dim) bf16, what the weights multiply in forward.

        Returns:
            weight · g (capacity, dim), rounded to bf16; g · y of each of this rank's copies (T, k),
            symmetric memory.
        """
        self._send(g, plan, self.rows, weight)
        out, dots = self._weigh(self.rows, y, plan, None)
        assert out is not None
        return out, dots

    def deliver(self, y: Tensor, plan: Plan) -> Tensor:
        """Sends rows y (capacity, dim) back: (T · k, dim), symmetric memory, at `plan.slots`."""
        self._begin("slots")
        self.kernels.deliver(y, plan.origin, plan.ends, self.deltas, self.slots)
        self._end("slots")
        return self.slots

    def _send(
        self,
        x: Tensor,
        plan: Plan,
        out: Tensor,
        weight: Tensor | None,
        scales: Tensor | None = None,
        first: bool = False,
    ) -> None:
        self._begin("rows")
        self.kernels.send(
            x, plan.indices, plan.chosen, plan.offset, plan.ends, plan.filled, self.deltas,
            self.rank, out, self.origin if first else None, weight, self.weight,
            scales, self.scales,
        )  # fmt: skip
        self._end("rows")
        if first:
            plan.origin.copy_(self.origin)

    def _weigh(
        self, g: Tensor, y: Tensor, plan: Plan, scales: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        out = self.kernels.weigh(
            g, y, self.weight, plan.origin, plan.ends, self.deltas, self.top_k,
            self.dots.view(-1), scales,
        )  # fmt: skip
        self._end("dots")
        return out, self.dots[: len(plan.indices)]

    # What arrives in a buffer is read by kernels that are launched before the next barrier. So any
    # barrier says that all ranks have read all buffers, and a transfer needs none before it unless
    # no barrier has come since the last transfer to the same buffer.

    def _begin(self, buffer: str) -> None:
        self.check()
        if buffer in self.busy:
            self._barrier()

    def _end(self, buffer: str) -> None:
        self._barrier()
        self.busy.add(buffer)

    def _barrier(self, counts: Tensor | None = None, table: Tensor | None = None) -> None:
        self.kernels.barrier(
            self.flags, self.deltas, self.failure, self.rank, self.timeout_ns, counts, table
        )
        self.busy.clear()


def rows_for(
    tokens: int,
    top_k: int,
    experts: int,
    ranks: int,
    factor: float,
    alignment: int = BLOCK,
    copies: int | None = None,
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
    return min(worst, math.ceil(copies * factor)) + local * alignment


def _report_failures(exchange: Exchange) -> None:
    """Logs a failure as soon as it happens. PyTorch's own error does not say what it is."""
    words, alive = exchange.failure.numpy(), weakref.ref(exchange)

    def watch() -> None:
        while alive() is not None and not words[0]:
            time.sleep(0.05)
        if (failed := alive()) is not None:
            try:
                failed.check()
            except RuntimeError as error:
                _log.error("titan_fp8: %s", error)

    threading.Thread(target=watch, name="titan_fp8 exchange", daemon=True).start()


class Routed(NamedTuple):
    """`Plan` of a CollectiveExchange.

    Attributes:
        indices, chosen, slots, offset, sizes, ends, filled: as in Plan.
        copies: (R,) int64: the copies of this rank, sorted by expert.
        places: (S,) int32: the row of each copy that arrives, in the order of the all-to-all.
        sent, received: how many copies go to each rank and come from it.
    """

    indices: Tensor
    chosen: Tensor
    slots: Tensor
    offset: Tensor
    sizes: Tensor
    ends: Tensor
    filled: Tensor
    copies: Tensor
    places: Tensor
    sent: list[int]
    received: list[int]


class CollectiveExchange:
    """The steps of `Exchange` by all-to-alls, on any devices and hosts: the CPU waits for sizes.

    Args:
        group: of any backend.
        top_k, experts, alignment: as in `Exchange`.
    """

    def __init__(self, group: ProcessGroup, *, top_k: int, experts: int, alignment: int = BLOCK):
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.top_k, self.experts, self.alignment = top_k, experts, alignment
        self.local = experts // self.ranks

    def plan(self, index: Tensor, chosen: Tensor, counts: Tensor) -> Routed:
        """As `Exchange.plan`; waits for the GPU."""
        table = counts.new_empty(self.ranks, self.experts)
        dist.all_gather(list(table), counts.contiguous(), group=self.group)
        offset, ends, filled = reference.exchange_places(table, self.alignment)
        here = table.view(self.ranks, self.ranks, self.local)
        sent, received = here[self.rank].sum(1).tolist(), here[:, self.rank].sum(1).tolist()
        copies = index.new_empty(sum(sent), dtype=torch.int64)
        flat = index.flatten()
        kept = (flat >= 0).nonzero().flatten()
        copies[flat[kept].long()] = kept
        ends, filled = ends[self.rank].int(), filled[self.rank].int()
        _, places, sizes = reference.places_of_tokens(
            here[:, self.rank].flatten(), self.local, self.ranks, sum(received), int(ends[-1]),
            self.alignment,
        )  # fmt: skip
        identity = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
        slots = torch.where(index < 0, -1, identity.view_as(index))
        return Routed(
            index, chosen, slots, offset[self.rank].int(), sizes, ends, filled,
            copies, places, sent, received,
        )  # fmt: skip

    def rows_of(
        self, x: Tensor, plan: Routed, weight: Tensor | None = None, *, first: bool = False
    ) -> Tensor:
        """As `Exchange.rows_of`, in x's dtype, as many rows as the groups have."""
        return self._rows(reference.gather_rows(x, plan.copies, weight, self.top_k), plan)

    def operands_of(
        self,
        q: Tensor,
        s: Tensor,
        plan: Routed,
        weight: Tensor | None = None,
        y: Tensor | None = None,
        *,
        scale_fmt: str = "fp32",
        first: bool = False,
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """As `Exchange.operands_of`."""
        tokens = plan.copies // self.top_k
        zero = float(reference.scale_of(torch.zeros(1)))
        q = self._rows(q.view(torch.uint8)[tokens], plan).view(E4M3)
        s = self._rows(s[tokens], plan, zero)
        weights = None if weight is None else self._weights(weight, plan)
        dots = None if y is None else self._dots(reference.dequantize_1x128(q, s), y, plan)
        operands = reference.requantize_128x1_t(q, s, plan.ends, weights, scale_fmt=scale_fmt)
        return (q, *operands), dots

    def weigh(self, g: Tensor, weight: Tensor, y: Tensor, plan: Routed) -> tuple[Tensor, Tensor]:
        """As `Exchange.weigh`."""
        g = self._rows(g[plan.copies // self.top_k], plan).float()
        weights = self._weights(weight, plan)
        return (weights[:, None] * g).to(y.dtype), self._dots(g, y, plan)

    def deliver(self, y: Tensor, plan: Routed) -> Tensor:
        """As `Exchange.deliver`."""
        back = y.new_empty(sum(plan.sent), y.shape[1])
        rows = y[plan.places]
        dist.all_to_all_single(back, rows, plan.sent, plan.received, group=self.group)
        out = y.new_zeros(plan.indices.numel(), y.shape[1])
        out[plan.copies] = back
        return out

    def _weights(self, weight: Tensor, plan: Routed) -> Tensor:
        return self._rows(weight.flatten()[plan.copies, None], plan).flatten()

    def _dots(self, g: Tensor, y: Tensor, plan: Routed) -> Tensor:
        return self.deliver((g * y.float()).sum(-1, keepdim=True), plan).view_as(plan.slots)

    def _rows(self, copies: Tensor, plan: Routed, padding: float = 0) -> Tensor:
        arrived = copies.new_empty(sum(plan.received), *copies.shape[1:])
        dist.all_to_all_single(
            arrived, copies.contiguous(), plan.received, plan.sent, group=self.group
        )
        out = copies.new_full((int(plan.ends[-1]), *copies.shape[1:]), padding)
        out[plan.places] = arrived
        return out


class Dispatch(Function):
    """Tokens x (T, dim) to rows (capacity, dim) in the order of this rank's experts.

    scores (T, k) FP32 weight the copies, or None.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scores: Tensor | None, exchange: Exchange, plan: Plan
    ) -> Tensor:
        ctx.exchange, ctx.plan = exchange, plan
        ctx.save_for_backward(*(() if scores is None else (x, scores)))
        return exchange.rows_of(x.contiguous(), plan, scores, first=True)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        exchange, plan = ctx.exchange, ctx.plan
        back = exchange.deliver(g.contiguous(), plan)
        x, scores = ctx.saved_tensors or (None, None)
        dx = direct.combine_rows(back, plan.slots, scores)
        dscores = None if scores is None else direct.dot_rows(x, back, plan.slots)
        return dx, dscores, None, None


class Combine(Function):
    """The sum of each token's rows, times their scores if any: rows y (capacity, dim) to (T, dim).

    y is the experts' output for the rows that `Dispatch` has brought; scores (T, k) FP32 or None.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, scores: Tensor | None, exchange: Exchange, plan: Plan
    ) -> Tensor:
        ctx.exchange, ctx.plan = exchange, plan
        ctx.save_for_backward(*(() if scores is None else (y, scores)))
        return direct.combine_rows(exchange.deliver(y.contiguous(), plan), plan.slots, scores)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        exchange, plan = ctx.exchange, ctx.plan
        y, scores = ctx.saved_tensors or (None, None)
        if scores is None:
            return exchange.rows_of(g.contiguous(), plan), None, None, None
        dy, dots = exchange.weigh(g.contiguous(), scores, y, plan)
        return dy, torch.where(plan.slots < 0, 0, dots), None, None


class _ExchangedSwiGLU(Function):
    """out (T, N) of tokens x (T, K): their experts' outputs, weighted by scores (T, k) and summed.

    w1, w3 (E, H, K) and w2 (E, N, H) of the local experts. `before`: the scores weight the copies
    of the tokens instead of the outputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scores: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        exchange: Any,
        plan: Any,
        spec: Spec,
        before: bool,
    ) -> Tensor:
        ctx.exchange, ctx.plan, ctx.spec, ctx.before = exchange, plan, spec, before
        recipe, emulate, offs = spec.recipe, spec.emulate, plan.ends
        q, s = recipe.quantize_rows(x.contiguous(), emulate=emulate)
        weight, fmt = scores if before else None, recipe.scale_fmt
        (q, s, *x_columns), _ = exchange.operands_of(q, s, plan, weight, scale_fmt=fmt, first=True)
        a, b = (fprop((q, s), w, offs, spec) for w in (w1, w3))
        y = fprop(_fused(spec).swiglu(a, b, emulate=emulate), w2, offs, spec)
        kept = x if before else y  # of which the scores' gradients are made
        ctx.save_for_backward(scores, w1, w2, w3, a, b, *x_columns, kept)
        back = exchange.deliver(y, plan)
        return direct.combine_rows(back, plan.slots, None if before else scores)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        scores, w1, w2, w3, a, b, *x_columns, kept = ctx.saved_tensors
        exchange, plan, spec, before = ctx.exchange, ctx.plan, ctx.spec, ctx.before
        offs, emulate, ops = plan.ends, spec.emulate, _fused(spec)
        q, s = spec.recipe.quantize_rows(g.contiguous(), emulate=emulate)
        weight, y = (None, None) if before else (scores, kept)
        (q, s, *g_columns), dots = exchange.operands_of(
            q, s, plan, weight, y, scale_fmt=spec.recipe.scale_fmt
        )
        dscores = None if dots is None else torch.where(plan.slots < 0, 0, dots)
        dh = dgrad((q, s), w2, offs, spec, spec.dtype)
        quantized = ops.swiglu_backward(dh, a, b, offs, True, emulate=emulate)
        da_rows, da_columns, db_rows, db_columns, h_columns = zip(quantized[::2], quantized[1::2])
        dw1 = wgrad(da_columns, tuple(x_columns), offs, spec, w1.dtype)
        dw2 = wgrad(tuple(g_columns), h_columns, offs, spec, w2.dtype)
        dw3 = wgrad(db_columns, tuple(x_columns), offs, spec, w3.dtype)
        dtypes = spec.dtype, spec.dtype
        dx = ops.dgrad_pair(*da_rows, w1, *db_rows, w3, offs, True, *dtypes, emulate=emulate)
        back = exchange.deliver(dx, plan)
        if before:
            dscores = direct.dot_rows(kept, back, plan.slots)
        dx = direct.combine_rows(back, plan.slots, scores if before else None)
        return dx, dscores, dw1, dw2, dw3, *(None for _ in range(4))


def _fused(spec: Spec) -> FeedForwardOps:
    assert spec.recipe.feed_forward is not None, spec.recipe_name
    return spec.recipe.feed_forward


def exchanged_swiglu(
    x: Tensor,
    scores: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    exchange: Exchange | CollectiveExchange,
    plan: Plan | Routed,
    *,
    recipe: str = "blockwise",
    emulate: bool = False,
    score_before_experts: bool = False,
) -> Tensor:
    """The experts of tokens x (T, dim), on all ranks, with FP8 on the wire; differentiable.

    Tokens are quantized once, before they are copied for their experts, and so are the gradients of
    the output. Scores multiply scales. What wgrad reads is quantized again, from FP8
    (`reference.requantize_128x1_t`). The experts' outputs and the gradients of x return in bf16.

    Args:
        x: (T, dim) bf16; with a CollectiveExchange also FP32.
        scores: (T, k) FP32.
        w1, w3: (local experts, H, dim). w2: (local experts, dim, H).
        recipe: a blockwise one.
        score_before_experts: the scores weight the copies of the tokens, not the outputs.

    Raises:
        ValueError: another recipe or dtype.
    """
    spec = Spec(recipe, emulate, True, x.dtype)
    if get_recipe(recipe).feed_forward is None:
        raise ValueError(f'exchange = "fp8" with recipe = {recipe!r}: allowed are blockwise ones')
    if x.dtype != torch.bfloat16 and isinstance(exchange, Exchange):
        raise ValueError(f"an Exchange moves rows in bf16: x is {x.dtype}")
    return _ExchangedSwiGLU.call(x, scores, w1, w2, w3, exchange, plan, spec, score_before_experts)
