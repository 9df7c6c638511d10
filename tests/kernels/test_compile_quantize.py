"""Every quantiser kernel, in each configuration in use, compiles for Hopper without a spill.

The tests call the ops on CPU tensors with launches replaced by compilations, so they compile
exactly what would run. They print registers (`pytest -s`).
"""

import pytest
import torch
from compile_utils import Compiler, needs_cuobjdump

from titan_fp8.kernels import hopper
from titan_fp8.kernels.hopper import (
    quantize_blockwise,
    quantize_rowwise,
    quantize_rowwise_columns,
    quantize_rowwise_one_pass,
)

MODULES = (
    quantize_blockwise,
    quantize_rowwise,
    quantize_rowwise_columns,
    quantize_rowwise_one_pass,
)
DTYPES = [torch.bfloat16, torch.float32]
OFFS = torch.tensor([128, 256], dtype=torch.int32)
GROUPS = {"dense": (), "aligned": (OFFS, True), "unaligned": (OFFS, False)}
ROW_COLUMNS = [2048, 7168, 14336, 18432, 65536, 131072]


@pytest.fixture
def compiled(monkeypatch):
    """Collects what the ops of a test compile."""
    monkeypatch.setattr(quantize_rowwise_one_pass, "multiprocessors", lambda device: 132)
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
@pytest.mark.parametrize("groups", GROUPS)
def test_tokens(compiled, groups, dtype):
    x = torch.empty(256, 2048, dtype=dtype)
    hopper.quantize_128x1_t(x, *GROUPS[groups])
    hopper.quantize_1x128_128x1_t(x, *GROUPS[groups])
    hopper.quantize_col_t(x, *GROUPS[groups])
    hopper.quantize_row_col_t(x, *GROUPS[groups])
    # Rows too long for the kernel that takes maxima have one of their own.
    wide = torch.empty(256, 40960 // dtype.itemsize, dtype=dtype)
    hopper.quantize_row_col_t(wide, *GROUPS[groups])
    # Columns without groups take one kernel, columns of groups two.
    assert_unspilled(compiled, 7 if groups == "dense" else 9)


@needs_cuobjdump
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_and_rows(compiled, dtype):
    w = torch.empty(2, 256, 512, dtype=dtype)
    hopper.quantize_128x128(w)
    hopper.quantize_128x128_t(w)
    hopper.quantize_weight_col_t(w)
    hopper.quantize_weight_col_t(torch.empty(1, 131072, 16, dtype=dtype))
    hopper.quantize_weight_col_t(w[..., :272].contiguous())
    hopper.quantize_1x128(w[0])
    assert_unspilled(compiled, 7)
    for kernel in compiled:
        if kernel.name == "quantize_columns_one_pass_kernel":
            assert kernel.registers <= quantize_rowwise_one_pass.MAXNREG, str(kernel)
            assert 5 * (kernel.shared + 1024) <= 228 * 1024, str(kernel)


@needs_cuobjdump
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_lengths(compiled, dtype):
    for columns in ROW_COLUMNS:
        hopper.quantize_row(torch.empty(16, columns, dtype=dtype))
    hopper.quantize_row_col_t(torch.empty(16, 32768 // dtype.itemsize, dtype=dtype))
    assert_unspilled(compiled, len(ROW_COLUMNS) + 2)


@needs_cuobjdump
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_accesses_and_room_for_192_kib_of_tiles(compiled, dtype):
    """Tiles are loaded and columns stored with 16 bytes per thread, rows in whole lines."""
    x = torch.empty(256, 2048, dtype=dtype)
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
        # A program has half of its tile in registers, and later half of that for a skipped tile.
        in_registers = kernel.name == "quantize_columns_one_pass_kernel"
        assert sass.count("LDGSTS.E.BYPASS.128") == loads * (5 if in_registers else 2) / 2
        assert sass.count("STG.E.128") == columns * (5 if in_registers else 2) / 2, str(kernel)
        if kernel.name == "quantize_128x1_t_kernel":
            assert sass.count("STG.E.64") == rows
        assert "STG.E.U8" not in sass
        tile = 65536 if dtype == torch.float32 and not in_registers else 32768
        assert (192 * 1024 // tile) * (kernel.shared + 1024) <= 228 * 1024, str(kernel)
