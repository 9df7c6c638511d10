"""The SwiGLU kernels compile for Hopper without a spill; two backward programs fit on an SM.

The tests print registers (`pytest -s`).
"""

import pytest
import torch
from bench.shapes import GROUPED, SWIGLU, uneven_ends
from compile_utils import Compiler, needs_cuobjdump
from shapes import ODD_SWIGLU

from titan_fp8.kernels.hopper import swiglu_quantize as swiglu

OFFS = uneven_ends(*GROUPED[0][:2], 128)
GROUPS = {"dense": (), "aligned": (OFFS, True), "unaligned": (OFFS, False)}
SHARED = 228 * 1024 // 2 - 1024
"""Bytes of shared memory for each of two programs on an SM."""

SHAPES = [shape for shape in (*SWIGLU, *ODD_SWIGLU) if shape[0]]


@pytest.fixture
def compiled(monkeypatch):
    """Collects what the ops of a test compile."""
    results = []
    for name in ("swiglu_forward_kernel", "swiglu_backward_kernel", "swiglu_dscores_kernel"):
        monkeypatch.setattr(swiglu, name, Compiler(getattr(swiglu, name), results))
    return results


@needs_cuobjdump
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(compiled, shape):
    x = torch.empty(shape, dtype=torch.bfloat16)
    swiglu.swiglu_1x128(x, x)
    (kernel,) = compiled
    print(kernel)
    assert kernel.spills == 0, str(kernel)


@needs_cuobjdump
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_of_scores(compiled, shape):
    x = torch.empty(shape, dtype=torch.bfloat16)
    for before in (False, True):
        swiglu.swiglu_dscores(x, x, x, torch.empty(len(x)), before)
    print(*compiled, sep="\n")
    for kernel in compiled:
        assert kernel.spills == 0, str(kernel)
        if shape[1] % 32 == 0:
            assert kernel.wide("ld") == 3 * 4


@needs_cuobjdump
@pytest.mark.parametrize(
    "groups, shape",
    [("dense", SWIGLU[0]), ("aligned", SWIGLU[0]), *(("unaligned", shape) for shape in SHAPES)],
    ids=str,
)
def test_backward(compiled, groups, shape):
    x = torch.empty(shape, dtype=torch.bfloat16)
    swiglu.swiglu_backward_1x128_128x1_t(x, x, x, *GROUPS[groups])
    (kernel,) = compiled
    print(kernel)
    assert kernel.spills == 0, str(kernel)
    assert kernel.registers <= 128 and kernel.shared <= SHARED, str(kernel)
    # One exponential for each of a thread's 64 channels: σ is evaluated once.
    assert kernel.sass.count("MUFU.EX2") == 64
    if shape[1] % 32 == 0:  # Rows are then 16-byte aligned in 32-bit words, as Triton sees them.
        assert kernel.sass.count("LDGSTS.E.BYPASS.128") == 24
        # Rows of da and db, then columns of h, da and db, with 16 bytes per thread each time.
        assert kernel.sass.count("STG.E.128") == 8 + 12
