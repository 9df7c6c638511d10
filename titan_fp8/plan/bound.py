"""What tables of GEMM speeds say of a model, without a GPU.

The speed of a layer is that of its GEMMs alone, each as much faster than bf16 as the nearest one in
the table (`tables/`, from scripts/bench). It bounds what FP8 GEMMs gain in a step: what
is left in high precision takes as long as its FLOPs take in bf16, and all else no time.
"""

import itertools
import json
import math
from pathlib import Path
from typing import Any

from titan_fp8.plan.model import Layer, Rank
from titan_fp8.recipe import BF16, Scaling, get_recipe

TABLES = Path(__file__).parent / "tables"
NAMES = {Scaling.NONE: BF16, Scaling.ROW: "rowwise", Scaling.BLOCK_1X128: "blockwise"}


def tables() -> list[dict[str, Any]]:
    """The table of each GPU; columns are op ("mm": fprop, dgrad), E or 0, M, N, K, and us."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(TABLES.glob("*.json"))]


def speed(table: dict[str, Any], layer: Layer) -> tuple[float, bool]:
    """How many times as fast as bf16 a layer's GEMMs are, and whether the table has GEMMs like
    them, within a factor of two in each dimension. (1, True) if it does not run in FP8."""
    bf16, fp8, is_inside = 0.0, 0.0, True
    if layer.recipe == BF16 or layer.refused:
        return 1.0, True
    rows = [dict(zip(table["columns"], row)) for row in table["us"]]
    for (n, k), stage in itertools.product(layer.products, ("fprop", "dgrad", "wgrad")):
        op, name = "mm", NAMES[getattr(get_recipe(layer.recipe), stage).left]
        wanted = _axes(layer.groups, layer.m, *((k, n) if stage == "dgrad" else (n, k)))
        if stage == "wgrad":
            op = stage
        fit = (r for r in rows if r["op"] == op and bool(r["E"]) == bool(layer.groups))
        found = {_axes(*(r[c] for c in "EMNK")): r for r in fit if r[BF16] and r[name]}
        near = min(found, key=lambda axes: math.dist(axes, wanted))
        row = found[near]
        per_flop = n * k / (row["M"] * row["N"] * row["K"])
        bf16, fp8 = bf16 + row[BF16] * per_flop, fp8 + row[name] * per_flop
        is_inside &= all(abs(a - b) <= 1 for a, b in zip(near, wanted))
    return bf16 / fp8, is_inside


def _axes(groups: int, m: int, n: int, k: int) -> tuple[float, ...]:
    return tuple(math.log2(max(size, 1)) for size in (groups, m / max(groups, 1), n, k))


def bound(rank: Rank, speeds: list[float]) -> float:
    """An upper bound of a step's speed relative to bf16; `speeds` are those of the layers."""
    whole = rank.attention_flop + sum(layer.flop for layer in rank.layers)
    spent = sum(layer.flop / speed for layer, speed in zip(rank.layers, speeds, strict=True))
    return whole / (rank.attention_flop + spent)
