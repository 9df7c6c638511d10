"""Forward and backward of a linear layer in FP8 against bf16, quantisers included, on one GPU.

    python scripts/bench_linear.py [--json FILE]

Beside the speedup stands the share of the roofline speedup: what a layer would gain whose FP8 GEMMs
all ran at the rate of the fastest library GEMM of this run (cuBLAS 1x128 @ 128x128, cuBLAS
rowwise, DeepGEMM where it is installed) and whose quantisers moved their bytes at the copy
bandwidth of this run. Layers of torchao are timed too where torchao is installed, compiled, for it
fuses by the compiler. The last column is what forward keeps for backward, weights aside.

No speed is printed for a layer whose result is wrong.
"""

import functools

import torch
import torch.nn.functional as F
from bench_common import copy_gbps, median_us, parser, report, sets_beyond_l2
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
FP8_ERROR = 0.06
"""Relative error of y, dx and dW on Gaussian data: 0.037 for e4m3, with room for large M."""


def make_layer(kind: str, n: int, k: int) -> nn.Module:
    """A bias-free linear in bf16, converted to `kind`: bf16, one of our recipes or torchao's."""
    model = nn.Sequential(nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16))
    if kind.startswith("torchao "):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(kind.removeprefix("torchao "))
        convert_to_float8_training(model, config=config)
    elif kind != "bf16":
        titan_fp8.convert_linears(model, recipe=kind, filter_fqns=())
    return torch.compile(model, fullgraph=True) if kind.startswith("torchao ") else model


def step(layer: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """y, dx and dW."""
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), g)


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def saved_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes that forward keeps for backward, each storage once, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = layer(x)
    del y
    return sum(kept.values())


def library_us(m: int, n: int, k: int) -> float:
    """Time of the fastest library FP8 GEMM of this size."""
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
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
    return min(median_us([candidate]) for candidate in candidates)


def roofline_us(m: int, n: int, k: int, gbps: float) -> float:
    """Three GEMMs at library rate, quantisers at copy bandwidth (2 bytes in, 1 + 1 out each)."""
    gemms = library_us(m, n, k) + library_us(m, k, n) + library_us(n, k, m)
    quantised = 4 * m * k + 4 * m * n + 6 * n * k
    return gemms + quantised / gbps / 1e3


def main() -> None:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--shape", help="M,N,K in place of the list")
    args = arguments.parse_args()
    shapes = [tuple(map(int, args.shape.split(",")))] if args.shape else SHAPES
    kinds = ["bf16", "blockwise", "rowwise", "rowwise_with_gw_hp"]
    try:
        import torchao  # noqa: F401

        kinds += ["torchao rowwise", "torchao tensorwise"]
    except ImportError:
        pass
    gbps = copy_gbps()
    rows = []
    for m, n, k in shapes:
        torch._dynamo.reset()
        sets = [
            (
                torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True),
                torch.randn(m, n, device="cuda", dtype=torch.bfloat16),
            )
            for _ in range(sets_beyond_l2(2 * m * (n + k)))
        ]
        bf16_us, roof_us, want = None, roofline_us(m, n, k, gbps), None
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
        for kind in kinds:
            layer = make_layer(kind, n, k)
            with torch.no_grad():
                next(layer.parameters()).copy_(weight)
            got = step(layer, *sets[0])
            want = want or got
            error = max(map(relative_error, got, want))
            us = None
            if error < FP8_ERROR:
                us = median_us([functools.partial(step, layer, *inputs) for inputs in sets])
            bf16_us = bf16_us or us
            speedup = bf16_us / us if us else None
            rows.append(
                {
                    "M,N,K": f"{m},{n},{k}",
                    "layer": kind,
                    "error": error,
                    "us": us if us else "wrong",
                    "x bf16": speedup,
                    "% roofline": 100 * speedup * roof_us / bf16_us if us else None,
                    "MiB saved": saved_bytes(layer, sets[0][0]) / 2**20,
                }
            )
    print(f"copy bandwidth {gbps:.0f} GB/s")
    report(rows, args.json)


if __name__ == "__main__":
    main()
