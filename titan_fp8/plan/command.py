"""What `python -m titan_fp8.plan` does and prints, once torchtitan can be imported."""

import argparse
import functools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torchtitan.config import ConfigManager

from titan_fp8.checks import permutation_of
from titan_fp8.ops import kernels_for
from titan_fp8.plan import train
from titan_fp8.plan.bound import bound, speed, tables
from titan_fp8.plan.measure import Timed, measure
from titan_fp8.plan.model import DEGREES, Layer, Rank, degrees_of, read_rank, refusal
from titan_fp8.recipe import BF16, RECIPES
from titan_fp8.torchtitan_0_2.config import GROUPED_MM, LINEAR, host_speedups_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Prints the plan; returns the exit status, 0 or 1.

    Raises:
        ValueError, OSError: bad input.
    """
    check(options)
    if options.train:
        rows, is_slower = train.compare(options, flags, parse)
        print_table(rows, text=1)
        return int(is_slower)
    config, measures = parse(options.config, flags), has_kernels()
    rank = read_rank(config, degrees_of(config, options.ngpu))
    refused = [layer for layer in rank.layers if layer.refused]
    if refused and not options.filter:
        why = "; ".join(f"{layer.cells[0]}: {layer.refused}" for layer in refused)
        raise ValueError(
            f"training would stop, as sizes on a rank are not multiples of 16 ({why}). Use other "
            "degrees of parallelism, or leave them out: --filter auto prints the setting"
        )
    plan = ", ".join(f"{name} {size}" for name in DEGREES if (size := getattr(rank.dims, name)) > 1)
    print(f"{config.model.name} {config.model.flavor} on {rank.dims.world_size} GPUs", end="")
    print(f" ({plan}), rank 0:" if plan else ":")
    if measures:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        console = Console(stderr=True)
        show = functools.partial(track, description="Layers", console=console)
        slower = print_times(measure(rank, progress=show))
    else:
        slower = print_bound(rank)
    left = [f"{layer.cells[0]}: {layer.reason}" for layer in rank.layers if layer.recipe == BF16]
    print_list("Left in high precision", left)
    if options.filter:
        text = fragment(rank, [*refused, *slower])
        print(f"\n{text}", end="")
        if options.out is not None:
            try:
                options.out.write_text(text, encoding="utf-8")
            except OSError:
                options.out.unlink(missing_ok=True)
                raise
            print(f"\nwritten to {options.out}")
    return 0


def has_kernels() -> bool:
    """Whether this machine's GPU runs FP8 kernels; says so if it has another GPU."""
    try:
        return torch.cuda.is_available() and bool(kernels_for(torch.device("cuda", 0)))
    except RuntimeError as error:
        print(error)
        return False


def check(options: argparse.Namespace) -> None:
    """ValueError if options do not fit each other or this machine."""
    out, gpus = options.out, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if out is not None and (options.filter is None or out.exists() or not out.parent.is_dir()):
        why = "the file exists; name a new one" if out.exists() else f"no folder {out.parent}"
        raise ValueError(f"--out = {out}: {why if options.filter else 'it needs --filter auto'}")
    if options.train and options.filter:
        raise ValueError("--train measures whole steps: it does not take --filter")
    if options.train and not 0 < (gpus if options.ngpu is None else options.ngpu) <= gpus:
        raise ValueError(f"--train --ngpu {options.ngpu}: this machine has {gpus} GPUs")
    for recipe in options.recipes.split(",") if options.recipes else ():
        if not options.train or recipe not in RECIPES:
            raise refusal("--recipes", recipe, f"{', '.join(RECIPES)}, with --train")


def parse(file: str, flags: Sequence[str]) -> Any:
    """torchtitan's config of a TOML and flags; ValueError if they are not allowed."""
    if not Path(file).is_file():
        raise ValueError(f"CONFIG = {file}: no such file")
    try:
        return ConfigManager().parse_args(["--job.config_file", file, *flags])
    except (tomllib.TOMLDecodeError, ImportError, KeyError) as error:
        raise ValueError(f"CONFIG = {file}: {error!r}") from None


def print_times(timed: Sequence[Timed]) -> list[Layer]:
    """Prints the measured layers and their sums; returns those that are slower in FP8."""

    def cells(bf16: float, fp8: float | None) -> list[str]:
        if math.isnan(bf16):
            return ["no memory", "", ""]
        return [f"{bf16:,.0f}", *([f"{fp8:,.0f}", f"{bf16 / fp8:.2f}"] if fp8 else ["", ""])]

    rows = [["layer", "(E,) M, N, K", "count", "weights", "bf16 us", "FP8 us", "x bf16"]]
    for t in timed:
        name, *facts = t.layer.cells
        weights = ("FP8" if t.layer.gathers_fp8 else "bf16") if t.fp8 else ""
        rows.append([f"{name} {t.groups}".strip(), *facts, weights, *cells(t.bf16, t.fp8)])
    fitting, gains = [t for t in timed if not math.isnan(t.bf16)], dict[Layer, float]()
    for t in fitting:
        gains[t.layer] = gains.get(t.layer, 0.0) + t.bf16 - (t.fp8 or t.bf16)
    for way in ("even", "uneven") if any(t.groups for t in timed) else ("",):
        own = [(t, len(t.layer.modules)) for t in fitting if t.groups in ("", way)]
        bf16 = sum(count * t.bf16 for t, count in own)
        fp8 = sum(count * (t.fp8 or t.bf16) for t, count in own)
        rows.append([f"all {way}".strip(), "", "", "", *cells(bf16, fp8)])
    print_table(rows, text=2)
    if len(fitting) < len(timed):
        print('\n"no memory": does not fit into that of this GPU, and is in no sum.')
    return [layer for layer, gain in gains.items() if gain < 0]


def print_bound(rank: Rank) -> list[Layer]:
    """Prints what tables of GEMM speeds say; returns layers that are slower in FP8 by each."""
    print("Nothing is measured here. How fast GEMMs alone are, bf16 is 1, by the tables of")
    rows, outside = [["layer", "(E,) M, N, K", "count"], *(x.cells for x in rank.layers)], []
    rows.append(["upper bound of a step", "", ""])
    slower = {layer for layer in rank.layers if layer.recipe != BF16 and not layer.refused}
    for table in tables():
        print("- {card}: torch {torch}, {date}, {commit}".format(**table))
        speeds = {layer: speed(table, layer) for layer in rank.layers}
        most = bound(rank, [ratio for ratio, _ in speeds.values()])
        rows[0].append(table["card"])
        for row, layer in zip(rows[1:], rank.layers):
            row.append(f"{speeds[layer][0]:.2f}" if layer in speeds else "")
        rows[-1].append(f"{most:.2f}")
        outside += [layer for layer, (_, is_inside) in speeds.items() if not is_inside]
        slower &= {layer for layer, (ratio, _) in speeds.items() if ratio < 1}
    print_table(rows, text=2)
    unlike = dict.fromkeys(": ".join(layer.cells[:2]) for layer in outside)
    print_list("Outside the tables, as fast as their nearest GEMMs", [*unlike])
    counted = "GEMMs and attention take" if rank.attention_flop else "GEMMs take"
    print(f"\nThe bound is of what FP8 GEMMs gain, if only {counted} time.")
    return [layer for layer in rank.layers if layer in slower]


def print_list(title: str, items: Sequence[str]) -> None:
    if items:
        print(f"\n{title}:", *(f"- {item}" for item in items), sep="\n")


def print_table(rows: list[list[str]], text: int) -> None:
    """The first row is the header, and the first columns are `text`."""
    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if i < text else "right")
    for row in rows[1:]:
        table.add_row(*row)
    print()
    Console(width=200, markup=False, highlight=False).print(table)


def fragment(rank: Rank, out: Sequence[Layer]) -> str:
    """TOML sections that leave these layers out, as far as patterns can name them."""
    quantize = rank.config.quantize
    patterns = list(quantize.linear.titan_fp8.filter_fqns)
    lines = ["# By titan_fp8.plan: without what would stop training or is slower in FP8."]
    linears = [each for each in rank.layers if not each.groups and each.recipe != BF16]
    kept = [name for layer in linears if layer not in out for name in layer.modules]
    for own in [own for layer in out if not layer.groups for own in layer.patterns]:
        if any(own in other for other in kept):
            lines.append(f"# {own} stays: its pattern would match other layers, too.")
        elif own not in patterns:
            patterns.append(own)
    if (
        LINEAR in rank.config.model.converters
    ):  # A section whose converter is not listed is refused.
        lines += [f"[{LINEAR}]", f"filter_fqns = {json.dumps(patterns)}"]
    if any(layer.groups for layer in out):
        # Left out, the permutation might follow the recipe.
        asked, on = quantize.grouped_mm.titan_fp8.permutation, host_speedups_of(rank.config)
        lines += ["", f"[{GROUPED_MM}]", f'recipe = "{BF16}"']
        lines += [f'permutation = "{permutation_of(asked, on)}"']
    return "\n".join(lines) + "\n"
