"""The permutation by gathers equals torchtitan's, in both passes.

Bit for bit, except for sums of more than two summands, which may be taken in another order.
"""

from pathlib import Path

import gloo
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from titan import (
    BOTH,
    CHECKPOINTING,
    GROUPED_MM,
    LINEAR,
    loss_and_gradients,
    parse,
    toml,
    trainer,
    training,
)
from torch import Tensor, nn
from torchtitan.distributed import expert_parallel
from torchtitan.models.moe import utils as torchtitan
from torchtitan.models.moe.moe import MoE, MoEArgs

from titan_fp8 import reference
from titan_fp8.host import all_to_all, permute
from titan_fp8.host.torchtitan_0_2 import moe, token_exchange

NAN = float("nan")
DTYPES = [torch.bfloat16, torch.float32]
COUNTS = {
    "uneven": [[3, 0, 17, 1], [40, 0, 2, 9]],
    "empty rank": [[0, 0, 0, 0], [5, 16, 130, 1]],
    "one rank": [[7, 8, 9, 0]],
    "no tokens": [[0, 0], [0, 0]],
}
"""Tokens of each source rank for each local expert."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_rows_takes_rows_and_zeros(dtype):
    x = torch.randn(5, 7, dtype=dtype)
    x[0], x[4] = NAN, torch.inf
    index = torch.tensor([3, -1, 1, 5, 1, -7, 2])
    want = torch.stack([x[i] if 0 <= i < 5 else torch.zeros(7, dtype=dtype) for i in index])
    for i in (index, index.int()):
        assert torch.equal(reference.gather_rows(x, i), want)
    assert reference.gather_rows(x, torch.tensor([0])).isnan().all()
    assert reference.gather_rows(x, index[:0]).shape == (0, 7)
    assert torch.equal(reference.gather_rows(x[:0], index), torch.zeros(7, 7, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_weighted_summed_and_multiplied_in_fp32(dtype):
    y, a = torch.randn(9, 24, dtype=dtype), torch.randn(5, 24, dtype=dtype)
    index = torch.tensor([[3, -1, 8], [0, 1, 2], [-1, -1, -1], [8, 8, 8], [7, 9, 4]])
    weight = torch.randn(5, 3)
    known = (index >= 0) & (index < 9)
    rows = y.double()[index.clamp(0, 8)] * known[..., None]
    to_fp32 = {"rtol": 1e-6, "atol": 1e-6}
    tolerance = to_fp32 if dtype == torch.float32 else {"rtol": 2**-8, "atol": 1e-6}

    got = reference.combine_rows(y, index, weight)
    assert got.dtype == dtype
    want = (rows * weight.double()[..., None]).sum(1)
    torch.testing.assert_close(got.double(), want, **tolerance)
    got = reference.combine_rows(y, index)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), rows.sum(1), **tolerance)
    got = reference.dot_rows(a, y, index)
    assert got.dtype == torch.float32
    want = (rows * a.double()[:, None]).sum(-1)
    torch.testing.assert_close(got.double(), want, **{"rtol": 1e-5, "atol": 1e-5})
    for k, (of_row, choice) in ((1, (0, 0)), (3, (3, 2)), (3, (8, 0))):
        weight, slot = torch.randn(9, k), of_row * k + choice
        got = reference.gather_rows(y, torch.tensor([-1, slot, 9 * k]), weight, k)
        assert torch.equal(got[1], (weight[of_row, choice] * y[of_row].float()).to(dtype))
        assert not got[0].any() and not got[2].any()


def test_what_is_not_there_is_zero_whatever_it_is_multiplied_by():
    x, slots, there = torch.ones(3, 4), torch.tensor([-1, 99, 2]), torch.tensor([[-1, 1], [3, 0]])
    weight = torch.tensor([[NAN], [NAN], [1.0]])
    got = reference.gather_rows(x, slots, weight, 1)
    assert torch.equal(got, torch.tensor([[0.0], [0.0], [1.0]]).expand(3, 4))
    got = reference.combine_rows(x, there, torch.tensor([[NAN, 1.0], [torch.inf, 1.0]]))
    assert torch.equal(got, torch.ones(2, 4))
    got = reference.dot_rows(torch.full((2, 4), NAN), x, there)
    assert not got[:, 0].any() and got[:, 1].isnan().all()


def both_ways(permute, unpermute, counts: list[list[int]], alignment: int, dtype: torch.dtype):
    """The results of both functions, forward and backward, with NaN in the rows of padding.

    The first of them is the token of each place, -1 for padding.
    """
    torch.manual_seed(0)
    count = torch.tensor(counts)
    x = torch.randn(int(count.sum()), 24, dtype=dtype, requires_grad=True)
    shape, rows, index, sizes = permute(x, count.flatten(), *count.shape)
    tokens = getattr(index, "tokens", index)
    padding = (tokens < 0)[:, None]
    g = torch.randn(rows.shape, dtype=dtype).masked_fill(padding, NAN)
    rows.backward(g)
    out = torch.randn(rows.shape, dtype=dtype).masked_fill(padding, NAN).requires_grad_()
    y = unpermute(out, shape, index)
    y.backward(torch.randn(y.shape, dtype=dtype))
    assert sizes.sum() <= len(rows) and (sizes % alignment == 0).all()
    return tokens, sizes, rows.detach(), x.grad, y.detach(), out.grad


def permute_by_gathers(x, counts, ranks, _):
    """`sort_by_expert` as torchtitan's `_permute`."""
    return x.shape, *permute.sort_by_expert(x, counts, ranks, torchtitan.TOKEN_GROUP_ALIGN_SIZE_M)


def unpermute_by_gathers(out, _, index):
    return permute.sort_back(out, index)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alignment", [8, 16, 128])
@pytest.mark.parametrize("counts", COUNTS)
def test_gathers_equal_torchtitans_permutation(monkeypatch, counts, alignment, dtype):
    monkeypatch.setattr(torchtitan, "TOKEN_GROUP_ALIGN_SIZE_M", alignment)
    arguments = COUNTS[counts], alignment, dtype
    want = both_ways(torchtitan._permute, torchtitan._unpermute, *arguments)
    got = both_ways(permute_by_gathers, unpermute_by_gathers, *arguments)
    names = ("tokens", "sizes", "permuted", "gradient", "unpermuted", "its gradient")
    for name, a, b in zip(names, got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name
    tokens, _, rows, _, _, g = got
    assert (tokens < 0).any()
    assert not rows[tokens < 0].any() and not g[tokens < 0].any()


def test_opcheck():
    counts = torch.tensor([5, 9, 6, 0])
    places = torch.ops.titan_fp8.places_of_tokens.default
    torch.library.opcheck(places, (counts, 2, 2, 20, 64, 16))
    index = torch.tensor([4, 0, 2])
    torch.library.opcheck(torch.ops.titan_fp8.invert_index.default, (index, 6))
    assert torch.ops.titan_fp8.invert_index(index, 6).tolist() == [1, -1, 2, -1, 0, -1]


@pytest.mark.parametrize("experts", [1, 4, 256, 257, 32768, 32769])
def test_slots_are_sorted_by_expert(experts):
    chosen = torch.randint(experts, (100, 6))
    chosen[3, 2:5] = experts - 1
    slots = permute.slots_by_expert(chosen, experts)
    assert torch.equal(slots, chosen.flatten().argsort(stable=True))


def test_nothing_but_indices_is_kept_for_backward():
    kept = []
    x = torch.randn(20, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        rows, index, _ = permute.sort_by_expert(x, torch.tensor([5, 9, 6, 0]), 2, 8)
        permute.sort_back(rows, index)
    assert len(kept) == 2 and not any(t.is_floating_point() for t in kept)


class Experts(nn.Module):
    """Stands for experts: row by row, differentiable, and different for each expert."""

    def forward(self, x, num_tokens_per_expert):
        expert = torch.arange(len(num_tokens_per_expert)).repeat_interleave(num_tokens_per_expert)
        return (x.float() * (1 + expert[:, None])).sin().type_as(x)


class HalfOfTheTokens(nn.Module):
    """torchtitan's sequence parallelism on the second of two ranks: it reorders half the tokens."""

    def __init__(self, reorderer):
        super().__init__()
        self.reorderer = reorderer

    def forward(self, scores, chosen):
        half = len(scores) // 2
        sorted_scores, slots, counts = self.reorderer(scores[half:], chosen[half:])
        return sorted_scores, slots + len(slots), counts


def moe_layer(dtype: torch.dtype, **args) -> MoE:
    torch.manual_seed(0)
    layer = MoE(MoEArgs(num_experts=8, **args), dim=32, hidden_dim=16)
    layer.experts = Experts()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layer.to(dtype)


def results(layer: MoE, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype))
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    tokens = {"tokens_per_expert": layer.tokens_per_expert}
    return {"out": out.detach(), "x": x.grad, **gradients, **tokens}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("half", [False, True], ids=["all", "half"])
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_a_layer_by_gathers_equals_torchtitans(top_k, before, shared, half, dtype):
    args = {"top_k": top_k, "score_before_experts": before, "num_shared_experts": shared}
    layers = [moe_layer(dtype, **args) for _ in range(2)]
    assert moe.route_by_gathers(nn.ModuleList(layers[1:])) == layers[1:]
    assert not moe.route_by_gathers(nn.ModuleList(layers[1:]))
    for layer in layers if half else ():
        layer.reorderer = HalfOfTheTokens(layer.reorderer)
    x = torch.randn(2, 20, 32, dtype=dtype)
    want, got = (results(layer, x) for layer in layers)
    assert got.keys() == want.keys() and want["router.gate.weight"].any()
    for name in want:
        assert got[name].dtype == want[name].dtype
        if top_k <= 2 and not before:
            # A sum of two has one order; for the scores both take a batched product.
            assert torch.equal(got[name], want[name]), name
        else:
            error = (got[name] - want[name]).norm() / want[name].norm()
            # torchtitan rounds x's gradient after each summand.
            assert error < (1e-2 if dtype == torch.bfloat16 else 1e-6), (name, error)


@pytest.mark.parametrize("compiled", [False, True])
def test_torchtitans_reorderer_does_not_run(compiled):
    layer = moe_layer(torch.float32, top_k=2, num_shared_experts=0)
    moe.route_by_gathers(nn.ModuleList([layer]))
    if compiled:
        layer.reorderer = torch.compile(layer.reorderer, backend="eager")
    calls = []
    hook = layer.reorderer.register_forward_pre_hook(lambda *args: calls.append(args))
    layer(torch.randn(1, 20, 32))
    assert calls
    hook.remove()
    original = getattr(layer.reorderer, "_orig_mod", layer.reorderer)
    original.forward = None
    layer(torch.randn(1, 20, 32))


def test_a_layer_keeps_its_rows_once_and_not_in_fp32():
    layer = moe_layer(torch.bfloat16, top_k=2, score_before_experts=False, num_shared_experts=0)
    moe.route_by_gathers(nn.ModuleList([layer]))
    layer.experts = nn.Identity()
    layer.experts.forward = lambda x, counts: x
    kept = []
    x = torch.randn(1, 20, 32, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        layer(x)
    assert [t.dtype for t in kept if t.numel() == 2 * x.numel()] == [torch.bfloat16]


def exchange_both_ways(rank: int) -> None:
    """On one of two ranks: rows for the other one, some, all and none, with gradients."""
    group = dist.group.WORLD
    counts = torch.arange(8) + 10 * rank
    want = functional.all_to_all_single(counts, None, None, group=group)
    got, splits = all_to_all.exchange_counts(counts, group)
    assert type(got) is Tensor and torch.equal(got, want)
    assert splits == [each.view(2, -1).sum(1).tolist() for each in (counts, got)]
    for sent in ([[5, 3], [0, 2]], [[0, 0], [4, 0]], [[0, 7], [7, 0]], [[0, 0], [0, 0]]):
        mine, theirs = sent[rank], [sizes[rank] for sizes in sent]
        x = torch.randn(sum(mine), 3)
        results = []
        ours = all_to_all.ExchangeRows.apply
        for exchange, where in (
            (functional.all_to_all_single_autograd, group),
            (ours, group.group_name),
        ):
            leaf = x.clone().requires_grad_()
            out = exchange(leaf, theirs, mine, where)
            assert isinstance(out, functional.AsyncCollectiveTensor)
            g = torch.randn(3, len(out), generator=torch.Generator().manual_seed(rank)).t()
            (1 * out).backward(g)  # The gradient is not contiguous.
            results.append((out.detach(), leaf.grad))
        assert all(map(torch.equal, *results))


def test_tokens_are_exchanged_as_by_pytorch():
    gloo.spawn(exchange_both_ways, 2)


def train_both_ways(rank: int, folder: Path, text: Path, recipe: str, *flags: str) -> None:
    """On one of two ranks: two steps are the same with and without what is not FP8."""
    folder = folder / str(rank)
    folder.mkdir()
    # On torch 2.13 op-level checkpoints of experts fail without the rest of the speed-ups.
    ways = [(f"--{GROUPED_MM}.permutation", way) for way in ("host", "gather")]
    if "op" not in flags:
        ways = [(f"--{LINEAR}.host_speedups", way) for way in ("False", "True")]
    flags = (*training(text, folder), "--debug.deterministic", f"--{LINEAR}.recipe", recipe, *flags)
    flags += ("--parallelism.expert_parallel_degree", 2)
    results = []
    for key in ways:
        with trainer(parse(folder, toml("deepseek_v3", BOTH), *flags, *key)) as t:
            results.append([loss_and_gradients(t, 0), loss_and_gradients(t, 1)])
            layers = t.model_parts[0].layers.values()
            blocks = [getattr(block, "_checkpoint_wrapped_module", block) for block in layers]
            kinds = {type(block.moe) for block in blocks if block.moe_enabled}
        replaced = key == ways[1]
        for name in ("token_dispatch", "token_combine"):
            method = getattr(expert_parallel.ExpertParallel, f"_{name}")
            assert replaced == (method is getattr(token_exchange, name))
        assert kinds == {moe.GatherMoE if replaced else MoE}
    for torchtitans, by_gathers in zip(*results, strict=True):
        assert torchtitans.keys() == by_gathers.keys()
        different = [n for n in torchtitans if not torch.equal(torchtitans[n], by_gathers[n])]
        assert not different


@pytest.mark.parametrize(
    "recipe, flags",
    [
        ("bf16", ()),
        ("blockwise", CHECKPOINTING["op"]),
    ],
)
def test_training_does_not_change(tmp_path, text, recipe, flags):
    gloo.spawn(train_both_ways, 2, tmp_path, text, recipe, *flags)
