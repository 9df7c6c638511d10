"""The plan as text."""

import textwrap
from collections.abc import Iterable, Sequence

from titan_fp8.plan.costs import repeated
from titan_fp8.plan.run import Run
from titan_fp8.plan.step import Row, Step
from titan_fp8.plan.times import Times
from titan_fp8.recipe import BF16

WIDTH, BAR = 100, 24
COLUMNS = (
    *("module", "x", "E,M,N,K", "recipe", "bf16", "FP8", "quant", "gather", "CPU", "speed"),
    "MiB",
)
LEGEND = (
    "us per module and micro-batch, forward and backward: GEMMs in bf16 and in FP8, quantisers,",
    "FSDP2's gathers, CPU time that FP8 adds. MiB: GEMM inputs kept until backward, in bf16 and in",
    "FP8, without checkpointing.",
)


def text(run: Run, times: Times, step: Step, bf16: Step) -> str:
    """The table of layers, that of the step, and the predicted speed."""
    rows = [_cells(row, run) for row in step.rows]
    left = [
        f"{row.layer.name}: {row.layer.reason}" for row in step.rows if row.layer.recipe == BF16
    ]
    tokens = run.tokens * run.micro_batches
    lines = [
        f"{run.description}, {run.micro_batches} x {run.tokens} tokens per rank and step, "
        f"{times.gpu}",
        "",
        *table([COLUMNS, *rows], left=(0, 3)),
        "",
        *LEGEND,
        bullets("Left in high precision", left),
        "",
        *table(_parts(step, bf16), left=(0, 3, 4)),
        "",
        f"Predicted: {bf16.ms / step.ms:.2f}x of bf16, "
        f"{1e3 * tokens / bf16.ms:,.0f} -> {1e3 * tokens / step.ms:,.0f} tokens/s per rank.",
    ]
    return "\n".join(lines)


def bullets(title: str, items: Iterable[str]) -> str:
    items = list(items)
    wrapped = [textwrap.fill(f"- {item}", WIDTH, subsequent_indent="  ") for item in items]
    return "\n".join([f"\n{title}:", *wrapped]) if items else ""


def table(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Lines of aligned columns; the columns `left` are left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _cells(row: Row, run: Run) -> list[str]:
    layer, cost = row.layer, row.cost
    gemms, others = repeated(layer, run)
    shape = (
        (layer.groups, layer.m, layer.n, layer.k)
        if layer.groups
        else (
            layer.m,
            layer.n,
            layer.k,
        )
    )
    converted = layer.recipe != BF16
    return [
        layer.name.removeprefix("layers.*."),
        str(layer.count),
        ",".join(map(str, shape)),
        layer.recipe,
        f"{row.bf16.gemm(gemms):,.0f}",
        f"{cost.gemm(gemms):,.0f}" if converted else "",
        f"{cost.quantise(others):,.0f}" if converted else "",
        f"{cost.gather:,.0f}" if layer.ranks > 1 else "",
        f"{cost.host - row.bf16.host:+,.0f}" if converted else "",
        f"{row.speed:.2f}" if converted else "",
        f"{row.bf16.kept / 2**20:.0f}→{cost.kept / 2**20:.0f}" if converted else "",
    ]


def _parts(step: Step, bf16: Step) -> list[list[str]]:
    """Times in bf16 and in FP8, and bars of both."""
    parts = {part: (bf16.parts.get(part, 0), ms) for part, ms in step.parts.items()}
    longest = max(ms for pair in parts.values() for ms in pair)
    rows = [["ms per step", "bf16", "FP8", "bf16", "FP8"]]
    for part, pair in parts.items():
        bars = ("█" * round(BAR * ms / longest) for ms in pair)
        rows.append([part, *(f"{ms:,.1f}" for ms in pair), *bars])
    totals = {
        "GPU": (bf16.gpu, step.gpu),
        "CPU, beside the GPU": (bf16.host, step.host),
        "step: the slower of the two": (bf16.ms, step.ms),
    }
    return rows + [[name, *(f"{ms:,.1f}" for ms in pair), "", ""] for name, pair in totals.items()]
