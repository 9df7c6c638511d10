"""torchtitan's MoE layer, with gathers between token order and expert order (`gathers.py`).

Values differ from torchtitan's in the order in which a token's k outputs are summed. torchtitan
also rounds more often in two places: it rounds a token's gradient after each summand, and under
autocast it sums the outputs in bf16.
"""

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import MoE

from titan_fp8.gathers import Combine, Expand

_ops = torch.ops.titan_fp8


class GatherMoE(MoE):
    """torchtitan's MoE, permuting by gathers; `route_by_gathers` makes it from one."""

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, dim) to the same shape. Router and reorderer are torchtitan's."""
        tokens = x.flatten(0, -2)
        scores, chosen, counts = self.router(tokens, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        # Under sequence parallelism these are only the slots of this rank's tokens.
        _, slots, counts = self.reorderer(scores, chosen)
        rows = _ops.invert_index(slots, scores.numel()).view_as(scores)
        before, after = (scores, None) if self.score_before_experts else (None, scores)

        routed = self.experts(Expand.apply(tokens, slots, rows, before), counts)
        # Computed here to overlap with the all-to-all that returns the routed tokens.
        shared = None if self.shared_experts is None else self.shared_experts(tokens)
        out = Combine.apply(routed, slots, rows, after).to(x.dtype)
        return (out if shared is None else shared + out).view_as(x)


def route_by_gathers(model: nn.Module) -> int:
    """Turns the MoE layers of `model` into GatherMoE, in place, and returns how many.

    Subclasses of MoE, such as DeepEP's, have their own forward and are left as they are.
    """
    layers = [module for module in model.modules() if type(module) is MoE]
    for layer in layers:
        layer.__class__ = GatherMoE
    return len(layers)
