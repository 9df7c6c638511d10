"""What tables of GEMM speeds (`scripts/bench kernel_table`) say of a model, without a GPU.

A layer is as fast as its GEMMs alone. What stays in bf16 takes the time of its FLOPs there.
"""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_fp8.plan.measure import Report
from titan_fp8.plan.model import Layer, Rank
from titan_fp8.recipe import BF16, get_recipe

TABLES = Path(__file__).parent / "tables"


def tables() -> list[dict[str, Any]]:
    """The table of each GPU; columns are op ("mm": fprop, dgrad), E or 0, M, N, K, and us."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(TABLES.glob("*.json"))]


def speed(table: dict[str, Any], layer: Layer) -> tuple[float, bool]:
    """How many times as fast as bf16 a layer's GEMMs are, and whether the table has none like
    them, within a factor of two in each dimension. (1, False) if it does not run in FP8."""
    if layer.recipe == BF16:
        return 1.0, False
    recipe, bf16, fp8, is_outside = get_recipe(layer.recipe), 0.0, 0.0, False
    stages = ("mm", recipe.fprop), ("mm", recipe.dgrad), ("wgrad", recipe.wgrad)
    rows = [dict(zip(table["columns"], row)) for row in table["us"]]
    for (n, k), (op, gemm) in itertools.product(layer.products, stages):
        name = "blockwise" if recipe.has_weight_blocks else "rowwise"
        name = BF16 if op == "wgrad" and recipe.wgrad_in_bf16 else name
        wanted = _axes(layer.groups, layer.m, *((k, n) if gemm is recipe.dgrad else (n, k)))
        fit = (r for r in rows if r["op"] == op and bool(r["E"]) == bool(layer.groups))
        found = {_axes(*(r[c] for c in "EMNK")): r for r in fit if r[BF16] and r[name]}
        near = min(found, key=lambda axes: math.dist(axes, wanted))
        share = n * k / math.prod(found[near][c] for c in "MNK")
        bf16 += found[near][BF16] * share
        fp8 += found[near][name] * share
        is_outside |= any(abs(a - b) > 1 for a, b in zip(near, wanted))
    return bf16 / fp8, is_outside


def _axes(groups: int, m: int, n: int, k: int) -> tuple[float, ...]:
    return tuple(math.log2(max(size, 1)) for size in (groups, m / max(groups, 1), n, k))


def bound(rank: Rank, speeds: Sequence[float]) -> float:
    """An upper bound of a step's speed relative to bf16; `speeds` are those of the layers."""
    flop = [6 * len(x.modules) * x.m * sum(n * k for n, k in x.products) for x in rank.layers]
    spent = sum(each / speed for each, speed in zip(flop, speeds, strict=True))
    return (rank.attention_flop + sum(flop)) / (rank.attention_flop + spent)


def report(rank: Rank) -> Report:
    """What the tables say; "slower" is what is slower by each of them."""
    cards = tables()
    found = {layer: [speed(table, layer) for table in cards] for layer in rank.layers}
    rows = [[*x.cells, *(f"{ratio:.2f}{'*' * out}" for ratio, out in found[x])] for x in found]
    bounds = [bound(rank, [ratio for ratio, _ in speeds]) for speeds in zip(*found.values())]
    rows.append(["upper bound of a step", "", "", *(f"{most:.2f}" for most in bounds)])
    slower = [layer for layer, speeds in found.items() if all(ratio < 1 for ratio, _ in speeds)]
    notes = [
        "Nothing is measured here. How fast GEMMs alone are, bf16 is 1, is by the tables of:",
        *("- {card}: torch {torch}, {date}, {commit}".format(**table) for table in cards),
        "*: outside the table, as fast as its nearest GEMMs",
        "The bound is of what FP8 GEMMs gain, if only GEMMs and purely causal attention take time.",
    ]
    return [table["card"] for table in cards], rows, slower, notes
