"""torchtitan's MoE layer, with gathers between token order and expert order (`permute.py`).

Values differ from torchtitan's in the order in which a token's k outputs are summed. torchtitan
also rounds more often in two places: it rounds a token's gradient after each summand, and under
autocast it sums the outputs in bf16.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torchtitan.models.moe.moe import MoE, TokenReorderer

from titan_fp8.host.permute import Combine, Expand, rows_of_slots, slots_by_expert
from titan_fp8.host.torchtitan_0_2.token_dispatcher import (
    ExchangeSettings,
    FP8Dispatcher,
    RowDispatcher,
)
from titan_fp8.modules.feed_forward import FP8FeedForward, has_hooks


class Routed(NamedTuple):
    """The tokens of a batch, and their copies for the experts."""

    tokens: Tensor  # (T, dim)
    copies: Tensor | None  # (R, dim), sorted by expert; None if tokens are exchanged
    counts: Tensor  # (experts,), the copies for each
    slots: Tensor  # (R,), of each copy, as in `permute.Expand`
    rows: Tensor  # (T, k), of each slot, as there
    scores: Tensor | None  # (T, k), weights of the experts' outputs; None if copies are weighted
    chosen: Tensor  # (T, k), the expert of each slot


class GatherMoE(MoE):
    """torchtitan's MoE, permuting by gathers; `route_by_gathers` makes it from one."""

    exchange: ExchangeSettings | None = None
    """How tokens travel to their experts. None: copies of them travel, by all-to-alls."""

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, dim) to the same shape."""
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
        if self.exchange is not None:
            return Routed(tokens, None, counts, slots, rows, scores, chosen)
        before, after = (scores, None) if self.score_before_experts else (None, scores)
        copies = Expand.call(tokens, slots, rows, before)
        return Routed(tokens, copies, counts, slots, rows, after, chosen)

    def finish(self, routed: Routed) -> Tensor:
        """The experts and what follows them: (T, dim)."""
        tokens, copies, counts, slots, rows, scores, chosen = routed
        if copies is None:
            assert scores is not None and self.exchange is not None
            routing, before = (rows, chosen, counts, slots), self.score_before_experts
            dispatcher = FP8Dispatcher if self.exchange.in_fp8 else RowDispatcher
            out = self.experts(tokens, dispatcher(routing, scores, before, self.exchange))
            shared = _run_shared(self.shared_experts, tokens)
        else:
            copies = self.experts(copies, counts)
            # Computed here to overlap with the all-to-all that returns the copies.
            shared = _run_shared(self.shared_experts, tokens)
            out = Combine.call(copies, slots, rows, scores)
        out = out.to(tokens.dtype)
        return out if shared is None else shared + out


def _sorts_all_slots(reorderer: nn.Module) -> bool:
    """Whether it is torchtitan's, without hooks such as those of sequence parallelism."""
    original = reorderer._orig_mod if isinstance(reorderer, OptimizedModule) else reorderer
    return type(original) is TokenReorderer and not (has_hooks(reorderer) or has_hooks(original))


def _run_shared(module: nn.Module | None, x: Tensor) -> Tensor | None:
    """`module` of x if there is one; without the compiler if it is a feed-forward that runs fused.

    The ops of a fused feed-forward leave the compiler nothing to fuse, and calling them takes less
    CPU time than calling compiled code.
    """
    if isinstance(module, OptimizedModule) and not has_hooks(module):
        original = module._orig_mod
        if isinstance(original, FP8FeedForward) and original.runs_fused():
            module = original
    return None if module is None else module(x)


def route_by_gathers(model: nn.Module) -> list[GatherMoE]:
    """Turns the MoE layers of `model` into GatherMoE, in place, and returns them.

    Subclasses of MoE, such as DeepEP's, have their own forward and are left as they are.
    """
    layers: list[Any] = [module for module in model.modules() if type(module) is MoE]
    for layer in layers:
        layer.__class__ = GatherMoE
    return layers
