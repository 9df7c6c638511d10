"""Every configuration of the GEMM kernels compiles for Hopper unspilled."""

import pytest
import torch
from compile_utils import compile_launch, needs_cuobjdump

from titan_fp8 import reference
from titan_fp8.kernels.hopper import gemm_blockwise as gemm
from titan_fp8.kernels.hopper import gemm_rowwise as rowwise_gemm

M, N, K, E = 512, 384, 256, 2
BLOCK_SHARED = 227 * 1024
"""Bytes of shared memory that a block may have on Hopper."""


def operands(recipe: str, op: str, grouped: bool, dtype: torch.dtype) -> tuple:
    columns, rows, weight = {
        "blockwise": (
            reference.quantize_128x1_t,
            reference.quantize_1x128,
            reference.quantize_128x128,
        ),
        "rowwise": (reference.quantize_col_t, reference.quantize_row, reference.quantize_row),
    }[recipe]
    offs = torch.tensor([128, M], dtype=torch.int32) if grouped else None
    x, w = torch.zeros(M, K), torch.zeros(*([E] if grouped else []), N, K)
    if op == "mm":
        c = torch.empty(M, N, dtype=dtype)
        return *rows(x), *weight(w), c, offs
    g_t, x_t = (columns(t, offs, True) for t in (torch.zeros(M, N), x))
    return *g_t, *x_t, torch.empty(*([E] if grouped else []), N, K, dtype=dtype), offs


def assert_fit(compiled) -> None:
    print(compiled)
    assert "QGMMA" in compiled.sass and "UTMALDG" in compiled.sass
    assert compiled.spills == 0
    assert compiled.shared <= BLOCK_SHARED


@needs_cuobjdump
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "recipe, grouped",
    [("blockwise", False), ("blockwise", True), ("rowwise", True)],
    ids=["dense", "grouped", "rowwise"],
)
@pytest.mark.parametrize("op", ["mm", "wgrad"])
def test_compiles_for_hopper_without_spills(op, recipe, grouped, dtype):
    launch = getattr(rowwise_gemm if recipe == "rowwise" else gemm, f"{op}_launch")
    kernel, args, options = launch(*operands(recipe, op, grouped, dtype))
    assert_fit(compile_launch(kernel, args, **options))


def test_scales_may_come_contiguous():
    """As a hook for saved tensors gives them back."""
    a, sa, b, sb, c, offs = operands("blockwise", "wgrad", True, torch.bfloat16)
    sa.copy_(torch.rand(sa.shape)), sb.copy_(torch.rand(sb.shape))
    _, want, _ = gemm.wgrad_launch(a, sa, b, sb, c, offs)
    _, got, _ = gemm.wgrad_launch(a, sa.contiguous(), b, sb.contiguous(), c, offs)
    for place in (1, 3):
        (scale, seen_as), (wanted, wanted_as) = got[place], want[place]
        assert torch.equal(scale, wanted) and scale.stride() == wanted.stride()
        assert seen_as == wanted_as
    assert got[8:] == want[8:]


@needs_cuobjdump
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["dense", "grouped"])
def test_the_sum_of_two_products_does_too(grouped, dtype):
    *operand, c, offs = operands("blockwise", "mm", grouped, dtype)
    kernel, args, options = gemm.mm_launch(*operand, c, offs, tuple(operand))
    assert_fit(compile_launch(kernel, args, **options))
