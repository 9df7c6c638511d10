"""Errors of the functional API name the argument, its value and what is allowed."""

import re

import pytest
import torch
from numerics import F16, F32, F64

from titan_fp8 import (
    convert_experts,
    convert_linears,
    fp8_grouped_mm,
    fp8_linear,
    quantize_weight,
)
from titan_fp8.functional.swiglu import fp8_swiglu


def linear(x=(4, 32), w=(16, 32), bias=None, dtypes=(torch.float32,) * 3, **options):
    tensors = [
        torch.ones(s, dtype=d) if isinstance(s, tuple) else s for s, d in zip((x, w, bias), dtypes)
    ]
    return lambda: fp8_linear(*tensors, **options)


def grouped(x=(4, 32), w=(2, 16, 32), offs=(2,), offs_dtype=torch.int32, **options):
    offs = torch.zeros(offs, dtype=offs_dtype)
    return lambda: fp8_grouped_mm(torch.ones(x), torch.ones(w), offs, **options)


def under_autocast(call):
    def run():
        with torch.autocast("cpu", torch.float16):
            call()

    return run


def weight_elsewhere():
    return fp8_linear(torch.ones(4, 32), torch.ones(16, 32, device="meta"))


def offs_elsewhere():
    offs = torch.zeros(2, dtype=torch.int32)
    return fp8_grouped_mm(
        torch.ones(4, 32, device="meta"), torch.ones(2, 16, 32, device="meta"), offs
    )


ALLOWED = "allowed are 'blockwise', 'rowwise', 'rowwise_with_gw_hp'"

MULTIPLES = "FP8 GEMMs need N = {} and K = {} to be positive multiples of 16"

ERRORS = [
    (linear(recipe="fp8"), f"recipe = 'fp8': {ALLOWED}"),
    (linear(recipe="bf16"), f"recipe = 'bf16': {ALLOWED}"),
    (linear(recipe=None), f"recipe = None: {ALLOWED}"),
    (linear(emulate=None), "emulate = None: allowed are true and false"),
    (grouped(emulate=1), "emulate = 1: allowed are true and false"),
    (grouped(aligned="no"), "aligned = 'no': allowed are true and false"),
    (grouped(recipe="tensorwise"), f"recipe = 'tensorwise': {ALLOWED}"),
    (linear(x=()), "x has shape () and weight (16, 32): allowed are (..., K) and (N, K)"),
    (linear(x=(4, 16)), "x has shape (4, 16) and weight (16, 32): allowed are (..., K) and (N, K)"),
    (linear(w=(2, 16, 32)), "weight (2, 16, 32): allowed are (..., K) and (N, K)"),
    (linear(bias=(32,)), "bias has shape (32,): allowed is (16,)"),
    (linear(bias=(1, 16)), "bias has shape (1, 16): allowed is (16,)"),
    (linear(w=(24, 32)), "weight has shape (24, 32): " + MULTIPLES.format(24, 32)),
    (linear(x=(4, 8), w=(16, 8)), "weight has shape (16, 8): " + MULTIPLES.format(16, 8)),
    (linear(w=(0, 32)), "weight has shape (0, 32): " + MULTIPLES.format(0, 32)),
    (linear(dtypes=(F16, F32, F32)), "x is torch.float16: allowed are torch.bfloat16 and"),
    (linear(dtypes=(F32, F64, F32)), "weight is torch.float64: allowed are torch.bfloat16 and"),
    (linear(bias=(16,), dtypes=(F32, F32, F16)), "bias is torch.float16: allowed are"),
    (linear(dtypes=(F32, torch.bfloat16, F32)), "dtypes differ outside autocast: {'x': torch.fl"),
    (linear(bias=(16,), dtypes=(F32, F32, torch.bfloat16)), "'bias': torch.bfloat16}"),
    (under_autocast(linear()), "autocast to torch.float16: allowed are torch.bfloat16 and"),
    (grouped(x=(4, 16)), "x has shape (4, 16) and weight (2, 16, 32): allowed are (M, K)"),
    (grouped(x=(1, 4, 32)), "x has shape (1, 4, 32) and weight (2, 16, 32): allowed are (M, K)"),
    (grouped(w=(16, 32)), "weight (16, 32): allowed are (M, K) and (E, N, K)"),
    (grouped(offs=(3,)), "offs is torch.int32 of shape (3,): allowed is torch.int32 of shape (2,)"),
    (grouped(offs_dtype=torch.int64), "offs is torch.int64 of shape (2,): allowed is torch.int32"),
    (lambda: fp8_grouped_mm(torch.ones(4, 32), torch.ones(1, 16, 32), [4]), "offs is [4]: allowed"),
    (grouped(w=(0, 16, 32), offs=(0,)), "weight has 0 groups: at least one is needed"),
    (grouped(w=(2, 17, 32)), "weight has shape (2, 17, 32): " + MULTIPLES.format(17, 32)),
    (lambda: fp8_linear([1], torch.ones(16, 32)), "x is [1]: allowed is a Tensor"),
    (lambda: fp8_linear(torch.ones(4, 32), None), "weight is None: allowed is a Tensor or Qua"),
    (linear(bias=0.0), "bias is 0.0: allowed is a Tensor or None"),
    (lambda: fp8_grouped_mm(None, None, None), "x is None: allowed is a Tensor"),
    (lambda: fp8_swiglu(torch.ones(4, 32), *[torch.ones(32, 32)] * 2, 3), "w3 is 3: allowed is a"),
    (lambda: quantize_weight([[1]]), "weight is [[1]]: allowed is a Tensor"),
    (lambda: convert_linears("llama3"), "model is 'llama3': allowed is a Module"),
    (lambda: convert_experts(None), "model is None: allowed is a Module"),
    (weight_elsewhere, "weight is on meta and x on cpu: must be the same"),
    (offs_elsewhere, "offs is on cpu and x on meta: must be the same"),
]  # fmt: skip


@pytest.mark.parametrize("call, message", ERRORS, ids=[message[:60] for _, message in ERRORS])
def test_errors(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
