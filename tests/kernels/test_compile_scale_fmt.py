"""The blockwise quantizers with power-of-two scales compile for Hopper without a spill."""

import torch
from bench.shapes import GROUPED, QUANTIZE, uneven_ends
from compile_utils import Compiler, needs_cuobjdump

from titan_fp8.kernels.hopper import quantize_blockwise, swiglu_quantize

OFFS = uneven_ends(*GROUPED[0][:2], 128)


def record_kernels(patch, results: list) -> None:
    """Compiles kernels instead of launching them."""
    for module in (quantize_blockwise, swiglu_quantize):
        for name, kernel in vars(module).copy().items():
            if name.endswith("_kernel"):
                patch.setattr(module, name, Compiler(kernel, results))


@needs_cuobjdump
def test_power_of_two_scales(monkeypatch):
    compiled = {"fp32": [], "ue8m0": []}
    for scale_fmt, results in compiled.items():
        with monkeypatch.context() as patch:
            record_kernels(patch, results)
            x = torch.empty(QUANTIZE[0], dtype=torch.bfloat16)
            quantize_blockwise.quantize_1x128(x, scale_fmt=scale_fmt)
            quantize_blockwise.quantize_128x128(x, scale_fmt=scale_fmt)
            quantize_blockwise.quantize_128x128_t(x, scale_fmt=scale_fmt)
            quantize_blockwise.quantize_128x1_t(x, OFFS, scale_fmt=scale_fmt)
            quantize_blockwise.quantize_1x128_128x1_t(x, OFFS, scale_fmt=scale_fmt)
            swiglu_quantize.swiglu_backward_1x128_128x1_t(x, x, x, OFFS, scale_fmt=scale_fmt)
            swiglu_quantize.swiglu_1x128(x, x, scale_fmt=scale_fmt)
    print(*compiled["ue8m0"], sep="\n")
    assert len(compiled["fp32"]) == len(compiled["ue8m0"]) == 7
    for exact, power in zip(compiled["fp32"], compiled["ue8m0"], strict=True):
        assert exact.name == power.name and power.spills == 0, str(power)
        # Neither the name nor the options of a kernel tell its format: the code itself differs.
        assert power.cubin != exact.cubin
