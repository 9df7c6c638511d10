"""The transpose of FP8 compiles for Hopper: wide accesses, no shared memory, no spill."""

import pytest
import torch
from bench.shapes import DENSE, GROUPED
from compile_utils import Compiler, cases, needs_cuobjdump
from shapes import ODD_TRANSPOSE

from titan_fp8.kernels import hopper
from titan_fp8.kernels.hopper import transpose

DENSE_WEIGHT = DENSE[0][1:]
EXPERTS, _, N, K = GROUPED[0]


@needs_cuobjdump
@pytest.mark.parametrize("shape", cases(DENSE_WEIGHT, (EXPERTS, N, K), ODD_TRANSPOSE[0]), ids=str)
def test_transposes_in_registers(monkeypatch, shape):
    compiled = []
    kernel = Compiler(transpose.transpose_fp8_kernel, compiled)
    monkeypatch.setattr(transpose, "transpose_fp8_kernel", kernel)
    hopper.transpose_fp8(torch.empty(shape, dtype=torch.float8_e4m3fn, device="cpu"))
    (result,) = compiled
    print(result)
    assert (result.spills, result.shared) == (0, 0)
    assert result.wide("ld") == result.wide("st") == 16
    assert result.sass.count("PRMT") >= 8 * 16
