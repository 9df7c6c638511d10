"""Compares the loss of training runs with that of a baseline run.

    python scripts/compare_loss.py BASELINE RUN [RUN ...] [--noise RUN] [--out loss.png]

A RUN is a dump folder, an event file or a log of torchtitan (see titan_logs.py). A run passes if
its mean loss over the last N training steps (--last) differs from the baseline's by at most the
allowed gap, relative to the baseline. The N steps end with the last one that both runs logged, and
the mean is over those of them that both logged: two losses if N = 20 and every tenth step was
logged. The allowed gap is the tolerance or, if it is larger, the gap of --noise: a second baseline
run, with another seed or in another precision. The smoothed gap at a step is the same quantity over
the N steps up to it. A run that equals the baseline at every step fails as well: nothing was
converted.

The table also shows the ratio of tokens/s, each the median from step 6 on, and that of peak memory.
It shows no speed if one of the two runs emulated FP8 or had no accelerator.

Exit status: 0 if every run passes; 1 if a run fails or has a NaN or an Inf; 2 if the input cannot
be compared.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from tables import printable
from titan_logs import InputError, Run, read_run

from titan_fp8.modules.report import text_table

FP32_STEP = 2.0**-23  # relative error of the ratio of two losses rounded to FP32
LOG_ROUNDING = 6e-6  # half of the last digit in a log, plus the rounding to FP32


@dataclass
class Gap:
    """The gap between a run and the baseline over their common steps, in % of the baseline."""

    run: Run
    base: Run
    steps: np.ndarray
    losses: np.ndarray
    base_losses: np.ndarray
    smooth_steps: np.ndarray  # the last step of each whole window
    means: np.ndarray  # of the losses in each window
    base_means: np.ndarray

    def __post_init__(self) -> None:
        self.per_step = percent(self.losses, self.base_losses)
        self.smooth = percent(self.means, self.base_means)
        self.decisive = float(self.smooth[-1])
        magnitude = np.nan_to_num(np.abs(self.smooth), nan=-1.0)
        self.largest_at = int(np.argmax(magnitude))

    @property
    def same_steps(self) -> bool:
        return len(self.steps) == len(self.run.series["loss"]) == len(self.base.series["loss"])

    def is_zero(self) -> bool:
        slack = LOG_ROUNDING if self.run.from_log != self.base.from_log else 0.0
        return bool(np.all(np.abs(self.losses - self.base_losses) <= slack))

    def fault(self, allowed: float) -> str | None:
        """Why the run fails, if it does."""
        if fault := self.run.non_finite():
            return fault
        if self.is_zero():
            return "equal to the baseline at every step: nothing was converted"
        if not abs(self.decisive) <= allowed + 100 * FP32_STEP:
            return f"the gap of {self.decisive:+.5f} % exceeds the allowed {allowed:.5g} %"
        return None


def percent(x: np.ndarray, base: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return 100 * (x - base) / np.abs(base)


def span(steps: Iterable[int]) -> str:
    ordered = sorted(steps)
    return f"{ordered[0]}-{ordered[-1]}"


def compare(base: Run, run: Run, last: int) -> Gap:
    """The gap over windows of `last` training steps; a shorter run is a single window."""
    ours, theirs = run.series["loss"], base.series["loss"]
    steps = np.array(sorted(ours.keys() & theirs.keys()))
    if not steps.size:
        spans = f"{span(ours)} and {span(theirs)}"
        raise InputError(f"{run.label} and {base.label} have no step in common: {spans}")
    losses, base_losses = (np.array([loss[step] for step in steps]) for loss in (ours, theirs))
    last = min(last, int(steps[-1] - steps[0]) + 2)  # more would make no window, too
    whole = np.flatnonzero(steps - last >= steps[0] - 1)
    ends = whole if whole.size else np.array([len(steps) - 1])
    starts = np.searchsorted(steps, steps[ends] - last, side="right")
    with np.errstate(invalid="ignore"):
        means, base_means = (
            np.array([x[i : j + 1].mean() for i, j in zip(starts, ends, strict=True)])
            for x in (losses, base_losses)
        )
    return Gap(run, base, steps, losses, base_losses, steps[ends], means, base_means)


def distinct_labels(paths: list[Path]) -> list[str]:
    """The shortest path suffixes that are unique; a path given twice gets a number."""
    parts = [path.resolve().parts for path in paths]
    size = 1
    while len({p[-size:] for p in parts}) < len(set(parts)):
        size += 1
    names = [printable("/".join(p[-size:])) for p in parts]
    seen = [names[:i].count(name) for i, name in enumerate(names)]
    return [
        f"{name} ({count + 1})" if count else name for name, count in zip(names, seen, strict=True)
    ]


def ratio(value: float, base: float) -> str:
    return f"{value / base:.3f}" if value > 0 and base > 0 else "n/a"


def validation(gap: Gap) -> str:
    ours, theirs = (run.series.get("validation loss", {}) for run in (gap.run, gap.base))
    if not (common := ours.keys() & theirs.keys()):
        return "n/a"
    step = max(common)
    change = percent(np.array(ours[step]), np.array(theirs[step]))
    return f"{ours[step]:.5f} ({change:+.5f} % at step {step})"


def column(gap: Gap) -> list[str]:
    run, base = gap.run, gap.base
    validated = base.series.get("validation loss")
    if run is base:
        base_validation = f"{validated[max(validated)]:.5f}" if validated else "n/a"
        gaps, rest = ["-", "-"], [base_validation, "-", "-"]
    else:
        largest, step = gap.smooth[gap.largest_at], gap.smooth_steps[gap.largest_at]
        gaps = [f"{gap.decisive:+.5f} %", f"{largest:+.5f} % at step {step}"]
        speed = ratio(run.tps(), base.tps())
        rest = [validation(gap), speed, ratio(run.peak_memory, base.peak_memory)]
    beside = "" if gap.same_steps else " (baseline {:.5f})"
    final = f"{gap.losses[-1]:.5f}" + beside.format(gap.base_losses[-1])
    mean = f"{gap.means[-1]:.5f}" + beside.format(gap.base_means[-1])
    return [run.label, span(run.series["loss"]), final, mean, *gaps, *rest]


def table(gaps: list[Gap], last: int) -> str:
    names = ["", "steps", "final loss", f"mean of last {last} steps", "gap of the means"]
    names += ["largest smoothed gap", "validation loss", "tokens/s ratio", "peak memory ratio"]
    return text_table(zip(names, *map(column, gaps), strict=True))


def notes(gaps: list[Gap], last: int) -> Iterator[str]:
    for gap in gaps:
        label, steps = gap.run.label, gap.steps
        if not gap.same_steps:
            logged = [len(run.series["loss"]) for run in (gap.run, gap.base)]
            counts = f"{logged[0]} steps logged, {gap.base.label} {logged[1]}"
            yield f"{label} has {counts}: compared over the {len(steps)} in common, {span(steps)}"
        if steps[-1] - steps[0] + 1 < last:
            yield f"{label} has fewer than {last} steps to compare: the means are over all of them"
        if gap.run.from_log:
            yield f"{label} is a log: its losses have five decimals"
    if silent := [gap.run.label for gap in gaps if gap.run.tps() > 0 and not gap.run.has_log]:
        yield f"no log found with {', '.join(silent)}: if FP8 was emulated, ignore the speed"


def draw(gaps: list[Gap], noise: Gap | None, allowed: float, last: int, out: Path) -> None:
    """Draws the losses, and below them the gaps per step (thin) and smoothed (thick)."""
    matplotlib.rcParams["text.parse_math"] = False  # labels are paths, which may hold dollar signs
    base = gaps[0].base
    figure = Figure(figsize=(10, 8), dpi=130, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    steps, losses = zip(*sorted(base.series["loss"].items()), strict=True)
    marker = "." if len(steps) < 40 else ""  # a line through a single point would be invisible
    top.plot(steps, losses, marker=marker, color="black", alpha=0.3, lw=5, label=base.label)
    label = f"allowed: {allowed:.3g} %"
    bottom.axhspan(-allowed, allowed, color="tab:green", alpha=0.15, label=label)
    bottom.axhline(0, color="black", alpha=0.35, linewidth=1)
    for i, gap in enumerate(gaps):
        style = {"color": f"C{i}", "ls": "-", "marker": "." if len(gap.steps) < 40 else ""}
        if gap is noise:
            style |= {"color": "dimgray", "ls": "--"}
        top.plot(gap.steps, gap.losses, linewidth=1.3, label=gap.run.label, **style)
        bottom.plot(gap.steps, gap.per_step, linewidth=0.7, alpha=0.4, color=style["color"])
        bottom.plot(gap.smooth_steps, gap.smooth, linewidth=2, **style)
    peaks = [abs(gap.smooth[gap.largest_at]) for gap in gaps]
    limit = 1.4 * max([allowed, *filter(math.isfinite, peaks)]) or 1.0
    bottom.set_ylim(-limit, limit)
    top.set(ylabel="loss (nats per token)", title=f"Training loss, baseline: {base.label}")
    bottom.set(xlabel="step", ylabel="gap to the baseline (%)")
    bottom.set_title(f"Gap of the means over {last} steps (thick) and per step (thin)")
    for axes, place in ((top, "upper right"), (bottom, "upper left")):
        axes.grid(alpha=0.25)
        axes.legend(loc=place, framealpha=0.9)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")


def parse(argv: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the baseline first")
    parser.add_argument("--noise", type=Path, metavar="RUN", help="a second baseline run")
    parser.add_argument("--tolerance", type=float, default=0.25, help="percent (default: 0.25)")
    parser.add_argument("--last", type=int, default=20, metavar="N", help="steps (default: 20)")
    parser.add_argument("--out", type=Path, default=Path("compare_loss.png"), help="plot file")
    args = parser.parse_args(argv)
    if len(args.runs) < 2:
        parser.error("name a baseline and at least one RUN to compare with it")
    if args.noise in args.runs[1:]:
        parser.error(f"--noise = {args.noise} is a RUN to compare: name one like the baseline")
    if args.last < 1:
        parser.error(f"--last must be at least 1, not {args.last}")
    if not 0 <= args.tolerance < math.inf:
        parser.error(f"--tolerance must be a percentage, 0 or more, not {args.tolerance}")
    return args


def allowed_gap(noise: Gap | None, tolerance: float) -> float:
    if noise is None:
        print(f"allowed gap: {tolerance:.5g} %, the tolerance")
        return tolerance
    own = abs(noise.decisive)
    allowed = max(tolerance, own) if math.isfinite(own) else tolerance
    sources = f"tolerance {tolerance:.5g} %, noise {own:.5g} %"
    print(f"allowed gap: {allowed:.5g} %, the larger of {sources}")
    if noise.is_zero():
        print(f"note: {noise.run.label} equals the baseline at every step: it measures no noise")
    return allowed


def report(args: argparse.Namespace) -> bool:
    """Prints the comparison and draws it; returns whether every run passes."""
    paths = args.runs + ([args.noise] if args.noise else [])
    labels = distinct_labels(paths)
    if args.noise:
        labels[-1] += " (noise)"
    runs = [read_run(path, label) for path, label in zip(paths, labels, strict=True)]
    own, *gaps = [compare(runs[0], run, args.last) for run in runs]
    print(table([own, *gaps], args.last))
    for note in notes([own, *gaps], args.last):
        print(f"note: {note}")
    noise = gaps[-1] if args.noise else None
    allowed = allowed_gap(noise, args.tolerance)
    faults = {gap.run.label: gap.run.non_finite() for gap in (own, noise) if gap}
    for gap in gaps[: len(args.runs) - 1]:
        faults[gap.run.label] = gap.fault(allowed)
    for label, fault in faults.items():
        print(f"FAIL  {label}: {fault}" if fault else f"ok    {label}")
    draw(gaps, noise, allowed, args.last, args.out)
    print(f"plot: {printable(args.out)}")
    return not any(faults.values())


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        return 0 if report(args) else 1
    except (InputError, OSError) as error:
        print(f"compare_loss: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
