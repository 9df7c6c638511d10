"""Forward and backward of grouped layers in FP8 against bf16, quantisers included, on one GPU.

    python scripts/bench_grouped.py [--json FILE] [--only products|experts]

Two ops:

    product   `fp8_grouped_mm` beside `torch._grouped_mm`, for the experts of DeepSeek-V3 671B (8 on
              a rank) and for 1 to 64 experts that share the same tokens
    experts   the whole layer, w2(silu(w1 x) * w3 x), as the plugin compiles it, beside torchtitan's
              own in bf16, compiled too; of DeepSeek-V3 671B and 16B

Group ends are uneven multiples of that to which torchtitan pads for the recipe ("x128", of which
the layer is told, or "x16"), or arbitrary ("any"). torchao's rowwise product is timed too where
torchao is installed, compiled, for it fuses by the compiler. "MiB kept" is what forward keeps for
backward, weights aside.

No speed is printed for a layer whose result is wrong.
"""

import functools
from collections.abc import Iterator

import torch
from bench_common import (
    FP8_ERROR,
    HAS_TORCHAO,
    Layer,
    layer_inputs,
    layer_rows,
    parser,
    randn,
    report,
)
from bench_shapes import GROUPED, SEED, uneven_ends
from torch import Tensor
from torchtitan.models.moe.moe import _run_experts_grouped_mm

import titan_fp8
from titan_fp8.torchtitan_0_2.experts import compiled_run_experts

COUNTS = tuple((e, 16640, 8192, 5120) for e in (1, 4, 16, 64))
"""(E, M, N, K): ever more experts for the same tokens."""
EXPERTS = ((8, 32768, 2048, 7168), (16, 24576, 1408, 2048))
"""(E, M, hidden, dim): local experts of DeepSeek-V3 671B and 16B."""
EXPERTS_ERROR = 0.1
"""Relative error after up to three products, one behind the other: 0.067 in emulation."""
ALIGNED = ((128, ("blockwise",)), (16, ("rowwise", "rowwise_with_gw_hp")))
"""Multiples at which the groups end, and the recipes for which torchtitan pads to these."""
ANY = (1, ("blockwise", "rowwise", "rowwise_with_gw_hp"))

Shape = tuple[int, int, int, int]
Row = dict[str, object]


def torchao_product(weight: Tensor, offs: Tensor) -> Layer:
    from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm

    product = torch.compile(_to_fp8_rowwise_then_scaled_grouped_mm, dynamic=False)
    return Layer(
        lambda x: product(x, weight.mT, offs, pad_token_groups_for_grouped_mm=False), (weight,)
    )


def products(shape: Shape, weight: Tensor, alignment: int, recipes: tuple[str, ...]) -> list[Row]:
    e, m, n, k = shape
    offs = uneven_ends(e, m, alignment).cuda()
    layers = {
        "bf16": lambda: Layer(lambda x: torch._grouped_mm(x, weight.mT, offs=offs), (weight,))
    }
    for recipe in recipes:
        product = functools.partial(
            titan_fp8.fp8_grouped_mm,
            weight=weight,
            offs=offs,
            recipe=recipe,
            aligned=alignment == 128,
        )
        layers[recipe] = functools.partial(Layer, product, (weight,))
    yardsticks = {}
    if HAS_TORCHAO and alignment == 16:
        yardsticks["torchao rowwise"] = functools.partial(torchao_product, weight, offs)
    return layer_rows(layers, yardsticks, layer_inputs(m, n, k), FP8_ERROR)


def experts(
    shape: Shape, weights: tuple[Tensor, ...], alignment: int, recipes: tuple[str, ...]
) -> list[Row]:
    e, m, _, dim = shape
    tokens = uneven_ends(e, m, alignment).diff(prepend=torch.zeros(1, dtype=torch.int32)).cuda()
    host = torch.compile(_run_experts_grouped_mm, fullgraph=True)

    def bf16(x: Tensor) -> Tensor:
        torch._dynamo.mark_dynamic(x, 0)
        return host(*weights, x, tokens)

    layers = {"bf16": lambda: Layer(bf16, weights)}
    for recipe in recipes:
        run = functools.partial(run_experts, weights, tokens, recipe, alignment == 128)
        layers[recipe] = functools.partial(Layer, run, weights)
    return layer_rows(layers, {}, layer_inputs(m, dim, dim), EXPERTS_ERROR)


def run_experts(
    weights: tuple[Tensor, ...], tokens: Tensor, recipe: str, aligned: bool, x: Tensor
) -> Tensor:
    return compiled_run_experts("inductor")(*weights, x, tokens, recipe, False, aligned)


def random_weight(*shape: int) -> Tensor:
    """A weight that keeps the variance of what it multiplies."""
    return randn(*shape, scale=shape[-1] ** -0.5, requires_grad=True)


def product_tables() -> Iterator[Row]:
    for shape in (GROUPED[0], *COUNTS):
        torch._dynamo.reset()
        weight = random_weight(shape[0], *shape[2:])
        for alignment, recipes in (*ALIGNED, ANY) if shape == GROUPED[0] else ALIGNED:
            for row in products(shape, weight, alignment, recipes):
                yield labelled("product", shape, alignment, row, gemms=3)


def experts_table() -> Iterator[Row]:
    for shape in EXPERTS:
        torch._dynamo.reset()
        e, _, hidden, dim = shape
        weights = tuple(random_weight(e, *s) for s in ((hidden, dim), (dim, hidden), (hidden, dim)))
        for alignment, recipes in ALIGNED:
            for row in experts(shape, weights, alignment, recipes[:1]):
                yield labelled("experts", shape, alignment, row, gemms=9)


def labelled(name: str, shape: Shape, alignment: int, row: Row, gemms: int) -> Row:
    """`row` with what was measured before it, and TFLOPS of `gemms` products of that shape."""
    _, m, n, k = shape
    us = row["us"]
    rate = 2 * gemms * m * n * k / us / 1e6 if isinstance(us, float) else None
    ends = "any" if alignment == 1 else f"x{alignment}"
    return {"op": name, "E,M,N,K": ",".join(map(str, shape)), "ends": ends, **row, "TFLOPS": rate}


def main() -> None:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--only", choices=["products", "experts"])
    args = arguments.parse_args()
    rows: list[Row] = []
    if args.only != "experts":
        rows += product_tables()
    if args.only != "products":
        rows += experts_table()
    print(f"seed of the group ends: {SEED}")
    report(rows, args.json)


if __name__ == "__main__":
    main()
