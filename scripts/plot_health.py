"""Draws the health of FP8 in a training run, layers by steps, from its TensorBoard event files.

    python scripts/plot_health.py RUN [--out health.png]

A RUN is a dump folder, a TensorBoard folder or an event file of a torchtitan run with `health_freq`
(see titan_logs.py). Each picture has a row for each layer and a column for each step that was
observed. A layer has the color of its worst operand. Crosses mark steps in which an operand of the
layer held NaN or Inf. The last picture, for experts, shows how uneven their tokens were.

Exit status: 0; 2 if there is nothing to draw.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from tables import printable
from titan_logs import InputError, merge, read_folder

from titan_fp8.health.report import kind_of

NAMED_ROWS = 48
"""So many names of layers fit beside a picture."""
STEP_DIGITS = 30
"""So many digits of steps fit below it."""

Values = dict[str, dict[int, float]]
"""Tag or layer -> step -> value."""


class Picture(NamedTuple):
    title: str
    norm: Normalize
    unit: Any  # the format of numbers at the color bar
    values: Values


def read_health(run: Path) -> Values:
    """The values of each tag of health by step; the value written last wins.

    Raises:
        InputError: there is no run at `run`, more than one, or one without health.
    """
    scalars, _ = read_folder(run)
    found = merge(each for each in scalars if each.name.startswith("health_"))
    if not found:
        raise InputError(
            f"{run} has no health of FP8: train with --quantize.linear.titan_fp8.health_freq 10"
        )
    return found


def by_layer(health: Values, name: str) -> Values:
    """The series of one statistic of the layers."""
    start = f"health_layer_{name}/"
    return {tag.removeprefix(start): of for tag, of in health.items() if tag.startswith(start)}


def unevenness(health: Values) -> Values:
    """The tokens of the expert that has most, over the mean."""
    start, found = "health_tokens_per_expert/", {}
    for tag, most in health.items():
        if tag.startswith(start) and tag.endswith("/max"):
            mean = health[tag.removesuffix("max") + "mean"]
            module = tag.removeprefix(start).removesuffix("/max")
            found[module] = {step: value / mean[step] for step, value in most.items() if value}
    return found


def pictures(health: Values) -> list[Picture]:
    """Three of all layers, and one of experts if there are any."""
    underflow, error, spread = (
        by_layer(health, name) for name in ("underflow", "error", "scale_spread")
    )
    of_underflow = LogNorm(1e-6, 1, clip=True)
    of_errors = Normalize(0.02, max(0.03, largest(error)), clip=True)
    powers = Normalize(0, max(1, largest(spread)))
    found = [
        Picture("Non-zero elements that became zero", of_underflow, percent, underflow),
        Picture("Error of q · s", of_errors, percent, error),
        Picture("Largest scale of a tensor over its smallest", powers, "2^{x:.3g}", spread),
    ]
    if tokens := unevenness(health):
        norm = Normalize(1, max(2, largest(tokens)))
        found.append(Picture("Tokens of the fullest expert over the mean", norm, "{x} x", tokens))
    return found


def percent(value: float, _: object) -> str:
    return f"{100 * value:.4g} %"


def largest(values: Values) -> float:
    finite = (v for steps in values.values() for v in steps.values() if math.isfinite(v))
    return max(finite, default=0.0)


def in_order(layers: Sequence[str]) -> list[str]:
    """By kind, and in each kind by number."""
    kinds = list(dict.fromkeys(map(kind_of, layers)))

    def key(layer: str) -> tuple[int, list[int]]:
        return kinds.index(kind_of(layer)), [int(n) for n in re.findall(r"\d+", layer)]

    return sorted(layers, key=key)


def draw_one(figure: Any, axes: Any, picture: Picture, steps: list[int], bad: set) -> None:
    """`bad` are the layers and steps that get a cross."""
    axes.set_title(picture.title, loc="left", fontsize=9)
    if not picture.values:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no finite value", ha="center", transform=axes.transAxes)
        return
    layers = in_order(list(picture.values))
    grid = np.array([[picture.values[layer].get(s, np.nan) for s in steps] for layer in layers])
    image = axes.imshow(grid, aspect="auto", interpolation="none", norm=picture.norm)
    bar = figure.colorbar(image, ax=axes, pad=0.02, format=picture.unit)
    bar.ax.tick_params(labelsize=7)
    crosses = [(steps.index(s), layers.index(name)) for name, s in bad if name in picture.values]
    if crosses:
        axes.plot(*zip(*crosses), "x", color="red", ms=5)
    kinds = list(map(kind_of, layers))
    for row in range(1, len(layers)):
        if kinds[row] != kinds[row - 1]:
            axes.axhline(row - 0.5, color="white", lw=0.8)
    shown = every(len(steps), max(2, STEP_DIGITS // len(str(steps[-1]))))
    axes.set_xticks(shown, [str(steps[i]) for i in shown], fontsize=7)
    shown = every(len(layers), NAMED_ROWS)
    axes.set_yticks(shown, [layers[i] for i in shown], fontsize=6)


def every(count: int, most: int) -> list[int]:
    """Up to `most` equally distant indices."""
    return list(range(0, count, -(-count // most)))


def draw(health: Values, out: Path) -> None:
    *of_layers, last = all_pictures = pictures(health)
    of_experts = len(all_pictures) > 3
    non_finite = by_layer(health, "non_finite")
    bad = {(name, step) for name, of in non_finite.items() for step, v in of.items() if v}
    # A step in which nothing was finite has no other value.
    found = {s for picture in all_pictures for of in picture.values.values() for s in of}
    steps = sorted(found | {step for _, step in bad})
    heights = [max(2.5, 0.11 * min(NAMED_ROWS, len(of_layers[0].values)))]
    heights += [max(1.0, 0.11 * len(last.values))] if of_experts else []
    matplotlib.rcParams["text.parse_math"] = False
    figure = Figure(figsize=(13, sum(heights) + 0.6 * len(heights)), dpi=100, layout="constrained")
    grid = figure.add_gridspec(len(heights), 3, height_ratios=heights)
    for i, picture in enumerate(all_pictures):
        axes = figure.add_subplot(grid[0, i] if i < 3 else grid[1, :])
        draw_one(figure, axes, picture, steps, bad)
        if i in (1, 2):
            axes.set_yticklabels([])
        axes.set_xlabel("step", fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")


def summary(health: Values) -> Iterator[str]:
    """The worst layer of each statistic, and where NaN or Inf came first."""
    for name in ("underflow", "error"):
        found = by_layer(health, name)
        values = [(v, step, layer) for layer, of in found.items() for step, v in of.items()]
        if values:
            value, step, layer = max(values)
            yield f"largest {name}: {value:.2%}, {layer}, step {step}"
    found = by_layer(health, "non_finite")
    bad = [(step, layer) for layer, of in found.items() for step, value in of.items() if value]
    if bad:
        step = min(bad)[0]
        layers = in_order([layer for at, layer in bad if at == step])
        more = f" and {len(layers) - 5} more" if len(layers) > 5 else ""
        yield f"NaN or Inf from step {step} on: {', '.join(layers[:5])}{more}"


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path("health.png"), help="plot file")
    args = parser.parse_args(argv)
    try:
        health = read_health(args.run)
        for line in summary(health):
            print(line)
        draw(health, args.out)
    except (InputError, OSError) as error:
        print(f"plot_health: error: {error}", file=sys.stderr)
        return 2
    print(f"plot: {printable(args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
