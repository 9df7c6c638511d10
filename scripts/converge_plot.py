"""The plots of a convergence experiment's verdict."""

from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from compare_loss import compare
from converge_arms import BASELINE
from converge_stats import Differences
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = {"baseline": "black", "bf16": "dimgray", "control": "tab:red"}
OTHERS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:cyan")
LINES = {
    "bf16": ("--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1))),
    "control": ("-", "--"),
    "resumed": (":",),
}


def styles_of(arms: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """How to draw each arm: bf16 in black and gray, controls in red, others in other colors."""
    styles, seen = {}, Counter[str]()
    for name, each in arms.items():
        role = each.arm.role
        kind = role if role in COLORS else "other"
        color = COLORS.get(role, OTHERS[seen["other"] % len(OTHERS)])
        lines = LINES.get(role, ("-",))
        styles[name] = {"color": color, "ls": lines[seen[kind] % len(lines)], "label": name}
        seen[kind] += 1
    return styles


def with_bars(judged: list[Any]) -> Any:
    """The judgment whose bars are shown: of FP8 or the control, with the most evaluations.

    Those of a perturbed bf16 arm are computed without it.
    """
    return max(
        judged,
        key=lambda each: (
            bool(each.measures),
            each.run.arm.role in ("fp8", "control"),
            len(each.steps),
        ),
    )


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    return np.convolve(values, np.full(window, 1 / window), mode="valid")


def limit_of(curves: list[np.ndarray]) -> float:
    """The limit of an axis with these curves: a control far off would flatten everything else."""
    sizes = np.abs(np.concatenate([[0.01], *curves]))
    return 1.25 * sizes[np.isfinite(sizes)].max()


def training(axes: Axes, arms: dict[str, Any], styles: dict[str, Any]) -> None:
    """The training loss, as means over a fiftieth of the steps."""
    for name, each in arms.items():
        steps, losses = map(np.array, zip(*sorted(each.run.series["loss"].items())))
        window = max(1, len(steps) // 50)
        axes.plot(steps[window - 1 :], smooth(losses, window), lw=1.2, **styles[name])
    axes.set(title="Training loss", ylabel="nats per token")


def training_gap(axes: Axes, arms: dict[str, Any], styles: dict[str, Any]) -> None:
    """Its gap to the baseline, for arms that read the same text in the same order."""
    base = arms[BASELINE].run
    bf16: dict[int, float] = {}  # the largest gap of a bf16 arm by step
    shown = []
    for name, each in arms.items():
        if name == BASELINE or each.arm.reordered:
            continue
        gap = compare(base, each.run, last=max(1, max(base.series["loss"]) // 20))
        axes.plot(gap.smooth_steps, gap.smooth, lw=1.2, **styles[name])
        if each.arm.role != "control":
            shown.append(gap.smooth)
        if each.arm.role == "bf16":
            for step, value in zip(gap.smooth_steps, np.abs(gap.smooth)):
                bf16[step] = max(value, bf16.get(step, 0.0))
    if bf16:
        steps = sorted(bf16)
        band = np.maximum.accumulate([bf16[step] for step in steps])
        axes.fill_between(steps, -band, band, color="gray", alpha=0.15, label="bf16 up to here")
    limit = limit_of(shown)
    axes.set_ylim(-limit, limit)
    axes.set(title="Gap of the training loss, smoothed", ylabel="%")


def held_out(axes: Axes, arms: dict[str, Any], styles: dict[str, Any]) -> None:
    for name, each in arms.items():
        points = sorted((step, found.loss) for step, found in each.held_out.items())
        axes.plot(*zip(*points), marker=".", lw=1.2, **styles[name])
    axes.set(title="Held-out loss", ylabel="nats per token")


def measured(
    axes: Axes, index: int, arms: dict[str, Any], judged: list[Any], styles: dict[str, Any]
) -> None:
    """One quantity of all arms against their references, and what is allowed."""
    widest = with_bars(judged)
    measure = widest.measures[index]
    low = 0 if measure.name == "expert load" else -1
    axes.fill_between(widest.steps, low * measure.bars, measure.bars, color="tab:green", alpha=0.15)
    curves = {
        each.run.name: (each.steps, each.measures[index].values) for each in judged if each.measures
    }
    base = arms[BASELINE].held_out
    for name, each in arms.items():
        if name not in {BASELINE, *curves}:
            steps = np.array([step for step in widest.steps if step in each.held_out])
            if not steps.size:
                continue
            values = getattr(Differences(each.held_out, base, steps), measure.quantity)
            curves[name] = steps, values
    for name in sorted(curves, key=list(arms).index):
        axes.plot(*curves[name], marker=".", lw=1.2, **styles[name])
    shown = [values for name, (_, values) in curves.items() if arms[name].arm.role != "control"]
    limit = limit_of([measure.bars, *shown])
    axes.set_ylim(low * limit, limit)
    axes.set(title=f"{measure.name.capitalize()}: difference, allowed shaded", ylabel=measure.unit)


def draw(arms: dict[str, Any], judged: list[Any], out: Path) -> None:
    """Draws loss and held-out loss, their gaps and, for a MoE, the load of the experts.

    Args:
        arms: `ArmRun` by name.
        judged: the `Judgment`s on them.
    """
    matplotlib.rcParams["text.parse_math"] = False
    figure = Figure(figsize=(13, 12), dpi=110, layout="constrained")
    grid = figure.subplots(3, 2)
    styles = styles_of(arms)
    training(grid[0, 0], arms, styles)
    training_gap(grid[0, 1], arms, styles)
    held_out(grid[1, 0], arms, styles)
    for index, axes in enumerate((grid[1, 1], grid[2, 0], grid[2, 1])):
        if index < len(with_bars(judged).measures):
            measured(axes, index, arms, judged, styles)
        else:
            axes.set_axis_off()
    for axes in grid.flat:
        axes.grid(alpha=0.25)
        axes.set_xlabel("step")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    figure.savefig(out, format="png")
