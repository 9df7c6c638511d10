"""torchtitan's MoE layer, whose tokens go to their experts and come back by gathers.

Each token has k slots, one for each of its experts. torchtitan copies tokens into the slots, sorted
by expert, and sums the slots of each token again, weighted by the router's scores before or after
the experts. It gets there by `index_put`, which sorts its indices where it has to sum, by a batched
product of 1 x k times k x dim matrices, and by copies of all slots in FP32, one of which it saves.

Here forward and backward are three ops that read the row of each slot once: gather them, sum them
by token, multiply them by a row of their token. Sums are in FP32 and rounded once, so that values
differ from torchtitan's by the order of k summands. torchtitan itself rounds less well in two
places: the gradient of a token at each summand, and under autocast the sum of outputs, which is in
bf16.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import MoE

import titan_fp8.ops  # noqa: F401  (defines torch.ops.titan_fp8)
from titan_fp8.functional import differentiable_once
from titan_fp8.torchtitan_0_2.permutation import arrived

_ops = torch.ops.titan_fp8


class _Expand(torch.autograd.Function):
    """x (T, dim) as the rows of `slots` (R,), times their scores, if given.

    Slot k · t + i is choice i of token t; `rows` (T, k) is the inverse of `slots`, -1 where a slot
    has no row; scores (T, k) FP32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, rows: Tensor, scores: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, *(() if scores is None else (x, scores)))
        return _ops.gather_rows(x, slots, scores, rows.shape[1])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor):
        rows, *weighted = ctx.saved_tensors
        if not weighted:
            return _ops.combine_rows(g, rows), None, None, None
        x, scores = weighted
        return _ops.combine_rows(g, rows, scores), None, None, _ops.dot_rows(x, g, rows)


class _Combine(torch.autograd.Function):
    """The sum of each token's rows of y (R, dim), times their scores, if given: (T, dim)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, slots: Tensor, rows: Tensor, scores: Tensor | None) -> Tensor:
        y = arrived(y)
        ctx.save_for_backward(slots, rows, *(() if scores is None else (y, scores)))
        return _ops.combine_rows(y, rows, scores)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor):
        slots, rows, *weighted = ctx.saved_tensors
        y, scores = weighted or (None, None)
        dy = _ops.gather_rows(g, slots, scores, rows.shape[1])
        return dy, None, None, None if scores is None else _ops.dot_rows(g, y, rows)


class GatherMoE(MoE):
    """torchtitan's MoE by gathers; made from one by `route_by_gathers`."""

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, dim), the same shape out; the routing is torchtitan's."""
        tokens = x.flatten(0, -2)
        scores, chosen, counts = self.router(tokens, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        # Under sequence parallelism these are the slots of the rank's tokens alone.
        _, slots, counts = self.reorderer(scores, chosen)
        rows = _ops.invert_index(slots, scores.numel()).view_as(scores)
        before, after = (scores, None) if self.score_before_experts else (None, scores)

        routed = self.experts(_Expand.apply(tokens, slots, rows, before), counts)
        # Between the two, for it to overlap with the way back from other ranks.
        shared = None if self.shared_experts is None else self.shared_experts(tokens)
        out = _Combine.apply(routed, slots, rows, after).to(x.dtype)
        return (out if shared is None else shared + out).view_as(x)


def route_by_gathers(model: nn.Module) -> int:
    """Turns the MoE layers of `model` into GatherMoE, in place, and returns how many.

    Subclasses, DeepEP's for one, compute in ways of their own and are left alone.
    """
    layers = [module for module in model.modules() if type(module) is MoE]
    for layer in layers:
        layer.__class__ = GatherMoE
    return len(layers)
