"""torchtitan's MoE layer, with gathers between token order and expert order (`permute.py`).

Under expert parallelism, GPUs that can write to each other's memory exchange tokens without
all-to-alls (`peer_exchange.py`). Nothing is then copied for the experts before it is sent.

Values differ from torchtitan's in the order in which a token's k outputs are summed. torchtitan
also rounds more often in two places: it rounds a token's gradient after each summand, and under
autocast it sums the outputs in bf16.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torchtitan.models.moe.moe import MoE, TokenReorderer

from titan_fp8 import exchange
from titan_fp8.feed_forward import FP8FeedForward, has_hooks
from titan_fp8.permute import Combine, Expand, rows_of_slots, slots_by_expert
from titan_fp8.torchtitan_0_2.experts import FP8GroupedExperts
from titan_fp8.torchtitan_0_2.peer_exchange import Exchanged, can_exchange, exchange_of, exchanging
from titan_fp8.torchtitan_0_2.token_exchange import exchange_counts


class Routed(NamedTuple):
    """The tokens of a batch, and their copies for the experts.

    Attributes:
        tokens: (T, dim).
        copies: (R, dim), sorted by expert; None if the layer exchanges its tokens.
        chosen: the expert of each slot (T, k).
        counts: the copies for each expert (experts,).
        slots, rows: the slot of each copy (R,) and the row of each slot (T, k), as in
            `permute.Expand`.
        before, after: the weights of the copies or of the experts' outputs (T, k), the other None.
    """

    tokens: Tensor
    copies: Tensor | None
    chosen: Tensor
    counts: Tensor
    slots: Tensor
    rows: Tensor
    before: Tensor | None
    after: Tensor | None


class GatherMoE(MoE):
    """torchtitan's MoE, permuting by gathers; `route_by_gathers` makes it from one.

    Attributes:
        exchange: how tokens travel between ranks, "bf16" or "fp8"; None: by torchtitan's hooks.
        exchange_capacity: the rows that a rank can get, relative to balanced routing.
        exchanges: whether the tokens of this batch travel by an exchange.
    """

    exchange: str | None = None
    exchange_capacity: float = 0.0
    exchanges: bool = False

    def prepare(self, tokens: Tensor) -> None:
        """Finds out, outside of compiled code, how these tokens (..., dim) are to travel."""
        if self.exchange is not None:
            self.exchanges = can_exchange(self.experts, tokens, self._sends_fp8())
            (exchanging.add if self.exchanges else exchanging.discard)(self.experts)

    def _sends_fp8(self) -> bool:
        return self.exchange == "fp8" and isinstance(self.experts, FP8GroupedExperts)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, dim) to the same shape."""
        self.prepare(x)
        return self.finish(self.route(x.flatten(0, -2), self.router, self.reorderer)).view_as(x)

    def route(self, tokens: Tensor, router: nn.Module, reorderer: nn.Module) -> Routed:
        """Chooses the experts of tokens (T, dim), and copies the tokens for them.

        `router` and `reorderer` are those of this layer, with or without the compiler.
        """
        scores, chosen, counts = router(tokens, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        if _sorts_all_slots(reorderer):
            # What it computes, but it would also count the slots again and sort the scores.
            slots = slots_by_expert(chosen, len(self.tokens_per_expert))
        else:
            # Under sequence parallelism these are only the slots of this rank's tokens.
            _, slots, counts = reorderer(scores, chosen)
        rows = rows_of_slots(slots, scores)
        before, after = (scores, None) if self.score_before_experts else (None, scores)
        copies = None if self.exchanges else Expand.call(tokens, slots, rows, before)
        return Routed(tokens, copies, chosen, counts, slots, rows, before, after)

    def finish(self, routed: Routed) -> Tensor:
        """The experts and what follows them: (T, dim)."""
        tokens, copies, _, counts, slots, rows, _, after = routed
        if self.exchanges:
            combine = self._run_exchanged(routed)
        else:
            exchange_counts(self.experts, counts)
            copies = self.experts(copies, counts)
            combine = lambda: Combine.call(copies, slots, rows, after)  # noqa: E731
        # Computed here to overlap with the all-to-all that returns the copies.
        shared_experts = _without_compiler(self.shared_experts)
        shared = None if shared_experts is None else shared_experts(tokens)
        out = combine().to(tokens.dtype)
        return out if shared is None else shared + out

    def _run_exchanged(self, routed: Routed) -> Callable[[], Tensor]:
        """Runs the experts on exchanged tokens; returns what combines their outputs (T, dim)."""
        tokens, before, after = routed.tokens, routed.before, routed.after
        sizes = self.router.top_k, len(self.tokens_per_expert), len(routed.slots)
        way = exchange_of(self.experts, tokens, *sizes, self.exchange_capacity)
        plan = way.plan(routed.rows, routed.chosen, routed.counts)
        if self._sends_fp8():
            scores = after if before is None else before
            assert scores is not None
            out = self.experts(tokens, Exchanged(way, plan, scores, before is not None))
            return lambda: out
        rows = exchange.Dispatch.call(tokens, before, way, plan)
        out = self.experts(rows, plan.sizes)
        return lambda: exchange.Combine.call(out, after, way, plan)


def _sorts_all_slots(reorderer: nn.Module) -> bool:
    """Whether it is torchtitan's, without hooks such as those of sequence parallelism."""
    original = reorderer._orig_mod if isinstance(reorderer, OptimizedModule) else reorderer
    return type(original) is TokenReorderer and not (has_hooks(reorderer) or has_hooks(original))


def _without_compiler(module: nn.Module | None) -> nn.Module | None:
    """The feed-forward inside a compiled `module`, if it runs fused; otherwise `module`.

    The ops of a fused feed-forward leave the compiler nothing to fuse, and calling them takes less
    CPU time than calling compiled code.
    """
    if not isinstance(module, OptimizedModule) or has_hooks(module):
        return module
    original = module._orig_mod
    return original if isinstance(original, FP8FeedForward) and original.runs_fused() else module


def route_by_gathers(model: nn.Module) -> int:
    """Turns the MoE layers of `model` into GatherMoE, in place, and returns how many.

    Subclasses of MoE, such as DeepEP's, have their own forward and are left as they are.
    """
    layers = [module for module in model.modules() if type(module) is MoE]
    for layer in layers:
        layer.__class__ = GatherMoE
    return len(layers)
