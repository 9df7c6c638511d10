"""The plots of a convergence experiment's verdict."""

from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from compare_loss import compare
from converge_arms import BASELINE
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"baseline": "black", "bf16": "dimgray", "control": "tab:red"}
OTHERS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:cyan")
LINES = {"bf16": ("--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1))), "resumed": (":",)}


def styles_of(arms: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """How to draw each arm: bf16 in black and gray, the control in red, others in other colours."""
    styles, seen = {}, Counter[str]()
    for name, each in arms.items():
        role = each.arm.role
        kind = role if role in COLOURS else "other"
        colour = COLOURS.get(role, OTHERS[seen["other"] % len(OTHERS)])
        lines = LINES.get(role, ("-",))
        styles[name] = {"color": colour, "ls": lines[seen[kind] % len(lines)], "label": name}
        seen[kind] += 1
    return styles


def with_bars(judged: list[Any]) -> Any:
    """The judgement whose bars are shown: of FP8 or the control, with the most evaluations.

    Those of a perturbed bf16 arm are computed without it.
    """
    return max(judged, key=lambda each: (each.run.arm.role in ("fp8", "control"), len(each.steps)))


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    return np.convolve(values, np.full(window, 1 / window), mode="valid")


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
    for name, each in arms.items():
        if name == BASELINE or each.arm.reordered:
            continue
        gap = compare(base, each.run, last=max(1, max(base.series["loss"]) // 20))
        axes.plot(gap.smooth_steps, gap.smooth, lw=1.2, **styles[name])
        if each.arm.role == "bf16":
            band = np.maximum.accumulate(np.abs(gap.smooth))
            axes.fill_between(
                gap.smooth_steps, -band, band, color="gray", alpha=0.15, label="bf16 up to here"
            )
    axes.set(title="Gap of the training loss, smoothed", ylabel="%")


def held_out(axes: Axes, arms: dict[str, Any], styles: dict[str, Any]) -> None:
    for name, each in arms.items():
        points = sorted((step, found.loss) for step, found in each.held_out.items())
        axes.plot(*zip(*points), marker=".", lw=1.2, **styles[name])
    axes.set(title="Held-out loss", ylabel="nats per token")


def measured(axes: Axes, index: int, judged: list[Any], styles: dict[str, Any]) -> None:
    """One quantity of all judged arms, and what is allowed."""
    widest = with_bars(judged)
    measure = widest.measures[index]
    low = 0 if measure.name == "expert load" else -measure.bars
    axes.fill_between(widest.steps, low, measure.bars, color="tab:green", alpha=0.15)
    for each in judged:
        values = each.measures[index].values
        axes.plot(each.steps, values, marker=".", lw=1.2, **styles[each.run.name])
    limit = max(float(np.nanmax(each.measures[index].bars)) for each in judged)
    # A control that is far off would flatten everything else.
    axes.set_ylim(-4 * limit if np.any(low) else 0, 4 * limit)
    axes.set(title=f"{measure.name.capitalize()}: difference, allowed shaded", ylabel=measure.unit)


def draw(arms: dict[str, Any], judged: list[Any], out: Path) -> None:
    """Draws loss and held-out loss, their gaps and, for a MoE, the load of the experts.

    Args:
        arms: `ArmRun` by name.
        judged: the `Judgement`s on them.
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
            measured(axes, index, judged, styles)
        else:
            axes.set_axis_off()
    for axes in grid.flat:
        axes.grid(alpha=0.25)
        axes.set_xlabel("step")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    figure.savefig(out, format="png")
