"""Times of kernels on a GPU, interpolated between measurements.

A table (`tables/*.json`, written by `scripts/plan_table.py`) has the measured times of GEMMs and
quantizers, and rates of the rest of a step. A GEMM runs at a mean of the measured rates (FLOP per
us), weighted by how near the shapes are, on logarithmic axes, but not faster than a copy moves its
operands and its output; a quantizer's time is linear between measured sizes, and goes on so below
them.
"""

import functools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_fp8.recipe import BF16, Scaling, op_of

TABLES = Path(__file__).parent / "tables"
SHARPNESS = 4
"""Power of the distance, in octaves, by which the weight of a measured rate falls."""
NEAREST = 6
"""How many measured shapes count."""

COLUMNS = {"quantize_128x1_t": ("quantize_1x128", 1.03), "quantize_col_t": ("quantize_row", 1.19)}
"""A quantizer of columns -> that of rows, and how many times as long it takes. measure_plan.py
measures only that of rows; these are means over the four bf16 shapes without groups in
docs/benchmarks/quantize.json."""


@dataclass(frozen=True, eq=False)
class Times:
    """Measured times and rates of one kind of GPU and of the CPU of its machine.

    Attributes:
        gpu: the card.
        sources: {entry of the table: where it comes from}: "from", the files of measurements;
            "how": "measured" on this card, "scaled" from another card by the bandwidth of copies,
            "taken" from it as it is, or "estimated" from runs; and, of entries that come from runs,
            "card", that of the runs.
        copy_gbps: bandwidth of a device copy, bytes read and written counted.
        gemm: {(family, op): rows of (groups, m, n, k, us)}; op "mm" contracts k, op "wgrad" m.
        quantize: {op: rows of (elements, us)}.
        attention_tflops: of forward and backward.
        dense_ps: ps per token, feature and block, for everything in a dense block that is neither
            GEMM nor attention, without checkpointing.
        moe_ps: {permutation: the same per row of an expert, feature and MoE block}.
        optimizer_ps: {dtype of parameters: ps per parameter}, with clipping.
        reduce_ps: ps per gradient that FSDP2 copies to the FP32 buffer of a reduction.
        whole_ps: {"bf16" or "fp8": ps per parameter that FSDP2 does not shard, for copies of it and
            of its gradient}.
        shard_ps: {recipe: ps per element of a shard that is quantized before it is gathered}.
        link_gbps: bytes that a rank receives in collectives.
        exposed: {"bf16" or "fp8": what FSDP2's gathers and reductions add to the step while they
            overlap with computation, as a share of that time}.
        host: us of CPU time per linear, forward and backward, per weight that is gathered in FP8
            ("fsdp_all_gather"), and per block; see `host_us`. A block costs "block_us", and with
            FSDP2 "fsdp_block_us" more; one with experts costs "moe_block_us", or under
            tensor parallelism "moe_tp_block_us", on one of several ranks. FSDP2 over several ranks
            multiplies the CPU time of a model without experts by "several_ranks".
    """

    gpu: str
    sources: dict[str, dict[str, Any]]
    copy_gbps: float
    gemm: dict[tuple[str, str], list[list[float]]]
    quantize: dict[str, list[list[float]]]
    attention_tflops: float
    dense_ps: float
    moe_ps: dict[str, float]
    optimizer_ps: dict[str, float]
    reduce_ps: float
    whole_ps: dict[str, float]
    shard_ps: dict[str, float]
    link_gbps: float
    exposed: dict[str, float]
    host: dict[str, Any] = field(repr=False)

    def gemm_us(self, family: str, op: str, groups: int, m: int, n: int, k: int) -> float:
        """Time of a GEMM of m tokens, of all groups together."""
        size, experts = 2 if family == BF16 else 1, max(groups, 1)
        x, y, w = m * k, m * n, experts * n * k
        moved = size * (x + w) + 2 * y if op == "mm" else size * (x + y) + 2 * w
        return max(_gemm_us(self, family, op, groups, m, n, k), self.copy_us(moved))

    def is_small(self, groups: int, m: int, n: int, k: int) -> bool:
        """Whether a product is smaller than all that were measured, in one of its dimensions."""
        measured = [row for row in self.gemm[BF16, "mm"] if bool(row[0]) == bool(groups)]
        shapes = [_axes(*row[:4]) for row in measured]
        smallest = [min(axis) for axis in zip(*shapes, strict=True)]
        return any(size < low for size, low in zip(_axes(groups, m, n, k)[:3], smallest))

    def quantize_us(self, op: str, elements: float) -> float:
        """Time of a quantizer, whose name is that of its op, for so many elements of its input."""
        if op in COLUMNS:
            of_rows, factor = COLUMNS[op]
            return factor * self.quantize_us(of_rows, elements)
        rows = self.quantize[op]
        if elements <= rows[0][0]:
            (low, low_us), (high, high_us) = rows[:2]
            line = low_us - (high_us - low_us) * (low - elements) / (high - low)
            # The line includes what a launch takes, unless the larger size is slower per element.
            return max(line, low_us * elements / low)
        for (low, low_us), (high, high_us) in zip(rows, rows[1:]):
            if elements <= high:
                return low_us + (high_us - low_us) * (elements - low) / (high - low)
        return rows[-1][1] * elements / rows[-1][0]

    def copy_us(self, bytes_moved: float) -> float:
        return bytes_moved / self.copy_gbps / 1e3

    def link_us(self, bytes_received: float) -> float:
        return bytes_received / self.link_gbps / 1e3

    def shard_us(self, recipe: str, elements: float) -> float:
        """Time to quantize a shard of a weight that is gathered in FP8."""
        return elements * _of_recipe(self.shard_ps, recipe) / 1e6

    def host_us(self, kind: str, recipe: str) -> float:
        """CPU time of one linear or grouped product, forward and backward."""
        return _of_recipe(self.host[kind], recipe)


def _of_recipe(values: dict[str, float], recipe: str) -> float:
    """The value of a recipe; a variant, such as blockwise_pow2, has that of its base."""
    return values[recipe if recipe in values else recipe.partition("_")[0]]


@functools.cache
def _gemm_us(times: Times, family: str, op: str, groups: int, m: int, n: int, k: int) -> float:
    rows = times.gemm[family, op]
    shape = _axes(groups, m, n, k)
    near = sorted((math.dist(shape, _axes(*row[:4])), row) for row in rows)[:NEAREST]
    weights = [max(distance, 0.05) ** -SHARPNESS for distance, _ in near]
    rates = [math.log(m_ * n_ * k_ / us) for _, (_, m_, n_, k_, us) in near]
    mean = sum(w * r for w, r in zip(weights, rates, strict=True)) / sum(weights)
    return m * n * k / math.exp(mean)


def _axes(groups: float, m: float, n: float, k: float) -> tuple[float, float, float, float]:
    groups = max(groups, 1)
    return math.log2(m / groups), math.log2(n), math.log2(k), math.log2(groups)


def family(scaling: Scaling) -> str:
    """The family of kernels that runs a GEMM whose left operand has this scaling."""
    if scaling is Scaling.NONE:
        return BF16
    return "rowwise" if scaling is Scaling.ROW else "blockwise"


def op_name(op: Any) -> str:
    return op_of(op)._schema.name.partition("::")[2]


@functools.cache
def load(gpu: str) -> Times:
    """The table of a GPU, such as "h200".

    Raises:
        ValueError: there is no table of it.
    """
    file = TABLES / f"{gpu}.json"
    if not file.is_file():
        there = ", ".join(repr(each.stem) for each in sorted(TABLES.glob("*.json")))
        raise ValueError(
            f"--gpu = {gpu!r}: allowed are {there}, of which there are measurements; to add a GPU, "
            "measure it with scripts/measure_plan.py and write its table with scripts/plan_table.py"
        )
    table = json.loads(file.read_text(encoding="utf-8"))
    gemm: dict[tuple[str, str], list[list[float]]] = {}
    for kind, op, *row in table.pop("gemm"):
        gemm.setdefault((kind, op), []).append(row)
    return Times(gemm=gemm, **table)
