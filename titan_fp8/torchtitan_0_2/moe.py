"""torchtitan's MoE layer, with gathers between token order and expert order.

Each token has k slots, one for each of its experts. torchtitan copies the tokens into slots sorted
by expert, and afterwards sums the slots of each token; the router's scores weight the slots before
or after the experts. It uses `index_put`, which has to sort its indices to accumulate, a batched
product of (1, k) by (k, dim) matrices, and FP32 copies of all slots, one of which it saves.

Here forward and backward consist of three ops, each of which reads the row of every slot once:
`gather_rows`, `combine_rows` (the weighted sum of each token's slots) and `dot_rows` (the gradient
of the scores). They sum in FP32 and round once, so values differ from torchtitan's by the order of
k summands. torchtitan rounds more often in two places: a token's gradient at each summand and,
under autocast, the sum of outputs, which it takes in bf16.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import MoE

import titan_fp8.ops  # noqa: F401  (defines torch.ops.titan_fp8)
from titan_fp8.functional import differentiable_once
from titan_fp8.torchtitan_0_2.permutation import wait_for_collective

_ops = torch.ops.titan_fp8


class _Expand(torch.autograd.Function):
    """Copies x (T, dim) into rows (R, dim), one for each of `slots` (R,), times its score if given.

    Slot k · t + i is choice i of token t. `rows` (T, k) is the inverse of `slots`, -1 for a slot
    without a row. scores (T, k) FP32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, rows: Tensor, scores: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, *(() if scores is None else (x, scores)))
        return _ops.gather_rows(x, slots, scores, rows.shape[1])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weighted = ctx.saved_tensors
        if not weighted:
            return _ops.combine_rows(g, rows), None, None, None
        x, scores = weighted
        return _ops.combine_rows(g, rows, scores), None, None, _ops.dot_rows(x, g, rows)


class _Combine(torch.autograd.Function):
    """Sums each token's rows of y (R, dim), times their scores if given, to (T, dim)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, slots: Tensor, rows: Tensor, scores: Tensor | None) -> Tensor:
        y = wait_for_collective(y)
        ctx.save_for_backward(slots, rows, *(() if scores is None else (y, scores)))
        return _ops.combine_rows(y, rows, scores)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        slots, rows, *weighted = ctx.saved_tensors
        y, scores = weighted or (None, None)
        dy = _ops.gather_rows(g, slots, scores, rows.shape[1])
        return dy, None, None, None if scores is None else _ops.dot_rows(g, y, rows)


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

        routed = self.experts(_Expand.apply(tokens, slots, rows, before), counts)
        # Computed here to overlap with the all-to-all that returns the routed tokens.
        shared = None if self.shared_experts is None else self.shared_experts(tokens)
        out = _Combine.apply(routed, slots, rows, after).to(x.dtype)
        return (out if shared is None else shared + out).view_as(x)


def route_by_gathers(model: nn.Module) -> int:
    """Turns the MoE layers of `model` into GatherMoE, in place, and returns how many.

    Subclasses of MoE, such as DeepEP's, have their own forward and are left as they are.
    """
    layers = [module for module in model.modules() if type(module) is MoE]
    for layer in layers:
        layer.__class__ = GatherMoE
    return len(layers)
