"""The GEMM kernels compile for Hopper unspilled."""

import re

import pytest
import torch
from bench.shapes import DENSE, GROUPED, uneven_ends
from compile_utils import Compiler, cases, compile_launch, needs_cuobjdump

from titan_fp8.kernels.hopper import gemm, gemm_bf16

ops = torch.ops.titan_fp8
CASES = [(r, tokens) for r in ("blockwise", "rowwise") for tokens in ("grouped", "dense")]
BLOCK_SHARED = 227 * 1024
"""Bytes of shared memory that a block may have on Hopper."""


def operands(recipe: str, op: str, grouped: bool, dtype: torch.dtype) -> tuple:
    """What a launch takes, at the size of a real layer; the values are whatever is in memory."""
    columns, rows, weight = {
        "blockwise": (ops.quantize_128x1_t, ops.quantize_1x128, ops.quantize_128x128),
        "rowwise": (ops.quantize_col_t, ops.quantize_row, ops.quantize_row),
    }[recipe]
    if grouped:
        experts, m, n, k = GROUPED[0]
        offs, lead = uneven_ends(experts, m, 128), (experts,)
    else:
        (m, n, k), offs, lead = DENSE[0], None, ()
    g, x, w = (torch.empty(shape, device="meta") for shape in ((m, n), (m, k), (*lead, n, k)))
    if op == "mm":
        return *memory(rows(x)), *memory(weight(w)), torch.empty(m, n, dtype=dtype), offs
    ends = offs if offs is None else offs.to("meta")
    g_t, x_t = (memory(columns(t, ends, True)) for t in (g, x))
    return *g_t, *x_t, torch.empty(*lead, n, k, dtype=dtype), offs


def memory(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Tensors on the CPU like these on the meta device."""
    return tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in outputs)


def assert_fit(compiled) -> None:
    print(compiled)
    assert re.search(r"wgmma\.mma_async\S*\.e4m3\.e4m3", compiled.ptx)
    assert "cp.async.bulk.tensor" in compiled.ptx
    assert compiled.spills == 0
    assert compiled.shared <= BLOCK_SHARED


@needs_cuobjdump
@pytest.mark.parametrize("recipe, tokens", cases(*CASES))
@pytest.mark.parametrize("op, dtype", [("mm", torch.bfloat16), ("wgrad", torch.float32)])
def test_compiles_for_hopper_without_spills(op, recipe, tokens, dtype):
    """With the dtypes of FSDP2's mixed precision."""
    launch = getattr(gemm, f"{op}_launch")
    given = operands(recipe, op, tokens == "grouped", dtype)
    kernel, args, options = launch(*given, rowwise=recipe == "rowwise")
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
@pytest.mark.parametrize("tokens", cases("grouped", "dense"))
def test_the_sum_of_two_products_does_too(tokens):
    *operand, c, offs = operands("blockwise", "mm", tokens == "grouped", torch.bfloat16)
    kernel, args, options = gemm.mm_launch(*operand, c, offs, tuple(operand))
    assert_fit(compile_launch(kernel, args, **options))


@needs_cuobjdump
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_zeros_of_empty_groups_are_wide_stores(monkeypatch, dtype):
    """Of bf16_wgrad, whose products are PyTorch's."""
    compiled = []
    kernel = Compiler(gemm_bf16.zero_empty_groups_kernel, compiled)
    monkeypatch.setattr(gemm_bf16, "zero_empty_groups_kernel", kernel)
    g, x = torch.zeros(64, 32).bfloat16(), torch.zeros(64, 48).bfloat16()
    dw = gemm_bf16.bf16_wgrad(g, x, torch.tensor([32, 32, 64], dtype=torch.int32), out_dtype=dtype)
    assert dw.shape == (3, 32, 48) and dw.dtype == dtype
    (result,) = compiled
    print(result)
    assert (result.spills, result.shared) == (0, 0)
    assert result.wide("st") == gemm_bf16.CHUNK // (4 * 32 * gemm_bf16.WARPS)
