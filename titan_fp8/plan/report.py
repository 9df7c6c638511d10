"""The plan as text."""

import textwrap
from collections.abc import Iterable, Sequence

from titan_fp8.plan.costs import gemm_us, quantize_us
from titan_fp8.plan.run import Layer, Run
from titan_fp8.plan.step import Row, Step
from titan_fp8.plan.times import Times
from titan_fp8.recipe import BF16

WIDTH, BAR = 100, 24
COLUMNS = (
    "module",
    "x",
    "E,M,N,K",
    "recipe",
    "bf16",
    "FP8",
    "quant",
    "gather",
    "CPU",
    "speed",
    "MiB",
)
LEGEND = (
    "us per module and micro-batch, forward and backward, with what activation checkpointing",
    "repeats: GEMMs in bf16 and in FP8, quantizers (less the SwiGLU kernels that they replace),",
    "FSDP2's gathers, CPU time that FP8 adds. speed: of the GPU, without gathers. MiB: GEMM inputs",
    "kept until backward, in bf16 and in FP8, without checkpointing.",
)

NOT_KERNELS = {
    "dense_ps": "elementwise kernels",
    "moe_ps": "permutation",
    "optimizer_ps.float32": "optimizer",
    "optimizer_ps.bfloat16": "optimizer",
    "reduce_ps": "FSDP2's copies of gradients",
    "whole_ps": "FSDP2's copies of whole experts",
    "shard_ps": "quantizing shards",
    "link_gbps": "collectives",
    "exposed": "how far collectives overlap",
    "host.block_us": "CPU time of dense blocks",
    "host.fsdp_block_us": "what FSDP2 adds to it",
    "host.several_ranks": "what several ranks add",
    "host.moe_block_us": "CPU time of MoE blocks",
    "host.moe_tp_block_us": "CPU time of MoE blocks under TP",
    "host.fsdp_all_gather": "CPU time of fsdp_all_gather",
}
"""Entries of a table that come from runs, in words."""
NOT_MEASURED = {
    "scaled": "scaled by the bandwidth of copies from",
    "taken": "taken as they are from",
    "estimated": "estimated from runs on",
}
"""Where an entry that was not measured on the card comes from; the card of the runs follows."""


def text(run: Run, times: Times, step: Step, bf16: Step) -> str:
    """The table of layers, that of the step, and the predicted speed."""
    rows = [_cells(row, run) for row in step.rows]
    left = [
        f"{row.layer.name}: {row.layer.reason}" for row in step.rows if row.layer.recipe == BF16
    ]
    # The ranks of TP and PP work on the same tokens.
    tokens = run.tokens * run.batches.micro_batches / (run.dims.tp * run.dims.pp)
    shared = f", the same for {run.dims.tp} ranks of TP" * run.dims.tp_enabled
    lines = [
        f"{run.description}, {run.batches.micro_batches} x {run.tokens} tokens per rank and step"
        f"{shared}, {times.gpu}",
        "",
        *table([COLUMNS, *rows], left=(0, 3)),
        "",
        *LEGEND,
        bullets("Left in high precision", left),
        *not_measured(run, times),
        *extrapolated(step, times),
        "",
        *table(_parts(step, bf16), left=(0, 3, 4)),
        "",
        f"Predicted: {bf16.ms / step.ms:.2f}x of bf16, "
        f"{1e3 * tokens / bf16.ms:,.0f} -> {1e3 * tokens / step.ms:,.0f} tokens/s per GPU.",
    ]
    return "\n".join(lines)


def not_measured(run: Run, times: Times) -> list[str]:
    """Lines that say which of the times behind this plan were not measured on its card."""
    gathers = any(layer.gathers_fp8 for layer in run.layers)
    unused = {
        "moe_ps": not run.moe_blocks,
        "optimizer_ps.float32": run.dtype != "float32",
        "optimizer_ps.bfloat16": run.dtype != "bfloat16",
        "reduce_ps": not run.is_sharded,
        "whole_ps": not (run.is_sharded and 1 in run.parameters),
        "shard_ps": not gathers,
        "link_gbps": not (run.is_sharded or run.dims.ep_enabled or run.dims.tp_enabled),
        "exposed": not run.is_sharded,
        "host.fsdp_block_us": not run.is_sharded or run.moe_blocks == run.blocks,
        "host.several_ranks": not run.is_sharded or bool(run.moe_blocks),
        "host.block_us": run.moe_blocks == run.blocks,
        "host.moe_block_us": not run.moe_blocks or run.dims.tp_enabled,
        "host.moe_tp_block_us": not (run.moe_blocks and run.dims.tp_enabled),
        "host.fsdp_all_gather": not gathers,
    }
    lines = []
    for how, words in NOT_MEASURED.items():
        entries = [
            (name, times.sources[entry]["card"])
            for entry, name in NOT_KERNELS.items()
            if times.sources[entry]["how"] == how and not unused.get(entry)
        ]
        if entries:
            names, cards = zip(*entries)
            lines.append(f"{words} {cards[0]}: {', '.join(names)}")
    return [bullets(f"Not measured on {times.gpu}", lines)] if lines else []


def extrapolated(step: Step, times: Times) -> list[str]:
    """Lines that name the layers whose shapes are smaller than any that were measured."""
    lines = [
        f"{layer.name}: E,M,N,K = {_shape(layer)}"
        for layer in (row.layer for row in step.rows)
        if times.is_small(layer.groups, layer.m, layer.n, layer.k)
    ]
    title = "Smaller than any measured shape, so times may be too short"
    return [bullets(title, lines)] if lines else []


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


def _shape(layer: Layer) -> str:
    groups = (layer.groups,) if layer.groups else ()
    return ",".join(map(str, (*groups, layer.m, layer.n, layer.k)))


def _cells(row: Row, run: Run) -> list[str]:
    layer, cost = row.layer, row.cost
    converted = layer.recipe != BF16
    return [
        (layer.name if layer.count > 1 else layer.fqns[0]).removeprefix("layers.*."),
        str(layer.count),
        _shape(layer),
        layer.recipe,
        f"{gemm_us(layer, row.bf16):,.0f}",
        f"{gemm_us(layer, cost):,.0f}" if converted else "",
        f"{quantize_us(layer, cost, run):,.0f}" if converted else "",
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
        "GPU, all of the above": (bf16.gpu, step.gpu),
        "GPU, forward": (bf16.gpu_forward, step.gpu_forward),
        "CPU, forward": (bf16.host_forward, step.host_forward),
        "GPU, forward and backward": (bf16.passes, step.passes),
        "CPU, forward and backward": (bf16.host, step.host),
        "GPU waits for the CPU": (bf16.waiting, step.waiting),
        "step: GPU and waiting": (bf16.ms, step.ms),
    }
    return rows + [[name, *(f"{ms:,.1f}" for ms in pair), "", ""] for name, pair in totals.items()]
