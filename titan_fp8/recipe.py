"""What a recipe is: for each GEMM of a layer, how its operands are scaled and which ops run.

A layer y = x Wᵀ has three GEMMs, and each contracts another dimension:

    fprop   y  = x  Wᵀ     contracts K      x is the left operand, W the right
    dgrad   dx = g  W      contracts N      g is the left operand, W the right
    wgrad   dW = gᵀ x      contracts M      gᵀ is the left operand, xᵀ the right

Scales run along the contracted dimension, so x, W and g are each quantized twice: along their rows
and, transposed, along their columns.

`RECIPES` is the only list of recipes. The TOML's keys, the layers, the policy of activation
checkpointing and the benchmarks read from it; CONTRIBUTING.md says how to add one.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

from titan_fp8.ops.registry import OPS

BF16 = "bf16"
"""The value of `recipe` with which nothing is converted: the baseline."""


@dataclass(frozen=True)
class Stage:
    """An op by its name, with the options by which a recipe calls it.

    Called, it is the op of `torch.ops.titan_fp8`.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return getattr(torch.ops.titan_fp8, self.name)(*args, **self.options, **options)

    def on(self, ops: Any, *args: Any) -> Any:
        """Calls it on any object that has the ops (`ops/registry.py`)."""
        return getattr(ops, self.name)(*args, **self.options)

    @property
    def overload(self) -> OpOverload:
        """What graphs of torch.compile call."""
        return OPS[self.name].overload


@dataclass(frozen=True)
class FeedForwardOps:
    """The ops of a feed-forward that writes h, da and db in FP8 only (`swiglu.py`).

    Attributes:
        swiglu: h of a and b, quantized along its rows.
        swiglu_backward: da, db and h, quantized as the GEMMs of backward read them.
        dgrad_pair: dx, the sum of two dgrads.
        gather: rows and columns of x or g, for rows of experts that were quantized before.
    """

    swiglu: Stage
    swiglu_backward: Stage
    dgrad_pair: Stage
    gather: Stage


@dataclass(frozen=True)
class Recipe:
    """An FP8 recipe: its ops, and what they imply.

    Attributes:
        name: its name in TOML files.
        fprop, dgrad, wgrad: the three GEMMs. The ops of fprop and dgrad quantize the weight, unless
            it is in FP8 already.
        scale_fmt: the format of scales, "fp32", or "ue8m0" for powers of two.
        alignment: the multiple of tokens to which torchtitan pads the groups of experts. At
            multiples of 128 the quantizers need not pad the groups again.
        quantize_rows: quantizes x or g for fprop and dgrad.
        quantize_columns: the same for wgrad.
        quantize_rows_and_columns: both from one read.
        quantize_weight, quantize_weight_t: quantize W for fprop and, transposed, for dgrad.
        feed_forward: the ops of the fused feed-forward, if there are any.
        has_weight_blocks: W has a scale per 128x128 block, so fprop and dgrad read the same q.
        wgrad_in_bf16: wgrad reads g and x in bf16.
    """

    name: str
    fprop: Stage
    dgrad: Stage
    wgrad: Stage
    scale_fmt: str
    alignment: int
    quantize_rows: Stage
    quantize_columns: Stage
    quantize_rows_and_columns: Stage
    quantize_weight: Stage
    quantize_weight_t: Stage
    feed_forward: FeedForwardOps | None
    has_weight_blocks: bool
    wgrad_in_bf16: bool


def _blockwise(name: str, scale_fmt: str) -> Recipe:
    """DeepSeek-V3's recipe (arXiv 2412.19437, §3.3): 1x128 for x and g, 128x128 for W."""
    options = {} if scale_fmt == "fp32" else {"scale_fmt": scale_fmt}

    def scaled(op: str) -> Stage:
        return Stage(op, options)

    return Recipe(
        name,
        fprop=scaled("blockwise_fprop"),
        dgrad=scaled("blockwise_dgrad"),
        wgrad=Stage("blockwise_wgrad"),
        scale_fmt=scale_fmt,
        alignment=128,
        quantize_rows=scaled("quantize_1x128"),
        quantize_columns=scaled("quantize_128x1_t"),
        quantize_rows_and_columns=scaled("quantize_1x128_128x1_t"),
        quantize_weight=scaled("quantize_128x128"),
        quantize_weight_t=scaled("quantize_128x128_t"),
        feed_forward=FeedForwardOps(
            swiglu=scaled("swiglu_1x128"),
            swiglu_backward=scaled("swiglu_backward_1x128_128x1_t"),
            dgrad_pair=scaled("blockwise_dgrad_pair"),
            gather=scaled("gather_1x128_128x1_t"),
        ),
        has_weight_blocks=True,
        wgrad_in_bf16=False,
    )


def _rowwise(name: str, wgrad: str) -> Recipe:
    """One scale per row of the left operand and per column of the right one."""
    return Recipe(
        name,
        fprop=Stage("rowwise_fprop"),
        dgrad=Stage("rowwise_dgrad"),
        wgrad=Stage(wgrad),
        scale_fmt="fp32",
        alignment=16,
        quantize_rows=Stage("quantize_row"),
        quantize_columns=Stage("quantize_col_t"),
        quantize_rows_and_columns=Stage("quantize_row_col_t"),
        quantize_weight=Stage("quantize_row"),
        quantize_weight_t=Stage("quantize_weight_col_t"),
        feed_forward=None,
        has_weight_blocks=False,
        wgrad_in_bf16=wgrad == "bf16_wgrad",
    )


RECIPES = {
    recipe.name: recipe
    for recipe in (
        _blockwise("blockwise", scale_fmt="fp32"),
        _rowwise("rowwise", "rowwise_wgrad"),
        _rowwise("rowwise_with_gw_hp", "bf16_wgrad"),
        _blockwise("blockwise_pow2", scale_fmt="ue8m0"),
    )
}
"""The FP8 recipes by name."""

RECIPE_NAMES = (*RECIPES, BF16)
"""The allowed values of a `recipe` key."""


def get_recipe(name: str) -> Recipe:
    """The FP8 recipe called `name`; ValueError names the value and what is allowed."""
    if not isinstance(name, str) or name not in RECIPES:
        raise ValueError(f"recipe = {name!r}: allowed are {', '.join(map(repr, RECIPES))}")
    return RECIPES[name]
