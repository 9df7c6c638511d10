"""The differentiable exchange equals its definition, in bf16 and with FP8 on the wire; on gloo."""

import gloo
import torch
import torch.distributed as dist
from torch import Tensor

from titan_fp8 import reference
from titan_fp8.exchange import CollectiveExchange, Combine, Dispatch, exchanged_swiglu
from titan_fp8.permute import slots_by_expert
from titan_fp8.swiglu import fp8_swiglu

RANKS, LOCAL, TOP_K, DIM, HIDDEN = 2, 3, 2, 144, 32
EXPERTS = RANKS * LOCAL


def batches(generator: torch.Generator, sends_all: bool) -> list[tuple[Tensor, ...]]:
    """Tokens, index, chosen, counts, scores and gradients of each rank; rank 0 may have none."""
    ranks = []
    for tokens in (0 if sends_all else 150, 170):
        chosen = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices
        sent = torch.rand(chosen.shape, generator=generator) < (1 if sends_all else 0.7)
        slots = slots_by_expert(torch.where(sent, chosen, EXPERTS), EXPERTS + 1)[: sent.sum()]
        index = reference.invert_index(slots, chosen.numel()).view_as(chosen)
        counts = chosen[sent].bincount(minlength=EXPERTS)
        scores = torch.rand(chosen.shape, generator=generator)
        x, g = (torch.randn(tokens, DIM, generator=generator).bfloat16() for _ in range(2))
        ranks.append((x, index, chosen, counts, scores, g))
    return ranks


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), n


def rows_and_gradients(rank: int, sends_all: bool) -> None:
    batch = batches(torch.Generator().manual_seed(0), sends_all)
    xs, indices, chosen, counts, scores, gs = map(list, zip(*batch))
    routing = indices, chosen, torch.stack(counts), 128
    want, origins = zip(*reference.exchange_send(xs, *routing))
    ys = [torch.randn(rows.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
          for rows in want]  # fmt: skip
    back = reference.exchange_deliver(ys, origins, [i.numel() for i in indices])[rank]
    exchange = CollectiveExchange(dist.group.WORLD, top_k=TOP_K, experts=EXPERTS)
    plan = exchange.plan(indices[rank], chosen[rank], counts[rank])
    x, y, s = (t[rank].clone().requires_grad_() for t in (xs, ys, scores))
    rows = Dispatch.call(x, None, exchange, plan)
    rows.backward(ys[rank])
    out = Combine.call(y, s, exchange, plan)
    out.backward(gs[rank])
    dy = reference.exchange_send(gs, *routing, scores)[rank][0]
    want_out = reference.combine_rows(back, plan.slots, scores[rank])
    dx = reference.combine_rows(back, plan.slots)
    assert_same([rows, out, x.grad, y.grad], [want[rank], want_out, dx, dy])
    want_scores = reference.dot_rows(gs[rank], back, plan.slots)
    torch.testing.assert_close(s.grad, want_scores, rtol=1e-5, atol=1e-4)


def fp8_on_the_wire(rank: int, recipe: str, before: bool) -> None:
    """With scores that are powers of two, FP8 rows are those of the exchange in bf16."""
    generator = torch.Generator().manual_seed(0)
    x, index, chosen, counts, scores, g = batches(generator, False)[rank]
    scores = 2.0 ** (4 * scores).round()
    generator.manual_seed(rank)
    weights = [torch.randn(LOCAL, *shape, generator=generator) / 8
               for shape in ((HIDDEN, DIM), (DIM, HIDDEN), (HIDDEN, DIM))]  # fmt: skip
    weights = [w.bfloat16() for w in weights]
    exchange = CollectiveExchange(dist.group.WORLD, top_k=TOP_K, experts=EXPERTS)
    plan = exchange.plan(index, chosen, counts)

    def run(fp8: bool) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, scores, *weights)]
        if fp8:
            options = {"recipe": recipe, "score_before_experts": before}
            out = exchanged_swiglu(*leaves, exchange, plan, **options)
        else:
            first, last = (leaves[1], None) if before else (None, leaves[1])
            rows = Dispatch.call(leaves[0], first, exchange, plan)
            y = fp8_swiglu(rows, *leaves[2:], plan.ends, recipe=recipe, aligned=True)
            out = Combine.call(y, last, exchange, plan)
        out.backward(g)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    got, want = run(True), run(False)
    # The gradients of the scores sum products of g in FP8 unless the scores come before.
    exact = (0, 1, 2) if before else (0, 1)
    assert_same([got[i] for i in exact], [want[i] for i in exact])
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and (a - b).norm() <= 0.05 * b.norm()


def columns_are_quantized_from_rows(rank: int) -> None:
    """dW2 is that of columns of g · score, dequantized from the rows that travel."""
    batch = batches(torch.Generator().manual_seed(0), False)
    xs, indices, chosen, counts, scores, gs = map(list, zip(*batch))
    routing = indices, chosen, torch.stack(counts), 128
    weights = [torch.randn(LOCAL, *shape, generator=torch.Generator().manual_seed(2)) / 8
               for shape in ((HIDDEN, DIM), (DIM, HIDDEN), (HIDDEN, DIM))]  # fmt: skip
    exchange = CollectiveExchange(dist.group.WORLD, top_k=TOP_K, experts=EXPERTS)
    plan = exchange.plan(indices[rank], chosen[rank], counts[rank])
    w1, w2, w3 = (w.bfloat16().requires_grad_() for w in weights)
    exchanged_swiglu(xs[rank], scores[rank], w1, w2, w3, exchange, plan).backward(gs[rank])

    def arrive(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        q, s = zip(*map(reference.quantize_1x128, tensors))
        q = [t.view(torch.uint8) for t in q]
        q, s = (reference.exchange_send(list(t), *routing)[rank][0] for t in (q, s))
        return q.view(torch.float8_e4m3fn), s

    origin = reference.exchange_send(xs, *routing)[rank][1]
    weight = torch.stack([scores[o % RANKS].flatten()[o // RANKS] if o >= 0 else torch.tensor(0.0)
                          for o in origin.tolist()])  # fmt: skip
    ends = plan.ends
    q, s = arrive(xs)
    a, b = (
        reference.blockwise_mm(q, s, *reference.quantize_128x128(w.detach()), ends, True)
        for w in (w1, w3)
    )
    h = reference.quantize_128x1_t(reference.swiglu(a, b), ends, True)
    q, s = arrive(gs)
    g_columns = reference.quantize_128x1_t(
        reference.dequantize_1x128(q, s * weight[:, None]), ends, True
    )
    want = reference.blockwise_wgrad(*g_columns, *h, ends, True)
    assert torch.equal(w2.grad, want)


def all_of_it(rank: int) -> None:
    for sends_all in (True, False):
        rows_and_gradients(rank, sends_all)
    for recipe in ("blockwise", "blockwise_pow2"):
        for before in (False, True):
            fp8_on_the_wire(rank, recipe, before)
    columns_are_quantized_from_rows(rank)


def test_the_exchange_equals_its_definition():
    gloo.spawn(all_of_it, RANKS)
