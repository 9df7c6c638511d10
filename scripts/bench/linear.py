"""Forward and backward of a linear layer in FP8 and in bf16, quantizers included.

"% roofline" compares the speed with that of an ideal layer: its three GEMMs run one after the other
at the rate of the fastest library FP8 GEMM of this run (cuBLAS 1x128 by 128x128, cuBLAS rowwise, or
DeepGEMM if it is installed), and its quantizers move their bytes at the copy bandwidth of this run.

If torchao is installed, its layers are timed as well: rowwise and tensorwise compiled, because the
compiler fuses their quantizers; the blockwise prototype, which has its own kernels, eager.
"MiB kept" is what forward saves for backward, without weights.

A layer with a wrong result gets no time.
"""

import functools
from collections.abc import Callable

import torch
from bench import gemm
from bench.common import (
    FP8_ERROR,
    HAS_TORCHAO,
    Layer,
    Result,
    copy_gbps,
    layer_inputs,
    layer_rows,
    median_us,
    randn,
)
from bench.shapes import LINEAR
from torch import Tensor, nn

import titan_fp8
from titan_fp8.recipe import BF16, RECIPES

KINDS = (BF16, *RECIPES)
TORCHAO = ("torchao blockwise", "torchao rowwise", "torchao tensorwise")
TITLE = "Linear layers"
ABOUT = "Forward and backward of a linear layer, quantizers included."


def make_layer(kind: str, weight: Tensor) -> Layer:
    """A linear layer without bias: in bf16, in one of our recipes or in one of torchao's."""
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=False, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight)
    model = nn.Sequential(linear)
    library, _, recipe = kind.rpartition(" ")
    if library and recipe == "blockwise":
        from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear

        model = Float8BlockwiseLinear.from_float(linear)
    elif library:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(model, config=config)
        model = torch.compile(model, fullgraph=True)
    elif kind != BF16:
        titan_fp8.convert_linears(model, recipe=kind, filter_fqns=())
    return Layer(model, tuple(model.parameters()))


def library_gemm(m: int, n: int, k: int) -> Callable[[], Tensor]:
    """The fastest library FP8 GEMM of this size."""
    dims = 1, m, n, k
    candidates = [gemm.torch_rowwise(False, dims, None)]
    if k % 128 == 0 and n % 128 == 0:
        candidates.append(gemm.cublas(False, dims))
    if gemm.deep_gemm:
        candidates.append(gemm.deepgemm(dims, None))
    return min(candidates, key=lambda candidate: median_us([candidate]))


def roofline_us(m: int, n: int, k: int, gbps: float) -> float:
    """Three GEMMs at library rate, and quantizers at copy bandwidth.

    x and g are read and written once (2 bytes in, 1 + 1 out), W is read by fprop and by dgrad.
    """
    gemms = library_gemm(m, n, k), library_gemm(m, k, n), library_gemm(n, k, m)
    gemms_us = median_us([lambda: [product() for product in gemms]])
    quantized = 4 * m * k + 4 * m * n + 6 * n * k
    return gemms_us + quantized / gbps / 1e3


def measure() -> Result:
    gbps = copy_gbps()
    rows = []
    for m, n, k in LINEAR:
        torch._dynamo.reset()
        weight, roof_us = randn(n, k, scale=k**-0.5), roofline_us(m, n, k, gbps)
        layers, yardsticks = (
            {kind: functools.partial(make_layer, kind, weight) for kind in kinds}
            for kinds in (KINDS, TORCHAO if HAS_TORCHAO else ())
        )
        for row in layer_rows(layers, yardsticks, layer_inputs(m, n, k), FP8_ERROR):
            us = row["us"]
            share = 100 * roof_us / us if isinstance(us, float) else None
            rows.append({"M,N,K": f"{m},{n},{k}", **row, "% roofline": share})
    return rows, {"copy bandwidth": f"{gbps:.0f} GB/s"}
