"""What `python -m titan_fp8.plan` does and prints, once torchtitan can be imported."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torchtitan.config import ConfigManager

from titan_fp8.checks import permutation_of
from titan_fp8.ops import kernels_for
from titan_fp8.plan import train
from titan_fp8.plan.bound import bound, load, speed
from titan_fp8.plan.measure import Timed, measure
from titan_fp8.plan.model import Layer, Rank, degrees_of, pattern, read_rank, refusal
from titan_fp8.recipe import BF16, RECIPES
from titan_fp8.torchtitan_0_2.config import host_speedups_of

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
        return train.compare(options, flags, parse)
    config = parse(options.config, flags)
    rank = read_rank(config, degrees_of(config, options.ngpu))
    refused = [layer for layer in rank.layers if layer.refused]
    if refused and not options.filter:
        why = "; ".join(f"{layer.name} ({layer.refused})" for layer in refused)
        raise ValueError(
            f"training would stop at {why}. Use other degrees of parallelism, or leave them out: "
            "--filter auto prints the setting"
        )
    degrees = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")
    plan = ", ".join(f"{name} {size}" for name in degrees if (size := getattr(rank.dims, name)) > 1)
    print(f"{config.model.name} {config.model.flavor} on {rank.dims.world_size} GPUs", end="")
    print(f" ({plan}), rank 0:" if plan else ":")
    if options.gpu or not torch.cuda.is_available():
        slower = print_bound(rank, load(options.gpu or "h200"))
    else:
        slower = print_times(_measured(rank))
    left = [f"{layer.name}: {layer.reason}" for layer in rank.layers if layer.recipe == BF16]
    _list("Left in high precision", left)
    if options.filter:
        text = fragment(rank, [*refused, *slower])
        print(f"\n{text}", end="")
        if options.out is not None:
            _write(options.out, text)
            print(f"\nwritten to {options.out}")
    return 0


def check(options: argparse.Namespace) -> None:
    """ValueError if options do not fit each other or this machine."""
    out, gpus = options.out, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if out is not None and (options.filter is None or out.exists() or not out.parent.is_dir()):
        why = "the file exists; name a new one" if out.exists() else f"no folder {out.parent}"
        raise ValueError(f"--out = {out}: {why if options.filter else 'it needs --filter auto'}")
    if options.train and (options.filter or options.gpu):
        raise ValueError("--train measures whole steps: it takes neither --filter nor --gpu")
    if options.train and not 0 < (options.ngpu or gpus) <= gpus:
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


def _measured(rank: Rank) -> list[Timed]:
    try:
        kernels_for(torch.device("cuda", torch.cuda.current_device()))
    except RuntimeError as error:
        raise ValueError(f"{error}; --gpu says what a table knows") from None
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    console = Console(stderr=True)
    return measure(rank, progress=lambda cases: track(cases, "Layers", console=console))


def print_times(timed: Sequence[Timed]) -> list[Layer]:
    """Prints the measured layers and their sums; returns those that are slower in FP8."""

    def cells(bf16: float, fp8: float | None) -> list[str]:
        return [f"{bf16:,.0f}", *([f"{fp8:,.0f}", f"{bf16 / fp8:.2f}"] if fp8 else ["", ""])]

    rows = [["layer", "(E,) M, N, K", "count", "weights", "bf16 us", "FP8 us", "x bf16"]]
    gains = dict.fromkeys((t.layer for t in timed), 0.0)
    for t in timed:
        weights = ("FP8" if t.layer.gathers_fp8 else "bf16") if t.fp8 else ""
        head = [f"{t.layer.name} {t.groups}".strip(), t.layer.shape, str(t.layer.count), weights]
        rows.append([*head, *cells(t.bf16, t.fp8)])
        gains[t.layer] += t.bf16 - (t.fp8 or t.bf16)
    for way in ("even", "uneven") if any(t.groups for t in timed) else ("",):
        own = [t for t in timed if t.groups in ("", way)]
        bf16 = sum(t.layer.count * t.bf16 for t in own)
        fp8 = sum(t.layer.count * (t.fp8 or t.bf16) for t in own)
        rows.append([f"all {way}".strip(), "", "", "", *cells(bf16, fp8)])
    _table(rows)
    return [layer for layer, gain in gains.items() if gain < 0]


def print_bound(rank: Rank, table: dict[str, Any]) -> list[Layer]:
    """Prints what a table of GEMM speeds says; returns layers whose GEMMs are slower in FP8."""
    in_fp8 = [layer for layer in rank.layers if layer.recipe != BF16 and not layer.refused]
    speeds = dict.fromkeys(rank.layers, (1.0, True)) | {x: speed(table, x) for x in in_fp8}
    facts = "{card}, torch {torch}, {date}, {commit}".format(**table)
    print(f"Nothing is measured here. GEMMs alone, by the table of {facts}:")
    rows = [["layer", "(E,) M, N, K", "count", "x bf16"]]
    for layer, (ratio, _) in speeds.items():
        x = f"{ratio:.2f}" if layer in in_fp8 else ""
        rows.append([layer.name, layer.shape, str(layer.count), x])
    _table(rows)
    outside = [f"{each.name}: {each.shape}" for each, (_, inside) in speeds.items() if not inside]
    _list("Outside the table, as fast as its nearest GEMMs", outside)
    most = bound(rank, [ratio for ratio, _ in speeds.values()])
    attention = "" if rank.attention_flop else ", attention not counted"
    print(f"\nUpper bound of what FP8 GEMMs gain in a step: {most:.2f}x of bf16{attention}.")
    return [layer for layer, (ratio, _) in speeds.items() if ratio < 1]


def _list(title: str, items: Sequence[str]) -> None:
    if items:
        print(f"\n{title}:", *(f"- {item}" for item in items), sep="\n")


def _table(rows: list[list[str]]) -> None:
    """Aligned columns, the first two to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    print()
    for row in rows:
        cells = (c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths)))
        print("  ".join(cells).rstrip())


def fragment(rank: Rank, out: Sequence[Layer]) -> str:
    """TOML sections that leave these layers out, as far as patterns can name them."""
    quantize = rank.config.quantize
    patterns = list(quantize.linear.titan_fp8.filter_fqns)
    lines = ["# By titan_fp8.plan: without what would stop training or is slower in FP8."]
    kept = [name for layer in rank.layers if layer not in out for name in layer.modules]
    for name in [name for layer in out if not layer.groups for name in layer.modules]:
        own = pattern(name).partition("*.")[2] or name
        if any(own in other for other in kept):
            lines.append(f"# {pattern(name)} stays: its pattern would match other layers, too.")
        elif own not in patterns:
            patterns.append(own)
    lines += ["[quantize.linear.titan_fp8]", f"filter_fqns = {json.dumps(patterns)}"]
    if any(layer.groups for layer in out):
        # Left out, the permutation might follow the recipe.
        asked, on = quantize.grouped_mm.titan_fp8.permutation, host_speedups_of(rank.config)
        lines += ["", "[quantize.grouped_mm.titan_fp8]", f'recipe = "{BF16}"']
        lines += [f'permutation = "{permutation_of(asked, on)}"']
    return "\n".join(lines) + "\n"


def _write(file: Path, text: str) -> None:
    """Writes a new file, or none at all if that fails."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.rename(file)
    finally:
        part.unlink(missing_ok=True)
