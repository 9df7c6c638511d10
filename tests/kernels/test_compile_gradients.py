"""The kernel that sums gradients compiles for Hopper to wide accesses, and is right.

On the CPU a function in PyTorch takes the place of the kernel, so that the launches are checked.
"""

import pytest
import torch
from compile_utils import Compiler, cases, needs_cuobjdump
from gradient_kernel import SumGradients

from titan_fp8.kernels import gradients


@needs_cuobjdump
@pytest.mark.parametrize("dtype", cases(torch.float32, torch.bfloat16))
@pytest.mark.parametrize("rank, ranks", cases((0, 2), (1, 2), (3, 8)))
def test_the_sum_compiles_for_hopper_to_wide_accesses(monkeypatch, rank, ranks, dtype):
    compiled = []
    monkeypatch.setattr(
        gradients, "sum_gradients_kernel", Compiler(gradients.sum_gradients_kernel, compiled)
    )
    own, received = (torch.empty(4096 * parts, dtype=torch.bfloat16) for parts in (1, ranks - 1))
    out = torch.empty(4096, dtype=dtype)
    gradients.sum_gradients.__wrapped__(out, own, received, rank, ranks, 1 / ranks)
    (result,) = compiled
    print(result)
    assert not result.spills and not result.shared
    # Every load is wide; a loop of no iterations at all is left out.
    assert result.wide("ld") == result.ptx.count("ld.global") >= 2 * gradients.LOADS
    assert result.wide("st") == dtype.itemsize // 2 * gradients.LOADS


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
