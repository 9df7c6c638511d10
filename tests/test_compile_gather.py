"""The gather of rows compiles for Hopper to a copy: wide loads and stores, no spill, no barrier."""

import pytest
import torch
from compile_utils import compile_launch, needs_cuobjdump

from titan_fp8.kernels import gather


@needs_cuobjdump
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("k", [64, 2048, 2056, 7168, 2049])
def test_compiles_for_hopper_to_a_copy(monkeypatch, k, dtype):
    compiled = []

    class Compiler:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: compiled.append(compile_launch(kernel, args, **kwargs))

    kernel = gather._gather_kernel
    monkeypatch.setattr(gather, "_gather_kernel", Compiler())
    gather.gather_rows(torch.empty(64, k, dtype=dtype), torch.zeros(100, dtype=torch.int32))
    (copy,) = compiled
    print(copy)
    assert copy.spills == 0 and copy.shared == 0
    wide = gather.LOADS if k % 8 == 0 else 0
    assert copy.sass.count("LDG.E.128") == copy.sass.count("STG.E.128") == wide
