"""Forward and backward of a linear layer in FP8 against bf16, quantisers included, on one GPU.

    python scripts/bench_linear.py [--json FILE]

Beside the speedup stands the share of the roofline speedup: what a layer would gain whose FP8 GEMMs
were the fastest library ones of this run (cuBLAS 1x128 @ 128x128, cuBLAS rowwise, DeepGEMM where it
is installed), one behind the other as in the layer, and whose quantisers moved their bytes at the
copy bandwidth of this run. Layers of torchao are timed too where torchao is installed: rowwise and
tensorwise ones compiled, for they fuse by the compiler; its blockwise one, a prototype with kernels
of its own, as it is. "MiB kept" is what forward keeps for backward, weights aside.

No speed is printed for a layer whose result is wrong.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from bench_common import (
    FP8_ERROR,
    HAS_TORCHAO,
    Layer,
    copy_gbps,
    layer_inputs,
    layer_rows,
    median_us,
    parser,
    randn,
    report,
)
from torch import Tensor, nn

import titan_fp8
from titan_fp8 import kernels

SHAPES = (
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (8192, 4096, 4096),
    (4096, 18432, 7168),
    (4096, 7168, 18432),
    (4096, 10944, 2048),
    (4096, 2048, 10944),
)
"""(M, N, K): Llama3-8B at 8192 tokens, the dense feed-forwards of DeepSeek-V3 671B and 16B."""
KINDS = ("bf16", "blockwise", "rowwise", "rowwise_with_gw_hp")
TORCHAO = ("torchao blockwise", "torchao rowwise", "torchao tensorwise")


def make_layer(kind: str, weight: Tensor) -> Layer:
    """A bias-free linear: bf16, one of our recipes or torchao's."""
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
    elif kind != "bf16":
        titan_fp8.convert_linears(model, recipe=kind, filter_fqns=())
    return Layer(model, tuple(model.parameters()))


def library_gemm(m: int, n: int, k: int) -> Callable[[], Tensor]:
    """The fastest library FP8 GEMM of this size."""
    a, b = randn(m, k), randn(n, k)
    (aq, sa), (bq, sb) = kernels.quantize_1x128(a), kernels.quantize_128x128(b)
    (ar, sar), (br, sbr) = kernels.quantize_row(a), kernels.quantize_row(b)
    row = functools.partial(torch._scaled_mm, scale_a=sar[:, None], scale_b=sbr[None])
    candidates = [lambda: row(ar, br.t(), out_dtype=torch.bfloat16, use_fast_accum=True)]
    if k % 128 == 0 and n % 128 == 0:
        scaling = F.ScalingType
        candidates.append(
            lambda: F.scaled_mm(
                aq,
                bq.t(),
                scale_a=sa,
                scale_recipe_a=scaling.BlockWise1x128,
                scale_b=sb.t(),
                scale_recipe_b=scaling.BlockWise128x128,
                output_dtype=torch.bfloat16,
            )
        )
    try:
        import deep_gemm

        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        candidates.append(lambda: deep_gemm.fp8_gemm_nt((aq, sa), (bq, sb), out))
    except ImportError:
        pass
    return min(candidates, key=lambda candidate: median_us([candidate]))


def roofline_us(m: int, n: int, k: int, gbps: float) -> float:
    """Three GEMMs at library rate, quantisers at copy bandwidth (2 bytes in, 1 + 1 out each)."""
    gemms = library_gemm(m, n, k), library_gemm(m, k, n), library_gemm(n, k, m)
    gemms_us = median_us([lambda: [gemm() for gemm in gemms]])
    quantised = 4 * m * k + 4 * m * n + 6 * n * k
    return gemms_us + quantised / gbps / 1e3


def main() -> None:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--shape", help="M,N,K in place of the list")
    args = arguments.parse_args()
    shapes = [tuple(map(int, args.shape.split(",")))] if args.shape else SHAPES
    gbps = copy_gbps()
    rows = []
    for m, n, k in shapes:
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
    print(f"copy bandwidth {gbps:.0f} GB/s")
    report(rows, args.json)


if __name__ == "__main__":
    main()
