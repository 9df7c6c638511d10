"""torchtitan's MoE layer, with gathers between token order and expert order (`permute.py`).

Values differ from torchtitan's in the order in which a token's k outputs are summed. torchtitan
also rounds more often in two places: it rounds a token's gradient after each summand, and under
autocast it sums the outputs in bf16.
"""

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torchtitan.models.moe.moe import MoE, TokenReorderer

from titan_fp8.host.permute import Combine, Expand, rows_of_slots, slots_by_expert
from titan_fp8.host.torchtitan_0_2.peer_exchange import Exchanged
from titan_fp8.modules.feed_forward import has_hooks


class GatherMoE(MoE):
    """torchtitan's MoE, permuting by gathers; `route_by_gathers` makes it from one."""

    exchange_capacity: float | None = None
    """Tokens travel to their experts, and a rank can get so many, relative to balanced routing
    (`peer_exchange.py`). None: copies of them travel as they are."""
    exchanges_in_fp8 = True
    """If tokens travel: the experts exchange them in FP8. Otherwise the hooks do, as they are."""

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, dim) to the same shape."""
        tokens = x.flatten(0, -2)
        scores, chosen, counts = self.router(tokens, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        if _sorts_all_slots(self.reorderer):
            # What it computes, but it would also count the slots again and sort the scores.
            slots = slots_by_expert(chosen, len(self.tokens_per_expert))
        else:
            # Under sequence parallelism these are only the slots of this rank's tokens.
            _, slots, counts = self.reorderer(scores, chosen)
        rows = rows_of_slots(slots, scores)
        if (capacity := self.exchange_capacity) is not None:
            how = self.score_before_experts, capacity, self.exchanges_in_fp8
            out = self.experts(tokens, Exchanged(rows, chosen, counts, slots, scores, *how))
        else:
            before, after = (scores, None) if self.score_before_experts else (None, scores)
            copies = self.experts(Expand.call(tokens, slots, rows, before), counts)
        # Computed here to overlap with the all-to-all that returns the copies.
        shared = None if self.shared_experts is None else self.shared_experts(tokens)
        if capacity is None:
            out = Combine.call(copies, slots, rows, after)
        out = out.to(tokens.dtype)
        return (out if shared is None else shared + out).view_as(x)


def _sorts_all_slots(reorderer: nn.Module) -> bool:
    """Whether it is torchtitan's, without hooks such as those of sequence parallelism."""
    original = reorderer._orig_mod if isinstance(reorderer, OptimizedModule) else reorderer
    return type(original) is TokenReorderer and not (has_hooks(reorderer) or has_hooks(original))


def route_by_gathers(model: nn.Module) -> int:
    """Turns the MoE layers of `model` into GatherMoE, in place, and returns how many.

    Subclasses of MoE, such as DeepEP's, have their own forward and are left as they are.
    """
    layers = [module for module in model.modules() if type(module) is MoE]
    for layer in layers:
        layer.__class__ = GatherMoE
    return len(layers)
