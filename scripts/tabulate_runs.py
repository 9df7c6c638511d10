"""Tabulates training runs for docs/benchmarks.md: speed, peak memory and loss, beside the baseline.

    python scripts/tabulate_runs.py BASELINE RUN [RUN ...] --json FILE --title ... --about ...

A RUN is a dump folder of torchtitan (see titan_logs.py). Speed is the median of tokens/s per GPU
from step 6 on. The loss is the mean over those of the last N training steps that the run and the
baseline logged, and the gap is relative to the baseline. compare_loss.py judges the same numbers;
this script only writes them down.
"""

import argparse
from pathlib import Path

import bench_common
from compare_loss import compare, distinct_labels
from tables import Row
from titan_logs import SPEED_FROM_STEP, InputError, Run, read_run


def row_of(run: Run, base: Run, last: int) -> Row:
    gap, tps = compare(base, run, last), run.tps()
    is_base = run is base
    return {
        "run": run.label,
        "tokens/s": tps or None,
        "x bf16": tps / base.tps() if tps and base.tps() and not is_base else None,
        "GiB": run.peak_memory or None,
        "steps": len(gap.steps),
        "loss": float(gap.means[-1]),
        "gap %": None if is_base else gap.decisive,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the baseline first")
    parser.add_argument("--last", type=int, default=50, metavar="N", help="steps (default: 50)")
    parser.add_argument("--title", required=True, help="heading of the table")
    parser.add_argument("--about", required=True, help="one sentence: what was trained, and how")
    bench_common.add_json_argument(parser)
    args = parser.parse_args(argv)
    labels = distinct_labels(args.runs)
    try:
        runs = [read_run(path, label) for path, label in zip(args.runs, labels, strict=True)]
    except (InputError, OSError) as error:
        parser.error(str(error))
    rows = [row_of(run, runs[0], args.last) for run in runs]
    facts = {
        "tokens/s": f"per GPU, median from step {SPEED_FROM_STEP} on",
        "loss": f"mean of the last {args.last} steps",
    }
    bench_common.report(rows, args.json, args.title, args.about, **facts)


if __name__ == "__main__":
    main()
