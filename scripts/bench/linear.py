"""Forward and backward of a linear layer in FP8 and in bf16, quantizers included.

"% roofline" compares the speed with that of an ideal layer: its three GEMMs run one after the other
at the rate of cuBLAS in this run (1x128 by 128x128, or rowwise if that is faster), and its
quantizers move their bytes at the copy bandwidth of this run. "MiB kept" is what forward saves for
backward, without weights.

A layer with a wrong result gets no time.
"""

import functools
from collections.abc import Callable

import torch
from bench import common, gemm
from bench.shapes import LINEAR
from torch import Tensor, nn

import titan_fp8
from titan_fp8.recipe import BF16, RECIPES

TITLE = "Linear layers"


def make_layer(kind: str, weight: Tensor) -> common.Layer:
    """A linear layer without bias, in bf16 or in a recipe."""
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=False, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight)
    model = nn.Sequential(linear)
    if kind != BF16:
        titan_fp8.convert_linears(model, recipe=kind, filter_fqns=())
    return common.Layer(model, tuple(model.parameters()))


def library_gemm(m: int, n: int, k: int) -> Callable[[], Tensor]:
    """The faster library FP8 GEMM of this size."""
    dims = 1, m, n, k
    candidates = [gemm.torch_rowwise(False, dims, None)]
    if k % 128 == 0 and n % 128 == 0:
        candidates.append(gemm.cublas(False, dims))
    return min(candidates, key=lambda candidate: common.median_us([candidate]))


def roofline_us(m: int, n: int, k: int, gbps: float) -> float:
    """Three GEMMs at library rate, and quantizers at copy bandwidth.

    x and g are read and written once (2 bytes in, 1 + 1 out), W is read by fprop and by dgrad.
    """
    gemms = library_gemm(m, n, k), library_gemm(m, k, n), library_gemm(n, k, m)
    gemms_us = common.median_us([lambda: [product() for product in gemms]])
    quantized = 4 * m * k + 4 * m * n + 6 * n * k
    return gemms_us + quantized / gbps / 1e3


def measure() -> common.Result:
    gbps = common.copy_gbps()
    rows = []
    for m, n, k in LINEAR:
        torch._dynamo.reset()
        weight, roof_us = common.randn(n, k, scale=k**-0.5), roofline_us(m, n, k, gbps)
        layers = {kind: functools.partial(make_layer, kind, weight) for kind in (BF16, *RECIPES)}
        for row in common.layer_rows(layers, common.layer_inputs(m, n, k), common.FP8_ERROR):
            us = row["us"]
            share = 100 * roof_us / us if isinstance(us, float) else None
            rows.append({"M,N,K": f"{m},{n},{k}", **row, "% roofline": share})
    return rows, {"copy bandwidth": f"{gbps:.0f} GB/s"}
