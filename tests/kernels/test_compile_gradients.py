"""The kernels that copy and sum gradients compile for Hopper to wide accesses, and are right.

On the CPU functions in PyTorch take the place of the kernels, so that the launches are checked.
"""

import pytest
import torch
from compile_utils import Compiler, needs_cuobjdump
from gradient_kernel import CopyGradient, SumGradients

from titan_fp8.kernels import gradients

LOADS = {torch.bfloat16: gradients.LOADS, torch.float32: 2 * gradients.LOADS}
"""16-byte accesses of a thread."""


@needs_cuobjdump
@pytest.mark.parametrize("dtype", LOADS, ids=str)
@pytest.mark.parametrize("out_dtype", LOADS, ids=str)
def test_compiles_for_hopper_to_wide_accesses(monkeypatch, dtype, out_dtype):
    compiled = []
    compiler = Compiler(gradients.copy_gradient_kernel, compiled)
    monkeypatch.setattr(gradients, "copy_gradient_kernel", compiler)
    buffer = torch.empty(64 * 48, dtype=out_dtype)
    gradients.copy_gradients.__wrapped__(buffer, 2, torch.empty(64, 48, dtype=dtype))
    (result,) = compiled
    print(result)
    assert not result.spills and not result.shared
    assert result.wide("ld") == LOADS[dtype]
    assert result.wide("st") == LOADS[out_dtype]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_each_rank_gets_its_rows_of_every_gradient(monkeypatch, ranks):
    monkeypatch.setattr(gradients, "copy_gradient_kernel", CopyGradient())
    shapes = [(8, 4099), (16,), (8, 3, 5)]
    grads = [torch.randn(shape).bfloat16() for shape in shapes]
    buffer = torch.full((sum(g.numel() for g in grads),), float("nan"))
    assert gradients.copy_gradients.__wrapped__(buffer, ranks, *grads) == ()
    chunks = [g.chunk(ranks) for g in grads]
    expected = [c[rank].flatten() for rank in range(ranks) for c in chunks]
    assert torch.equal(buffer, torch.cat(expected).float())


@needs_cuobjdump
@pytest.mark.parametrize("rank, ranks", [(0, 2), (1, 2), (3, 8)])
def test_the_sum_compiles_for_hopper_to_wide_accesses(monkeypatch, rank, ranks):
    compiled = []
    monkeypatch.setattr(
        gradients, "sum_gradients_kernel", Compiler(gradients.sum_gradients_kernel, compiled)
    )
    own, received = (torch.empty(4096 * parts, dtype=torch.bfloat16) for parts in (1, ranks - 1))
    out = torch.empty(4096)
    gradients.sum_gradients.__wrapped__(out, own, received, rank, ranks, 1 / ranks)
    (result,) = compiled
    print(result)
    assert not result.spills and not result.shared
    # Every load is wide; a loop of no iterations at all is left out.
    assert result.wide("ld") == result.ptx.count("ld.global") >= 2 * gradients.LOADS
    assert result.wide("st") == 2 * gradients.LOADS


@pytest.mark.parametrize("rank, ranks, size", [(0, 2, 1), (1, 2, 4096), (2, 5, 4099)])
def test_the_parts_of_all_ranks_are_added_in_their_order(monkeypatch, rank, ranks, size):
    monkeypatch.setattr(gradients, "sum_gradients_kernel", SumGradients())
    parts = torch.randn(ranks, size).bfloat16()
    others = torch.cat([parts[:rank], parts[rank + 1 :]]).flatten()
    out = torch.full((size,), float("nan"))
    assert gradients.sum_gradients.__wrapped__(out, parts[rank], others, rank, ranks, 1 / 3) == ()
    expected = torch.zeros(size)
    for part in parts:
        expected += part.float() * (1 / 3)
    assert torch.equal(out, expected)
