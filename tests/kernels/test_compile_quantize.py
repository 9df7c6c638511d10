"""Every quantizer kernel, in each configuration in use, compiles for Hopper without a spill.

The tests call the ops on CPU tensors with launches replaced by compilations, so they compile
exactly what would run. They print registers (`pytest -s`).
"""

import pytest
import torch
from bench.shapes import GROUPED, LINEAR, QUANTIZE, QUANTIZE_WEIGHTS, uneven_ends
from compile_utils import Compiler, cases, needs_cuobjdump
from shapes import LONG_ROWS, ODD_WEIGHTS

from titan_fp8.kernels import hopper
from titan_fp8.kernels.hopper import (
    quantize_blockwise,
    quantize_rowwise,
    quantize_rowwise_columns,
)

MODULES = (
    quantize_blockwise,
    quantize_rowwise,
    quantize_rowwise_columns,
)
DTYPES = cases(torch.bfloat16, torch.float32)
OFFS = uneven_ends(*GROUPED[0][:2], 128)
GROUPS = {"unaligned": (OFFS, False), "aligned": (OFFS, True), "dense": ()}
ROWS = sorted({columns for shape in LINEAR for columns in shape[1:]} | set(LONG_ROWS))
"""Row lengths: the kernels of rows have a layout for each power of two."""
LONGEST_ROW = 4 * quantize_rowwise_columns.ROW_AMAX_WORDS
"""Bytes of the longest row that the kernel that takes maxima holds."""


@pytest.fixture
def compiled(monkeypatch):
    """Collects what the ops of a test compile."""
    results = []
    for module in MODULES:
        for name, kernel in vars(module).copy().items():
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Compiler(kernel, results))
    return results


def assert_unspilled(compiled: list, launches: int) -> None:
    print(*compiled, sep="\n")
    assert len(compiled) == launches
    for kernel in compiled:
        assert kernel.spills == 0, str(kernel)


@needs_cuobjdump
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("groups", cases(*GROUPS))
@pytest.mark.parametrize("shape", cases(*QUANTIZE, (QUANTIZE[1][0], LONG_ROWS[1])), ids=str)
def test_tokens(compiled, shape, groups, dtype):
    x = torch.empty(shape, dtype=dtype)
    hopper.quantize_128x1_t(x, *GROUPS[groups])
    hopper.quantize_1x128_128x1_t(x, *GROUPS[groups])
    hopper.quantize_col_t(x, *GROUPS[groups])
    assert_unspilled(compiled, 4)
    hopper.quantize_row_col_t(x, *GROUPS[groups])
    # Rows too long for the kernel that takes maxima have a kernel of their own.
    long = shape[1] * dtype.itemsize > LONGEST_ROW
    assert_unspilled(compiled[4:], 3 if long else 2)


@needs_cuobjdump
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", cases(*QUANTIZE_WEIGHTS, *ODD_WEIGHTS), ids=str)
def test_weights(compiled, shape, dtype):
    w = torch.empty(shape, dtype=dtype)
    hopper.quantize_128x128(w)
    hopper.quantize_128x128(w, torch.bfloat16)
    hopper.quantize_128x128_t(w)
    hopper.quantize_weight_col_t(w)
    assert_unspilled(compiled, 5)


@needs_cuobjdump
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_lengths(compiled, dtype):
    for columns in ROWS:
        hopper.quantize_row(torch.empty(16, columns, dtype=dtype))
        hopper.quantize_1x128(torch.empty(16, columns, dtype=dtype))
    hopper.quantize_row_col_t(torch.empty(16, LONGEST_ROW // dtype.itemsize, dtype=dtype))
    assert_unspilled(compiled, 2 * len(ROWS) + 2)


@needs_cuobjdump
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_accesses_and_room_for_192_kib_of_tiles(compiled, dtype):
    """Tiles are loaded and columns stored with 16 bytes per thread, rows in whole lines."""
    x = torch.empty(QUANTIZE[1], dtype=dtype)
    hopper.quantize_1x128_128x1_t(x)
    hopper.quantize_128x128_t(x)
    hopper.quantize_col_t(x, OFFS, True)
    hopper.quantize_weight_col_t(x)
    bytes_of = {2: (16, 8, 16), 4: (16, 4, 0)}
    loads, columns, rows = bytes_of[dtype.itemsize]
    for kernel in compiled:
        if kernel.name == "quantize_column_amax_kernel":
            continue
        sass = kernel.sass
        assert sass.count("LDGSTS.E.BYPASS.128") == loads
        assert sass.count("STG.E.128") == columns, str(kernel)
        if kernel.name == "quantize_128x1_t_kernel":
            assert sass.count("STG.E.64") == rows
        assert "STG.E.U8" not in sass
        tile = 65536 if dtype == torch.float32 else 32768
        assert (192 * 1024 // tile) * (kernel.shared + 1024) <= 228 * 1024, str(kernel)
