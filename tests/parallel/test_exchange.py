"""Experts that get their tokens in FP8 compute what the numerics of the exchange say; on gloo.

Each rank draws the tokens of all ranks, so it computes by itself what must arrive. Rows that peers
exchange in high precision give what all-to-alls do.
"""

import itertools

import gloo
import pytest
import torch
import torch.distributed as dist
from peers import Peers
from rows import exchanged_rows
from torch import Tensor

from titan_fp8 import reference
from titan_fp8.functional.swiglu import fp8_swiglu
from titan_fp8.host.all_to_all import (
    AllToAllExchange,
    ExchangeRows,
    _bytes,
    exchange_counts,
)
from titan_fp8.host.fp8_exchange import exchanged_swiglu
from titan_fp8.host.peer_exchange import rows_for
from titan_fp8.host.permute import (
    Combine,
    Expand,
    rows_of_slots,
    slots_by_expert,
    sort_back,
    sort_by_expert,
)
from titan_fp8.ops import call
from titan_fp8.recipe import RECIPES

LOCAL, TOP_K, DIM, HIDDEN, TOKENS = 3, 2, 144, 32, 150
KINDS = ("any", "part", "one rank", "empty experts", "no tokens")


def draw(ranks: int, kind: str, seed: int) -> list[dict[str, Tensor]]:
    """The tokens, gradients and routing of each rank. Scores are powers of two."""
    generator, experts = torch.Generator().manual_seed(seed), ranks * LOCAL
    batches = []
    for rank in range(ranks):
        tokens = 0 if kind == "no tokens" and rank == 0 else TOKENS + rank
        preference = torch.rand(tokens, experts, generator=generator)
        if kind == "one rank":
            preference[:, :LOCAL] += 2
        elif kind == "empty experts":
            preference[:, ::2] -= 2
        chosen = preference.topk(TOP_K).indices
        sent = torch.rand(chosen.shape, generator=generator) < (0.6 if kind == "part" else 2)
        slots = slots_by_expert(torch.where(sent, chosen, experts), experts + 1)[: sent.sum()]
        scores = 2.0 ** torch.randint(-3, 1, chosen.shape, generator=generator)
        counts = chosen[sent].bincount(minlength=experts)
        x, g = torch.randn(2, tokens, DIM, generator=generator).bfloat16()
        routing = {"chosen": chosen, "counts": counts, "slots": slots, "scores": scores}
        batches.append(routing | {"x": x, "g": g, "rows": rows_of_slots(slots, scores)})
    return batches


def draw_weights(rank: int) -> list[Tensor]:
    shapes = (HIDDEN, DIM), (DIM, HIDDEN), (HIDDEN, DIM)
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(LOCAL, *s, generator=generator) / 8).bfloat16() for s in shapes]


def exchanged(batch: dict, weights: list[Tensor], recipe: str, before: bool) -> list[Tensor]:
    """The output and the gradients of tokens, scores and weights."""
    leaves = [t.clone().requires_grad_() for t in (batch["x"], batch["scores"], *weights)]
    exchange = AllToAllExchange(dist.group.WORLD)
    plan = exchange.plan(*(batch[name] for name in ("rows", "chosen", "counts", "slots")))
    out = exchanged_swiglu(*leaves, exchange, plan, recipe=recipe, score_before_experts=before)
    out.backward(batch["g"])
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def by_copies_in_bf16(batch: dict, weights: list, recipe: str, before: bool) -> list[Tensor]:
    """The same of experts whose rows travel in bf16, with a sum for each rank, rounded to bf16."""
    x, scores, *weights = (
        t.clone().requires_grad_() for t in (batch["x"], batch["scores"], *weights)
    )
    group, rows = dist.group.WORLD, batch["rows"]
    # Slots are sorted by expert, and so by rank.
    sizes = batch["counts"].view(-1, LOCAL).sum(1).tolist()
    begins = itertools.accumulate([0, *sizes[:-1]])
    of_rank = [(rows >= 0) & (batch["chosen"] // LOCAL == rank) for rank in range(len(sizes))]
    rows_of = [torch.where(of, rows - begin, -1) for of, begin in zip(of_rank, begins)]
    parts = [*zip(batch["slots"].split(sizes), rows_of, strict=True)]
    copies = torch.cat([Expand.apply(x, *part, scores if before else None) for part in parts])
    received, (sent, arriving) = exchange_counts(batch["counts"], group)
    copies = ExchangeRows.apply(copies, arriving, sent, group.group_name)
    copies, permutation, padded = sort_by_expert(copies, received, group.size(), 128)
    ends = padded.cumsum(0, dtype=torch.int32)
    y = sort_back(fp8_swiglu(copies, *weights, ends, recipe=recipe, aligned=True), permutation)
    y = ExchangeRows.apply(y, sent, arriving, group.group_name)
    # A token has two experts, so two of the sums are not zero, and bf16 adds these exactly.
    sums = zip(y.split(sizes), parts, strict=True)
    out = sum(Combine.apply(y, *part, None if before else scores) for y, part in sums)
    out.backward(batch["g"])
    return [out.detach(), x.grad, scores.grad]


def places_of(rank: int, batches: list[dict]) -> tuple[list[tuple[int, int]], Tensor]:
    """(rank, slot) of each row of this rank's experts, slot -1 for padding; the ends of groups."""
    places: list[tuple[int, int]] = []
    ends = []
    for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
        begin = len(places)
        for source, batch in enumerate(batches):
            of_expert = (batch["chosen"] == expert) & (batch["rows"] >= 0)
            slots = of_expert.flatten().nonzero().flatten().tolist()
            places += [(source, slot) for slot in slots]
        while len(places) % 128 or len(places) == begin:
            places.append((0, -1))
        ends.append(len(places))
    return places, torch.tensor(ends, dtype=torch.int32)


def gradients_at_experts(
    rank: int, batches: list[dict], recipe: str, before: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """By the reference, from rows that have been quantized once.

    The gradients of the scores of all ranks, zero where the experts are on another rank than this,
    and those of w1, w2 and w3.
    """
    options = {"scale_fmt": RECIPES[recipe].scale_fmt}
    (places, ends), weights = places_of(rank, batches), draw_weights(rank)
    flat = [batch["scores"].flatten().tolist() for batch in batches]
    scores = [flat[source][slot] if slot >= 0 else 1.0 for source, slot in places]

    def rows_and_columns(name: str, weighted: bool) -> tuple[list[Tensor], list[Tensor]]:
        # The last row of each is padding, at index -1.
        padded = [torch.cat((batch[name], torch.zeros(1, DIM).bfloat16())) for batch in batches]
        quantized = [reference.quantize_1x128(x, **options) for x in padded]
        rows: list[list[Tensor]] = [[], []]
        for source, slot in places:
            q, s = (t[slot // TOP_K] for t in quantized[source])
            factor = batches[source]["scores"].flatten()[slot] if weighted and slot >= 0 else 1
            rows[0].append(q.view(torch.uint8))
            rows[1].append(s * factor)
        q, s = torch.stack(rows[0]).view(torch.float8_e4m3fn), torch.stack(rows[1])
        products = reference.dequantize_1x128(q, s)
        return [q, s], [*reference.quantize_128x1_t(products, ends, True, **options)]

    layout = ends, True
    x_rows, x_columns = rows_and_columns("x", before)
    g_rows, g_columns = rows_and_columns("g", not before)
    w1, w2, w3 = weights
    a, b = (
        reference.blockwise_mm(*x_rows, *reference.quantize_128x128(w, **options), *layout)
        for w in (w1, w3)
    )
    dh = reference.blockwise_mm(*g_rows, *reference.quantize_128x128_t(w2, **options), *layout)
    parts = reference.swiglu_backward_1x128_128x1_t(dh, a, b, *layout, **options)
    of_rows = reference.swiglu_dscores(dh, a, b, torch.tensor(scores), before)
    dscores = [torch.zeros_like(batch["scores"]) for batch in batches]
    for (source, slot), gradient in zip(places, of_rows, strict=True):
        if slot >= 0:
            dscores[source].view(-1)[slot] = gradient
    wgrad = reference.blockwise_wgrad
    return dscores, [
        wgrad(*parts[2:4], *x_columns, *layout),
        wgrad(*g_columns, *parts[8:], *layout),
        wgrad(*parts[6:8], *x_columns, *layout),
    ]


def compare(rank: int, ranks: int) -> None:
    for seed, (kind, before) in enumerate(itertools.product(KINDS, (False, True))):
        recipe = ("blockwise", "blockwise_pow2")[(seed // 2 + before) % 2]
        batches, weights = draw(ranks, kind, seed), draw_weights(rank)
        got = exchanged(batches[rank], weights, recipe, before)
        # The scores are powers of two, so copies in bf16 are quantized to the same rows.
        want = by_copies_in_bf16(batches[rank], weights, recipe, before)
        by_dot_products = want.pop()
        at_experts = [gradients_at_experts(r, batches, recipe, before) for r in range(ranks)]
        want += [sum(dscores[rank] for dscores, _ in at_experts), *at_experts[rank][1]]
        assert (got[2] - by_dot_products).norm() <= 0.05 * by_dot_products.norm()
        for name, a, b in zip(("out", "x", "scores", "w1", "w2", "w3"), got, want, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), (name, kind, recipe, before)


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_travel_as_experts_would_quantize_them(ranks):
    gloo.spawn(compare, ranks, ranks)


def test_the_scale_of_a_single_token_travels():
    _, s = call("quantize_1x128", torch.ones(1, 128).bfloat16())
    assert torch.equal(_bytes(s).view(torch.float32), s)


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, sizes: Tensor) -> Tensor:
    """In FP32, each row by itself; rows past the groups are NaN, in forward and backward."""
    experts = torch.arange(LOCAL).repeat_interleave(sizes)
    w1, w2, w3 = (w.float()[experts] for w in (w1, w2, w3))
    nan = torch.full((len(x) - len(experts), 1), float("nan"))
    x, rest = x[: len(experts), :, None].float(), x[len(experts) :] * nan
    y = w2 @ (torch.nn.functional.silu(w1 @ x) * (w3 @ x))
    return torch.cat((y.squeeze(2).to(rest.dtype), rest)).bfloat16()


def compare_rows(rank: int, ranks: int) -> None:
    weights, most = draw_weights(rank), TOKENS + ranks
    sizes = {"tokens": most, "top_k": TOP_K, "dim": DIM, "experts": ranks * LOCAL}
    capacity = rows_for(most, TOP_K, ranks * LOCAL, ranks, float(ranks))
    options = {"capacity": capacity, "dtype": torch.bfloat16, "alignment": 8}
    peers = Peers(dist.group.WORLD, **sizes, **options)
    for seed, (kind, before) in enumerate(itertools.product(KINDS, (False, True))):
        batch, results = draw(ranks, kind, seed)[rank], []
        routing = tuple(batch[name] for name in ("rows", "chosen", "counts", "slots"))
        scores = torch.rand(batch["scores"].shape)
        for way in (None, peers):
            leaves = [t.clone().requires_grad_() for t in (batch["x"], scores)]
            out = exchanged_rows(
                *leaves, routing, lambda x, sizes: swiglu(x, *weights, sizes), before, 8, way
            )
            out.backward(batch["g"])
            results.append([out.detach(), *(leaf.grad for leaf in leaves)])
        for name, want, got in zip(("out", "x", "scores"), *results, strict=True):
            assert want.dtype == got.dtype and torch.equal(want, got), (name, kind, before)


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_by_peers_are_those_of_all_to_alls(ranks):
    gloo.spawn(compare_rows, ranks, ranks)


def test_capacity_of_all_ranks_is_enough_for_any_routing():
    for ranks, kind in itertools.product((1, 2, 3), KINDS):
        batches = draw(ranks, kind, 0)
        most = max(len(batch["x"]) for batch in batches)
        capacity = rows_for(most, TOP_K, ranks * LOCAL, ranks, float(ranks))
        needed = max(len(places_of(rank, batches)[0]) for rank in range(ranks))
        assert needed <= capacity <= ranks * most * TOP_K + LOCAL * 128
    assert rows_for(100, 2, 8, 4, 1.5) == 1.5 * 200 + 2 * 128
    assert rows_for(100, 4, 8, 4, 4.0) == 4 * 200 + 2 * 128  # two of the four go elsewhere
