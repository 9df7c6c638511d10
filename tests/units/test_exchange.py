"""The definition of the exchange of tokens equals the path by all-to-alls and permutations."""

import pytest
import torch

from titan_fp8 import reference
from titan_fp8.permute import slots_by_expert

ALIGNMENT = 128


def routing(generator, ranks, local, top_k, kind):
    """Chosen experts (T, k) of each rank."""
    experts = ranks * local
    chosen = []
    for rank in range(ranks):
        tokens = int(torch.randint(1, 70, (), generator=generator))
        scores = torch.rand(tokens, experts, generator=generator)
        if kind == "one rank":
            scores[:, local:] -= 2
        elif kind == "empty experts":
            scores[:, ::2] -= 2
        elif kind == "no tokens" and rank == ranks - 1:
            scores = scores[:0]
        chosen.append(scores.topk(top_k).indices)
    return chosen


@pytest.mark.parametrize("kind", ["any", "one rank", "empty experts", "no tokens"])
@pytest.mark.parametrize("ranks, local, top_k", [(1, 4, 2), (2, 4, 3), (4, 3, 2)])
def test_rows_are_those_of_all_to_alls(ranks, local, top_k, kind):
    generator = torch.Generator().manual_seed(0)
    experts, dim = ranks * local, 32
    chosen = routing(generator, ranks, local, top_k, kind)
    xs = [torch.randn(len(c), dim, generator=generator).bfloat16() for c in chosen]
    counts = torch.stack([c.flatten().bincount(minlength=experts) for c in chosen])
    slots = [slots_by_expert(c, experts) for c in chosen]
    indices = [reference.invert_index(s, len(s)).view(-1, top_k) for s in slots]
    got = reference.exchange_send(xs, indices, chosen, counts, ALIGNMENT)

    copies = [
        reference.gather_rows(x, s, None, top_k).split(c.view(ranks, local).sum(1).tolist())
        for x, s, c in zip(xs, slots, counts, strict=True)
    ]
    back = []
    for rank, (rows, _) in enumerate(got):
        arrived = torch.cat([each[rank] for each in copies])
        here = counts.view(ranks, ranks, local)[:, rank]
        tokens, places, sizes = reference.places_of_tokens(
            here.flatten(), local, ranks, len(arrived), len(rows), ALIGNMENT
        )
        assert torch.equal(rows, reference.gather_rows(arrived, tokens))
        ends = reference.exchange_places(counts, ALIGNMENT)[1][rank]
        assert torch.equal(ends, sizes.long().cumsum(0))
        back.append(reference.gather_rows(rows, places).split(here.sum(1).tolist()))

    origins = [origin for _, origin in got]
    delivered = reference.exchange_deliver([rows for rows, _ in got], origins, [*map(len, slots)])
    for rank, (x, slot, index) in enumerate(zip(xs, slots, indices, strict=True)):
        returned = torch.cat([each[rank] for each in back])
        want = reference.combine_rows(returned, index)
        identity = torch.arange(len(slot)).view(-1, top_k)
        assert torch.equal(reference.combine_rows(delivered[rank], identity), want)
        assert torch.equal(want, (x.float() * top_k).bfloat16())
