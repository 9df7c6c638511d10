"""What a recipe is: for each of the three GEMMs of a layer, how each operand is scaled.

A layer y = x Wᵀ owns three matrix products, and each contracts another dimension:

    fprop   y  = x  Wᵀ     contracts K      x is the left operand, W the right
    dgrad   dx = g  W      contracts N      g is the left operand, W the right
    wgrad   dW = gᵀ x      contracts M      gᵀ is the left operand, xᵀ the right

Scales run along the contracted dimension, so x, W and g are each quantised twice, along both of
their dimensions. `blockwise` is DeepSeek-V3's (arXiv 2412.19437, §3.3): a scale for every 1x128
piece of an activation or gradient and for every 128x128 tile of a weight. `rowwise` has one scale
for each row of the left and each column of the right operand; `rowwise_with_gw_hp` keeps wgrad in
bf16. Nothing here imports from this package: the numbers are in `reference.py`.
"""

from dataclasses import dataclass
from enum import Enum

BF16 = "bf16"
"""The setting of the TOML and of `convert_*` under which nothing is converted: the baseline."""


class Scaling(Enum):
    """How many elements share one scale; the second dimension is the contracted one."""

    BLOCK_1X128 = "1x128"
    BLOCK_128X128 = "128x128"
    ROW = "row"
    NONE = "bf16"


@dataclass(frozen=True)
class Gemm:
    """The scaling of one GEMM's left and right operand."""

    left: Scaling
    right: Scaling


@dataclass(frozen=True)
class Recipe:
    """The three GEMMs, and the multiple of tokens to which torchtitan pads expert groups.

    At multiples of 128 nothing is rearranged; rowwise rearranges them in a pass it makes anyway.
    """

    name: str
    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm
    alignment: int


_BLOCKWISE = Gemm(Scaling.BLOCK_1X128, Scaling.BLOCK_128X128)
_ROWWISE = Gemm(Scaling.ROW, Scaling.ROW)

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "blockwise",
            fprop=_BLOCKWISE,
            dgrad=_BLOCKWISE,
            wgrad=Gemm(Scaling.BLOCK_1X128, Scaling.BLOCK_1X128),
            alignment=128,
        ),
        Recipe("rowwise", fprop=_ROWWISE, dgrad=_ROWWISE, wgrad=_ROWWISE, alignment=16),
        Recipe(
            "rowwise_with_gw_hp",
            fprop=_ROWWISE,
            dgrad=_ROWWISE,
            wgrad=Gemm(Scaling.NONE, Scaling.NONE),
            alignment=16,
        ),
    )
}
"""The FP8 recipes by name."""

RECIPE_NAMES = (*RECIPES, BF16)
"""What a `recipe` key of the TOML may say."""


def get_recipe(name: str) -> Recipe:
    """The FP8 recipe called `name`; ValueError names the value and what is allowed."""
    if not isinstance(name, str) or name not in RECIPES:
        raise ValueError(f"recipe = {name!r}: allowed are {', '.join(map(repr, RECIPES))}")
    return RECIPES[name]
