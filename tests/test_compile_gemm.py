"""Every configuration of the GEMM kernels, and of what zeroes, compiles for Hopper unspilled."""

import pytest
import torch
from compile_utils import compile_launch, needs_cuobjdump

from titan_fp8 import reference
from titan_fp8.kernels import rowwise_gemm
from titan_fp8.kernels.gemm import mm_launch, wgrad_launch

M, N, K, E = 512, 384, 256, 2
BLOCK_SHARED = 227 * 1024
"""Bytes of shared memory that a block may have on Hopper."""


def operands(op: str, grouped: bool, dtype: torch.dtype) -> tuple:
    offs = torch.tensor([128, M], dtype=torch.int32) if grouped else None
    x, w = torch.zeros(M, K), torch.zeros(*([E] if grouped else []), N, K)
    if op == "mm":
        c = torch.empty(M, N, dtype=dtype)
        return *reference.quantize_1x128(x), *reference.quantize_128x128(w), c, offs
    g_t, x_t = (reference.quantize_128x1_t(t, offs, True) for t in (torch.zeros(M, N), x))
    return *g_t, *x_t, torch.empty(*([E] if grouped else []), N, K, dtype=dtype), offs


@needs_cuobjdump
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["dense", "grouped"])
@pytest.mark.parametrize("op", ["mm", "wgrad"])
def test_compiles_for_hopper_without_spills(op, grouped, dtype):
    launch = mm_launch if op == "mm" else wgrad_launch
    kernel, args, options = launch(*operands(op, grouped, dtype))
    compiled = compile_launch(kernel, args, **options)
    print(compiled)
    assert "QGMMA" in compiled.sass and "UTMALDG" in compiled.sass
    assert compiled.spills == 0
    assert compiled.shared <= BLOCK_SHARED


@needs_cuobjdump
def test_zeroing_compiles():
    y, ends = torch.empty(M, N, dtype=torch.bfloat16), torch.tensor([128, M])
    behind = compile_launch(rowwise_gemm._zero_behind, (y, ends, M * N, N, E), BLOCK=4096)
    empty = compile_launch(rowwise_gemm._zero_empty, (y, ends, N * K), BLOCK=4096)
    assert behind.spills == empty.spills == 0
