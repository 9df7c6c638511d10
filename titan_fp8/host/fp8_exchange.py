"""Experts that exchange their tokens in FP8, differentiably (`exchanged_swiglu`).

A token is quantized once, before it is copied for its experts, and so is the gradient of the
output. fprop and dgrad read what travels; the columns that wgrad reads are quantized again from
that (the op `gather_1x128_128x1_t`). Scores multiply the scales. The experts' outputs and the
gradients of the tokens return in bf16, summed over the experts of a rank. The gradients of scores
are computed where the experts are (the op `swiglu_dscores`).
"""

from typing import Any

import torch
from torch import Tensor

from titan_fp8.functional import bodies
from titan_fp8.functional.bodies import DTypes, ProductSpec
from titan_fp8.functional.function import Function, no_double_backward
from titan_fp8.functional.product import spec_of
from titan_fp8.functional.weights import Weight, operands_of
from titan_fp8.host.exchange import Arrived, Exchange, PlanT
from titan_fp8.ops import call, run

# As the bodies of `bodies.py`. The weights and their scales come after the constants.


def _forward(
    ops: Any, q: Tensor, s: Tensor, slots: Tensor, scores: Tensor, k: int, offs: Tensor,
    before: bool, for_wgrad: bool, spec: ProductSpec, *weights: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    weight = scores if before else None
    operands = spec.feed_forward.gather.on(ops, q, s, slots, offs, weight, k)
    return bodies.feed_forward(ops, operands, offs, for_wgrad, spec, *weights)


def _backward(
    ops: Any, q: Tensor, s: Tensor, slots: Tensor, scores: Tensor, k: int, offs: Tensor,
    before: bool, dtypes: DTypes, spec: ProductSpec, *saved: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    weight = None if before else scores
    operands = spec.feed_forward.gather.on(ops, q, s, slots, offs, weight, k)
    return bodies.feed_forward_backward(
        ops, operands, offs, dtypes, spec, *saved, scores=scores, before=before
    )


def _arrive(
    x: Tensor, scores: Tensor, exchange: Exchange[PlanT], plan: PlanT, spec: ProductSpec
) -> Arrived:
    """Quantizes tokens or their gradients x (T, K), and exchanges them."""
    q, s = run(bodies.quantized, x.to(spec.dtype), None, False, spec, emulate=spec.emulate)
    return exchange.arrive(q, s, scores, plan)


class _ExchangedSwiGLU(Function):
    """out (T, N) of tokens x (T, K): their experts' outputs, weighted by scores (T, k) and summed.

    `before`: the scores weight the copies of the tokens instead of the outputs. `for_wgrad`:
    backward computes a gradient that reads the columns of x.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scores: Tensor, exchange: Exchange[PlanT], plan: PlanT,
        before: bool, for_wgrad: bool, spec: ProductSpec, *weights: Weight,
    ) -> Tensor:  # fmt: skip
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
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
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


def exchanged_swiglu(
    x: Tensor,
    scores: Tensor,
    w1: Weight,
    w2: Weight,
    w3: Weight,
    exchange: Exchange[PlanT],
    plan: PlanT,
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
