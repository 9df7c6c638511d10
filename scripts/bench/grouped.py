"""Forward and backward of grouped products and of whole expert layers, quantizers included.

There are two kinds of layer:

    product   `fp8_grouped_mm` and `torch._grouped_mm`, for the experts of DeepSeek-V3 671B (8 local
              ones) and for 1 to 64 experts that share the same tokens
    experts   a whole layer w2(silu(w1 x) * w3 x) as the plugin compiles it, and torchtitan's own in
              bf16, compiled as well, for DeepSeek-V3 671B and 16B

"ends" tells where groups end: at uneven multiples of the recipe's alignment, to which torchtitan
pads ("x128" or "x16"), or anywhere ("any"). At multiples of 128 the layer is told so. "FP8 weight"
is one that FSDP2 has gathered in FP8, so it is not quantized. "MiB kept" is what forward saves for
backward, without weights.

A layer with a wrong result gets no time.
"""

import functools
from collections.abc import Sequence

import torch
from bench.common import FP8_ERROR, Layer, Result, layer_inputs, layer_rows, randn
from bench.shapes import EXPERT_COUNTS, EXPERTS, GROUPED, uneven_ends
from tables import Row
from torch import Tensor
from torchtitan.models.moe.moe import _run_experts_grouped_mm

import titan_fp8
from titan_fp8.functional.weights import GatheredWeight
from titan_fp8.recipe import RECIPES
from titan_fp8.torchtitan_0_2.experts import compiled_run_experts

EXPERTS_ERROR = 0.1
"""Bound on the relative error after up to three products in a row: emulation gives 0.067."""
ANY = 1
"""The alignment of groups that end anywhere."""
TITLE = "Grouped products and experts"

Shape = tuple[int, int, int, int]


def aligned_recipes() -> dict[int, list[str]]:
    """The recipes by the alignment to which torchtitan pads groups for them."""
    recipes: dict[int, list[str]] = {}
    for name, recipe in RECIPES.items():
        recipes.setdefault(recipe.alignment, []).append(name)
    return recipes


def gathered_product(weight: Tensor, offs: Tensor) -> Layer:
    """The blockwise product with the weight that FSDP2 gathers with `fsdp_all_gather`."""
    q, s = torch.ops.titan_fp8.quantize_128x128(weight)
    _, s_t = torch.ops.titan_fp8.quantize_128x128_t(weight)
    gathered = GatheredWeight(q, s, s_t, weight.dtype).requires_grad_()
    return Layer(lambda x: titan_fp8.fp8_grouped_mm(x, gathered, offs, aligned=True), (gathered,))


def products(shape: Shape, weight: Tensor, alignment: int, recipes: Sequence[str]) -> list[Row]:
    e, m, n, k = shape
    offs, aligned = uneven_ends(e, m, alignment).cuda(), alignment == 128

    def fp8(recipe: str) -> Layer:
        options = {"recipe": recipe, "aligned": aligned}
        return Layer(lambda x: titan_fp8.fp8_grouped_mm(x, weight, offs, **options), (weight,))

    layers = {
        "bf16": lambda: Layer(lambda x: torch._grouped_mm(x, weight.mT, offs=offs), (weight,))
    }
    for recipe in recipes:
        layers[recipe] = functools.partial(fp8, recipe)
        if recipe == "blockwise" and aligned:
            layers["blockwise, FP8 weight"] = functools.partial(gathered_product, weight, offs)
    rows = layer_rows(layers, layer_inputs(m, n, k), FP8_ERROR)
    return [labeled("product", shape, alignment, row, gemms=3) for row in rows]


def experts(
    shape: Shape, weights: tuple[Tensor, ...], alignment: int, recipes: Sequence[str]
) -> list[Row]:
    e, m, _, dim = shape
    tokens = uneven_ends(e, m, alignment).diff(prepend=torch.zeros(1, dtype=torch.int32)).cuda()
    torchtitan_experts = torch.compile(_run_experts_grouped_mm, fullgraph=True)

    def bf16(x: Tensor) -> Tensor:
        torch._dynamo.mark_dynamic(x, 0)
        return torchtitan_experts(*weights, x, tokens)

    def fp8(recipe: str) -> Layer:
        run, options = compiled_run_experts("inductor"), (recipe, False, alignment == 128)
        return Layer(lambda x: run(*weights, x, tokens, *options), weights)

    layers = {"bf16": lambda: Layer(bf16, weights)}
    layers |= {recipe: functools.partial(fp8, recipe) for recipe in recipes}
    rows = layer_rows(layers, layer_inputs(m, dim, dim), EXPERTS_ERROR)
    return [labeled("experts", shape, alignment, row, gemms=9) for row in rows]


def random_weight(*shape: int) -> Tensor:
    """A weight whose product has the variance of its input."""
    return randn(*shape, scale=shape[-1] ** -0.5, requires_grad=True)


def labeled(name: str, shape: Shape, alignment: int, row: Row, gemms: int) -> Row:
    """`row` with labels in front and the TFLOPS of `gemms` products of that shape."""
    _, m, n, k = shape
    us = row["us"]
    rate = 2 * gemms * m * n * k / us / 1e6 if isinstance(us, float) else None
    ends = "any" if alignment == ANY else f"x{alignment}"
    return {"op": name, "E,M,N,K": ",".join(map(str, shape)), "ends": ends, **row, "TFLOPS": rate}


def measure() -> Result:
    rows = []
    for shape in (GROUPED[0], *EXPERT_COUNTS):
        torch._dynamo.reset()
        weight = random_weight(shape[0], *shape[2:])
        ends = aligned_recipes() | ({ANY: [*RECIPES]} if shape == GROUPED[0] else {})
        for alignment, recipes in ends.items():
            rows += products(shape, weight, alignment, recipes)
    for shape in EXPERTS:
        torch._dynamo.reset()
        e, _, hidden, dim = shape
        weights = tuple(random_weight(e, *s) for s in ((hidden, dim), (dim, hidden), (hidden, dim)))
        for alignment, recipes in aligned_recipes().items():
            rows += experts(shape, weights, alignment, recipes)
    return rows, {}
