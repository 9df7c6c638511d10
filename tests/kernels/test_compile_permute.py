"""The permutation kernels compile for Hopper, with wide loads and stores, without a barrier."""

import pytest
import torch
from compile_utils import Compiler, cases, needs_cuobjdump
from shapes import ODD_ROW_LENGTHS, RANKS_AND_EXPERTS

from titan_fp8.kernels import permute


@needs_cuobjdump
@pytest.mark.parametrize(
    "k, dtype",
    cases(
        (2048, torch.bfloat16),
        (2048, torch.float32),
        (ODD_ROW_LENGTHS[0], torch.bfloat16),
        (ODD_ROW_LENGTHS[-1], torch.bfloat16),
    ),
    ids=str,
)
def test_compiles_for_hopper_to_wide_accesses(monkeypatch, k, dtype):
    compiled, top = [], 6
    for name in ("permute_gather_kernel", "permute_combine_kernel", "permute_dot_kernel"):
        monkeypatch.setattr(permute, name, Compiler(getattr(permute, name), compiled))
    x, index = torch.empty(64, k, dtype=dtype), torch.zeros(20, top, dtype=torch.int32)
    for weight in (None, torch.zeros(20, top)):
        permute.gather_rows(x, index.flatten(), weight, top)
        permute.combine_rows(x, index, weight)
        permute.dot_rows(x[:20], x, index)
    print(*compiled, sep="\n")
    assert not any(result.spills or result.shared for result in compiled)
    copies, summands = (permute.COPY_LOADS, permute.SUM_LOADS) if k % 8 == 0 else (0, 0)
    accesses = [(r.name, r.wide("ld"), r.wide("st")) for r in compiled]
    assert accesses == 2 * [
        ("permute_gather_kernel", copies, copies),
        ("permute_combine_kernel", top * summands, summands),
        ("permute_dot_kernel", 2 * summands, 0),
    ]


@needs_cuobjdump
@pytest.mark.parametrize("ranks, experts", cases(*RANKS_AND_EXPERTS))
def test_indices_compile_for_hopper_without_spills(monkeypatch, ranks, experts):
    compiled = []
    monkeypatch.setattr(
        permute, "permute_places_kernel", Compiler(permute.permute_places_kernel, compiled)
    )
    counts = torch.zeros(ranks * experts, dtype=torch.int64)
    permute.places_of_tokens(counts, experts, ranks, 0, 128 * experts, 128)
    print(*compiled)
    assert [result.spills for result in compiled] == [0]
