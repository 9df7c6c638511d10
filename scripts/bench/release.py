"""Prints the table of a release from results of `plans`, and draws its chart.

    python scripts/bench release RESULT.json ... [--chart FILE.svg]

All results must be of one commit. Runs of a plan on one kind of card are repeats, whichever file
they are in: values are medians, and "spread %" is the distance from the slowest to the fastest run.
"x bf16" and the chart are relative to stock bf16, "FP8 alone" is the fastest blockwise arm to the
fastest of bf16 with speedups.
"""

import argparse
import json
import statistics
from pathlib import Path

from bench.plans import PLANS, RESULTS
from tables import Row, markdown_table

from titan_fp8.plan.train import TUNED
from titan_fp8.recipe import BF16

STOCK, SPEEDUPS = "stock bf16", "bf16 + speedups"
TITLES = {
    "llama3-8b": "Llama3-8B, 1 GPU, 1 x 8192",
    "llama3-8b-fsdp4": "Llama3-8B, FSDP 4, 1 x 8192",
    "llama3-8b-fsdp4-2048": "Llama3-8B, FSDP 4, 1 x 2048",
    "llama3-70b-tp4": "Llama3-70B, 6 of 80 layers, TP 4, 1 x 8192",
    "deepseek-16b-ep4-bf16": "DeepSeekV3-16B, EP 4, 4 x 4096",
    "qwen3-30b-ep4": "Qwen3-30B-A3B, 24 of 48 layers, EP 4, 2 x 4096",
    "qwen3-30b-ep2": "Qwen3-30B-A3B, 12 of 48 layers, EP 2, 2 x 4096",
    "deepseek-16b-ep2-6": "DeepSeekV3-16B, 6 of 27 layers, EP 2, 4 x 4096",
}
"""The plans of a release. Others have their own names in the table."""
Cells = dict[str, dict[str, list[Row]]]
"""Plan and card -> arm -> its runs."""


def read(files: list[Path]) -> tuple[str, Cells]:
    """Where the runs were made, and the runs; ValueError for what cannot be compared."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for file, result in zip(files, results):
        if not all(row.get("plan") in PLANS for row in result["rows"]):
            raise ValueError(f"{file} is no result of `python scripts/bench plans`")
    where = {f"commit {result['commit']}, torch {result['torch']}" for result in results}
    if len(where) > 1:
        raise ValueError(f"the results are of {' and of '.join(sorted(where))}: one is allowed")
    cells: Cells = {}
    for result in results:
        for row in result["rows"]:
            title = (
                f"{TITLES.get(row['plan'], row['plan'])}, {result['card'].removeprefix('NVIDIA ')}"
            )
            arm, *options = row["recipe"].split("+")
            arm = " + ".join([{BF16: STOCK, TUNED: SPEEDUPS}.get(arm, arm), *options])
            cells.setdefault(title, {}).setdefault(arm, []).append(row)
    return where.pop(), cells


def summary(runs: list[Row], base: float | None) -> Row:
    """The numbers of an arm; None if all of its runs failed, with the error of one that did."""
    done = [run for run in runs if not run["error"]]
    row: Row = dict.fromkeys(("tokens/s", "x bf16", "spread %", "GiB", "compute %"))
    if done:
        speeds = sorted(run["tokens/s"] for run in done)
        middle = float(statistics.median(speeds))
        row |= {"tokens/s": middle, "x bf16": middle / base if base else None}
        row |= {"spread %": 100 * (speeds[-1] - speeds[0]) / middle}
        row |= {key: statistics.median(float(r[key]) for r in done) for key in ("GiB", "compute %")}
    return row | {"runs": len(done), "error": next(filter(None, (r["error"] for r in runs)), None)}


def draw(rows: dict[str, dict[str, Row]], arms: list[str], file: Path) -> None:
    """A group of bars for each plan, with a bar for each arm; a failed one has none."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes, width = figure.add_subplot(), 0.8 / len(arms)
    for i, arm in enumerate(arms):
        at = [j + (i + 0.5) * width - 0.4 for j in range(len(rows))]
        heights = [of_plan.get(arm, {}).get("x bf16") or 0 for of_plan in rows.values()]
        bars = axes.bar(at, heights, width, label=arm)
        axes.bar_label(bars, [f"{x:.2f}" if x else "" for x in heights], fontsize=7)
    axes.set_xticks(range(len(rows)), [title.replace(", ", "\n") for title in rows])
    axes.set_ylabel("tokens/s relative to stock bf16")
    axes.axhline(1, color="black", linewidth=1)
    axes.legend(ncols=len(arms), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    with rc_context({"svg.hashsalt": "titan_fp8"}):  # equal files for equal results
        figure.savefig(file, format="svg", metadata={"Date": None})


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python scripts/bench release", None, __doc__)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--chart", type=Path, default=RESULTS / "speed.svg", metavar="FILE.svg")
    args = parser.parse_args(argv)
    try:
        where, cells = read(args.results)
    except (OSError, ValueError, KeyError) as error:
        parser.error(str(error))
    rows: dict[str, dict[str, Row]] = {}
    for title, runs in cells.items():
        base = summary(runs.get(STOCK, []), None)["tokens/s"]
        rows[title] = {arm: summary(each, base) for arm, each in runs.items()}
    arms = list(dict.fromkeys(arm for of_plan in rows.values() for arm in of_plan))
    table = []
    for title, of_plan in rows.items():
        texts = dict.fromkeys(arms, "not measured")
        for arm, row in of_plan.items():
            x = f", {row['x bf16']:.2f}x" if row["x bf16"] and arm != STOCK else ""
            texts[arm] = f"{row['tokens/s']:,.0f}{x}" if row["runs"] else "failed"
        speeds = [(arm, row["tokens/s"] or 0) for arm, row in of_plan.items()]
        fp8, bf16 = (
            max((speed for arm, speed in speeds if arm.startswith(name)), default=0)
            for name in ("blockwise", SPEEDUPS)
        )
        alone = f"{fp8 / bf16:.2f}x" if fp8 and bf16 else ""
        table.append({"model and plan": title} | texts | {"FP8 alone": alone})
    print(f"{where}; tokens/s per GPU\n\n{markdown_table(table)}\n")
    each = [{"model and plan": t, "arm": arm} | row for t in rows for arm, row in rows[t].items()]
    print(f"{markdown_table(each)}\n\nchart: {args.chart}")
    draw(rows, [arm for arm in arms if arm != STOCK], args.chart)
    return 0
