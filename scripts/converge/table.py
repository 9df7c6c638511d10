"""The answer of the paired runs: how far the loss of each arm is from that of bf16, and how surely.

    python scripts/converge/table.py RESULTS.jsonl ... [--plot OUT.png] [--page PAGE.md]

prints a table in Markdown for each model, or writes them into a page, between the comment that
names this file and the next one. A difference is that of two runs with the same seed, in
per cent of bf16's loss. "a ± b" is the mean over the seeds, and half of its 95 % confidence
interval by Student's t. An arm is, by its held-out loss at the end,

    equivalent  if the interval lies within ±0.25 %
    differs     if the interval contains neither zero nor the mean of the null
    not shown   to be either, otherwise
    not finite  if a loss is NaN or Inf

docs/convergence_method.md explains why. The last column says how many more seeds would bring half
of the interval down to 0.1 %, or 0.25 % for models with experts.
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from run import ARMS
from scipy import stats

BASELINE, NULL, CONTROL = "bf16", "null", "control"
TOLERANCE = 0.25  # per cent
GOAL_DENSE, GOAL_EXPERTS = 0.1, 0.25
LEVEL = 0.95
PARTS = {"tenth": "a tenth", "third": "a third", "two_thirds": "two thirds", "end": "the end"}
LAST_THIRD = "last_third"
SAME = ("weights", "order", "steps", "tokens", "world")
"""What two runs of one seed must have in common."""
MOST_SEEDS = 1000


def student(n: int) -> float:
    """Student's t for the mean of n values."""
    return stats.t.ppf((1 + LEVEL) / 2, n - 1)


@dataclass(frozen=True)
class Interval:
    """A mean, and half of its confidence interval; infinite for fewer than two values."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Interval":
        if len(values) < 2:
            return cls(float(values.mean()) if len(values) else np.nan, np.inf)
        return cls(float(values.mean()), float(student(len(values)) * stats.sem(values)))

    def contains(self, value: float) -> bool:
        return abs(value - self.mean) <= self.half

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.half:.3f}" if np.isfinite(self.half) else "-"


def seeds_needed(values: np.ndarray, goal: float) -> int | None:
    """How many values like these have an interval of at most ± `goal`; None for very many."""
    spread = values.std(ddof=1)
    enough = (n for n in range(2, MOST_SEEDS) if student(n) * spread / np.sqrt(n) <= goal)
    return next(enough, None)


def verdict(end: Interval, null: float) -> str:
    """What the interval of an arm shows, given the mean of the null."""
    if not np.isfinite(end.mean):
        return "not finite"
    within = abs(end.mean) + end.half <= TOLERANCE
    differs = not end.contains(0.0) and not end.contains(null)
    if within:
        return "equivalent, yet differs" if differs else "equivalent"
    return "differs" if differs else "not shown"


class Model:
    """The runs of one model, by arm and seed."""

    def __init__(self, name: str):
        self.name = name
        self.runs: dict[str, dict[int, dict]] = {}

    @property
    def one(self) -> dict:
        return next(iter(self.runs[BASELINE].values()))

    @property
    def goal(self) -> float:
        return GOAL_EXPERTS if self.one["experts"] else GOAL_DENSE

    def add(self, run: dict) -> None:
        """Raises ValueError for a run of another experiment, and for one that is there already."""
        other = next((run for runs in self.runs.values() for run in runs.values()), run)
        if run["experiment"] != other["experiment"]:
            raise ValueError(
                f"{self.name}: the results mix runs with different TOMLs, texts or flags"
            )
        if run["seed"] in self.runs.setdefault(run["arm"], {}):
            raise ValueError(f"{self.name}: {run['arm']}, seed {run['seed']} is there twice")
        self.runs[run["arm"]][run["seed"]] = run

    def pairs(self, arm: str) -> list[tuple[dict, dict]]:
        """The runs of an arm with that of bf16 of the same seed.

        Raises:
            ValueError: they did not start from the same weights and read the same text.
        """
        baseline = self.runs.get(BASELINE, {})
        found = []
        for seed, run in sorted(self.runs.get(arm, {}).items()):
            if seed not in baseline:
                continue
            for key in SAME:
                if not np.isclose(run[key], baseline[seed][key], rtol=1e-9, atol=0):
                    raise ValueError(
                        f"{self.name}: {arm} and {BASELINE} of seed {seed} are no pair: {key} is "
                        f"{run[key]} and {baseline[seed][key]}"
                    )
            found.append((run, baseline[seed]))
        return found

    def differences(self, arm: str, part: str) -> np.ndarray:
        """(seeds,): in per cent of bf16's loss."""
        pairs = [(loss(run, part), loss(base, part)) for run, base in self.pairs(arm)]
        return np.array([100 * (ours - theirs) / theirs for ours, theirs in pairs])

    def arms(self) -> list[str]:
        """Those with pairs, in the order of run.py: the null is the first."""
        return [arm for arm in ARMS if arm != BASELINE and self.pairs(arm)]

    def end(self, arm: str) -> Interval:
        return Interval.of(self.differences(arm, "end"))

    def null(self) -> float:
        return self.end(NULL).mean if NULL in self.arms() else 0.0


def loss(run: dict, part: str) -> float:
    return run[LAST_THIRD] if part == LAST_THIRD else run["held_out"][part]


def read(files: list[Path]) -> list[Model]:
    models: dict[str, Model] = {}
    for file in files:
        for line in file.read_text().splitlines():
            run = json.loads(line)
            models.setdefault(run["model"], Model(run["model"])).add(run)
    for model in models.values():
        if BASELINE not in model.runs:
            raise ValueError(f"{model.name}: the results have no runs of {BASELINE}")
    return [*models.values()]


def more_seeds(model: Model, arm: str) -> str:
    values = model.differences(arm, "end")
    if len(values) < 2 or not np.isfinite(values).all():
        return "-"
    needed = seeds_needed(values, model.goal)
    return f"over {MOST_SEEDS}" if needed is None else str(max(0, needed - len(values)))


def table(model: Model) -> str:
    one, null = model.one, model.null()
    runs = [run for runs in model.runs.values() for run in runs.values()]
    devices, commits = ({run[key] for run in runs} for key in ("device", "commit"))
    versions = {f"{name} {v}" for run in runs for name, v in run["versions"].items()}
    held_out = np.mean([run["held_out"]["end"] for run in model.runs[BASELINE].values()])
    parts = [f"held out, {name}" for name in PARTS.values()]
    heads = ["arm", "seeds", *parts, "training, last third", "result", f"seeds to ±{model.goal} %"]
    lines = [
        f"### {model.name}",
        "",
        f"{one['steps']:,} steps, {one['tokens'] / 1e6:.1f} million tokens a run. bf16 ends at a "
        f"held-out loss of {held_out:.4f}. Differences from it in per cent.",
        "",
        f"| {' | '.join(heads)} |",
        "|---|" + "--:|" * 6 + "---|--:|",
    ]
    for arm in model.arms():
        end = model.end(arm)
        intervals = [Interval.of(model.differences(arm, part)) for part in (*PARTS, LAST_THIRD)]
        cells = [f"`{arm}`", str(len(model.pairs(arm))), *map(str, intervals)]
        cells += ["the null" if arm == NULL else verdict(end, null), more_seeds(model, arm)]
        lines.append(f"| {' | '.join(cells)} |")
    facts = [", ".join(sorted(each)) for each in (devices, versions, commits)]
    lines += ["", f"{found(model)}{facts[0]}; {facts[1]}; commit {facts[2]}.", ""]
    return "\n".join(lines)


def found(model: Model) -> str:
    """In how many seeds the control is further from bf16 than any run of the null."""
    null, control = (model.differences(arm, "end") for arm in (NULL, CONTROL))
    if not len(null) or not len(control):
        return "No control ran. "
    count = int((control > np.abs(null).max()).sum())
    return f"The control is found in {count} of {len(control)} seeds: it is above every null. "


def draw(models: list[Model], out: Path) -> None:
    """A panel for each model: the interval of each arm, and its differences as dots."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    size = (6 * len(models), 1.2 + 0.34 * max(len(model.arms()) for model in models))
    figure = Figure(size, layout="tight")
    for model, panel in zip(models, figure.subplots(1, len(models), squeeze=False)[0]):
        panel.axvspan(-TOLERANCE, TOLERANCE, color="0.92")
        panel.axvline(0, color="0.6", linewidth=0.8)
        arms = model.arms()[::-1]
        for row, arm in enumerate(arms):
            end, values = model.end(arm), model.differences(arm, "end")
            color = "0.4" if arm == NULL else "C0"
            panel.plot(values, [row] * len(values), ".", color=color, alpha=0.35, markersize=5)
            half = end.half if np.isfinite(end.half) else 0
            panel.errorbar(end.mean, row, xerr=half, fmt="o", color=color, capsize=3, markersize=4)
        panel.set_yticks(range(len(arms)), arms)
        panel.set_xscale("symlog", linthresh=1.0)
        ticks = [-1, -0.5, -0.25, 0, 0.25, 0.5, 1, 3, 10, 30]
        low, high = panel.get_xlim()
        panel.set_xticks([t for t in ticks if low <= t <= high or abs(t) <= TOLERANCE])
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_title(model.name)
        panel.set_xlabel("held-out loss at the end, % from bf16 of the same seed")
    figure.savefig(out, dpi=120)


def insert(tables: str, page: Path) -> None:
    """Puts the tables into a page, in place of earlier ones."""
    text = page.read_text(encoding="utf-8")
    parts = re.split(r"(<!-- .*table\.py.* -->\n)(?s:.*?)(?=<!--)", text)
    if len(parts) != 3:
        raise ValueError(f"{page} must have one comment that names table.py, and one after it")
    page.write_text("".join((*parts[:2], "\n", tables, "\n", parts[2])), encoding="utf-8")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--plot", type=Path, metavar="OUT.png")
    parser.add_argument("--page", type=Path, metavar="PAGE.md")
    args = parser.parse_args(argv)
    try:
        models = read(args.results)
        tables = "\n".join(map(table, models))
        insert(tables, args.page) if args.page else print(tables, end="")
    except (OSError, ValueError) as error:
        print(f"table.py: {error}", file=sys.stderr)
        return 2
    if args.plot:
        draw(models, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
