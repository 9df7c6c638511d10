"""The blockwise quantizers with power-of-two scales compile for Hopper without a spill."""

import pytest
import torch
from bench.shapes import GROUPED, QUANTIZE, uneven_ends
from compile_utils import Compiler, cases, needs_cuobjdump

from titan_fp8.kernels import hopper
from titan_fp8.kernels.hopper import quantize_blockwise, swiglu_quantize

OFFS = uneven_ends(*GROUPED[0][:2], 128)
OPS = {
    "quantize_1x128_128x1_t": lambda op, x, **options: op(x, OFFS, **options),
    "quantize_1x128": lambda op, x, **options: op(x, **options),
    "quantize_128x128": lambda op, x, **options: op(x, **options),
    "quantize_128x128_t": lambda op, x, **options: op(x, **options),
    "quantize_128x1_t": lambda op, x, **options: op(x, OFFS, **options),
    "swiglu_backward_1x128_128x1_t": lambda op, x, **options: op(x, x, x, OFFS, **options),
    "swiglu_1x128": lambda op, x, **options: op(x, x, **options),
}


@needs_cuobjdump
@pytest.mark.parametrize("name", cases(*OPS))
def test_power_of_two_scales(monkeypatch, name):
    compiled = []
    for module in (quantize_blockwise, swiglu_quantize):
        for kernel, function in vars(module).copy().items():
            if kernel.endswith("_kernel"):
                monkeypatch.setattr(module, kernel, Compiler(function, compiled))
    for scale_fmt in ("fp32", "ue8m0"):
        x = torch.empty(QUANTIZE[0], dtype=torch.bfloat16)
        OPS[name](getattr(hopper, name), x, scale_fmt=scale_fmt)
    exact, power = compiled
    print(power)
    assert exact.name == power.name and power.spills == 0, str(power)
    # Neither the name nor the options of a kernel tell its format: the code itself differs.
    assert power.cubin != exact.cubin
