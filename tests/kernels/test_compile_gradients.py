"""The kernel that copies gradients compiles for Hopper to wide accesses, and copies what it should.

On the CPU a function in PyTorch takes the place of the kernel, so that the launches are checked.
"""

import pytest
import torch
from compile_utils import Compiler, needs_cuobjdump
from gradient_kernel import CopyGradient

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
    assert result.sass.count("LDG.E.128") == LOADS[dtype]
    assert result.sass.count("STG.E.128") == LOADS[out_dtype]


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
