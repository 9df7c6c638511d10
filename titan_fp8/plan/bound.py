"""What tables of GEMM speeds say of a model, without a GPU.

The speed of a layer is that of its GEMMs alone, each as much faster than bf16 as the nearest one in
the table (`tables/`, from `scripts/bench kernel_table`). It bounds what FP8 GEMMs gain in a step:
what is left in high precision takes as long as its FLOPs take in bf16, and all else no time.
"""

import itertools
import json
import math
from pathlib import Path
from typing import Any

from titan_fp8.plan.model import Layer, Rank, Report
from titan_fp8.recipe import BF16, Scaling, get_recipe

TABLES = Path(__file__).parent / "tables"
NAMES = {Scaling.NONE: BF16, Scaling.ROW: "rowwise", Scaling.BLOCK_1X128: "blockwise"}


def tables() -> list[dict[str, Any]]:
    """The table of each GPU; columns are op ("mm": fprop, dgrad), E or 0, M, N, K, and us."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(TABLES.glob("*.json"))]


def speed(table: dict[str, Any], layer: Layer) -> tuple[float, bool]:
    """How many times as fast as bf16 a layer's GEMMs are, and whether the table has GEMMs like
    them, within a factor of two in each dimension. (1, True) if it does not run in FP8."""
    if layer.recipe == BF16:
        return 1.0, True
    rows = [dict(zip(table["columns"], row)) for row in table["us"]]
    times, is_inside = {BF16: 0.0, "FP8": 0.0}, True
    for (n, k), stage in itertools.product(layer.products, ("fprop", "dgrad", "wgrad")):
        name = NAMES[getattr(get_recipe(layer.recipe), stage).left]
        wanted = _axes(layer.groups, layer.m, *((k, n) if stage == "dgrad" else (n, k)))
        op = "wgrad" if stage == "wgrad" else "mm"
        fit = (r for r in rows if r["op"] == op and bool(r["E"]) == bool(layer.groups))
        found = {_axes(*(r[c] for c in "EMNK")): r for r in fit if r[BF16] and r[name]}
        near = min(found, key=lambda axes: math.dist(axes, wanted))
        flops = found[near]["M"] * found[near]["N"] * found[near]["K"]
        times[BF16] += found[near][BF16] * n * k / flops
        times["FP8"] += found[near][name] * n * k / flops
        is_inside &= all(abs(a - b) <= 1 for a, b in zip(near, wanted))
    return times[BF16] / times["FP8"], is_inside


def _axes(groups: int, m: int, n: int, k: int) -> tuple[float, ...]:
    return tuple(math.log2(max(size, 1)) for size in (groups, m / max(groups, 1), n, k))


def bound(rank: Rank, speeds: list[float]) -> float:
    """An upper bound of a step's speed relative to bf16; `speeds` are those of the layers."""
    flop = [6 * len(x.modules) * x.m * sum(n * k for n, k in x.products) for x in rank.layers]
    spent = sum(each / speed for each, speed in zip(flop, speeds, strict=True))
    return (rank.attention_flop + sum(flop)) / (rank.attention_flop + spent)


def report(rank: Rank) -> Report:
    """What the tables say; "slower" is what is slower by each of them."""
    cards = tables()
    found = [[speed(table, layer) for table in cards] for layer in rank.layers]
    rows = [
        [*layer.cells, *(f"{ratio:.2f}{'' if is_inside else '*'}" for ratio, is_inside in speeds)]
        for layer, speeds in zip(rank.layers, found)
    ]
    bounds = [bound(rank, [ratio for ratio, _ in speeds]) for speeds in zip(*found)]
    rows.append(["upper bound of a step", "", "", *(f"{most:.2f}" for most in bounds)])
    slower = [x for x, speeds in zip(rank.layers, found) if all(ratio < 1 for ratio, _ in speeds)]
    notes = ["Nothing is measured here. How fast GEMMs alone are, bf16 is 1, is by the tables of:"]
    notes += ["- {card}: torch {torch}, {date}, {commit}".format(**table) for table in cards]
    notes += ["*: outside the table, as fast as its nearest GEMMs"] * ("*" in str(rows))
    counted = "GEMMs and causal attention" if rank.attention_flop else "GEMMs"
    notes.append(f"The bound is of what FP8 GEMMs gain, if nothing but {counted} takes time.")
    return Report([table["card"] for table in cards], rows, slower, notes)
