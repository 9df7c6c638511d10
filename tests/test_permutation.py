"""The permutation around the experts by gathers is the host's, bit for bit, in both passes."""

from pathlib import Path

import gloo
import pytest
import torch
from titan import BOTH, GROUPED_MM, LINEAR, loss_and_gradients, parse, toml, trainer, training
from torchtitan.distributed import expert_parallel
from torchtitan.models.moe import utils as host

from titan_fp8 import reference
from titan_fp8.plugin import permutation

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


def both_ways(permute, unpermute, counts: list[list[int]], alignment: int, dtype: torch.dtype):
    """What leaves either function, forward and backward, with NaN where padding may not matter.

    Also the alignment's index, -1 for padding.
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alignment", [8, 16, 128])
@pytest.mark.parametrize("counts", COUNTS)
def test_gathers_are_the_hosts_permutation(monkeypatch, counts, alignment, dtype):
    monkeypatch.setattr(host, "TOKEN_GROUP_ALIGN_SIZE_M", alignment)
    arguments = COUNTS[counts], alignment, dtype
    want = both_ways(host._permute, host._unpermute, *arguments)
    got = both_ways(permutation.permute, permutation.unpermute, *arguments)
    names = ("tokens", "sizes", "permuted", "gradient", "unpermuted", "its gradient")
    for name, a, b in zip(names, got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name
    tokens, _, rows, _, _, g = got
    assert (tokens < 0).any()
    assert not rows[tokens < 0].any() and not g[tokens < 0].any()


def test_nothing_but_indices_is_kept_for_backward():
    kept = []
    x = torch.randn(20, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        shape, rows, index, _ = permutation.permute(x, torch.tensor([5, 9, 6, 0]), 2, 2)
        permutation.unpermute(rows, shape, index)
    assert len(kept) == 2 and not any(t.is_floating_point() for t in kept)


def train_both_ways(rank: int, folder: Path, text: Path, recipe: str, *flags: str) -> None:
    """On one of two ranks: a step with the host's permutation is a step with gathers."""
    folder = folder / str(rank)
    folder.mkdir()
    flags = (*training(text, folder), "--debug.deterministic", f"--{LINEAR}.recipe", recipe, *flags)
    flags += ("--parallelism.expert_parallel_degree", 2)
    results = []
    for way in ("host", "gather"):
        key = (f"--{GROUPED_MM}.permutation", way)
        with trainer(parse(folder, toml("deepseek_v3", BOTH), *flags, *key)) as t:
            results.append(loss_and_gradients(t))
        replaced = expert_parallel._permute is permutation.permute
        assert replaced == (way == "gather")
    by_host, by_gathers = results
    assert by_host.keys() == by_gathers.keys()
    different = [name for name in by_host if not torch.equal(by_host[name], by_gathers[name])]
    assert not different


@pytest.mark.parametrize(
    "recipe, flags",
    [("blockwise", ()), ("bf16", ()), ("blockwise", ("--activation_checkpoint.mode", "full"))],
)
def test_training_does_not_change(tmp_path, text, recipe, flags):
    gloo.spawn(train_both_ways, 2, tmp_path, text, recipe, *flags)
