"""`python -m titan_fp8.plan`: what it does and prints."""

import argparse
import json
import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torchtitan.config import JobConfig

from titan_fp8.modules.report import text_table
from titan_fp8.ops import kernels_for
from titan_fp8.plan import bound, measure, train
from titan_fp8.plan.model import Layer, Rank, parse, read_rank
from titan_fp8.recipe import BF16
from titan_fp8.torchtitan_0_2.config import GROUPED_MM, LINEAR


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if --train measured that FP8 is slower; 2 after any error."""
    parser = argparse.ArgumentParser(
        prog="python -m titan_fp8.plan",
        description="Measure whether FP8 pays for a model and a parallel plan. Other arguments are "
        "torchtitan's own and override CONFIG, such as --training.seq_len 4096.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("config", metavar="CONFIG", help="the TOML of the run, for torchtitan 0.2")
    add("--train", action="store_true", help="train 20 steps in bf16 and in FP8 on all GPUs")
    add("--recipes", metavar="A,B", help="of --train (default: that of CONFIG)")
    add("--filter", choices=["auto"], help="print the sections that leave out what does not pay")
    add("--out", type=Path, metavar="FILE", help="also write them to this new file")
    options, flags = parser.parse_known_args(argv)
    recipes = options.recipes.split(",") if options.recipes else []
    try:
        if options.train:
            if options.filter or options.out:
                raise ValueError("--filter and --out are for plans without --train")
            return int(train.compare(options.config, flags, recipes))
        if recipes:
            raise ValueError("--recipes is for --train")
        plan(parse(options.config, flags), options.filter, options.out)
        return 0
    except Exception as error:
        # torchtitan asserts that a config is right, or implemented.
        if not isinstance(error, ValueError | OSError | AssertionError | NotImplementedError):
            traceback.print_exc()
        print(f"titan_fp8.plan: {options.config}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


def plan(config: JobConfig, has_filter: bool, out: Path | None) -> None:
    """Prints the layers of a rank, and sections that leave out what is slower in FP8."""
    if out and (not has_filter or out.exists() or not out.parent.is_dir()):
        raise ValueError(f"--out {out}: allowed is a new file in a folder, with --filter auto")
    how, of_layers = "a bound:", bound.report
    try:
        if torch.cuda.is_available() and kernels_for(torch.device("cuda", 0)):
            how = f"on {torch.cuda.get_device_name()}, torch {torch.__version__}:"
            of_layers = measure.report
    except RuntimeError as error:  # a GPU without FP8 kernels
        print(error)
    rank = read_rank(config)
    print(f"{config.model.name} {config.model.flavor}, rank 0 of {rank.dims.world_size}, {how}\n")
    columns, rows, slower, notes = of_layers(rank)
    head = ["layer", "(E,) M, N, K", "count", *columns]
    print(text_table([head, *rows], right=range(2, len(head))), "", *notes, sep="\n")
    left = [f"- {layer.cells[0]}: {layer.reason}" for layer in rank.layers if layer.reason]
    print("Left in high precision:", *left, sep="\n")
    if has_filter:
        text = fragment(rank, slower)
        print(f"\n{text}", end="")
        if out:
            out.write_text(text, encoding="utf-8")


def fragment(rank: Rank, out: Sequence[Layer]) -> str:
    """TOML sections that leave these layers out, as far as patterns can name them."""
    patterns = list(rank.config.quantize.linear.titan_fp8.filter_fqns)
    lines = ["# By titan_fp8.plan: without what is slower in FP8."]
    fp8 = [x for x in rank.layers if x not in out and not x.groups and x.recipe != BF16]
    for own in [own for layer in out if not layer.groups for own in layer.patterns]:
        if any(own in name for layer in fp8 for name in layer.modules):
            lines.append(f"# {own} stays: its pattern would match other layers, too.")
        elif own not in patterns:
            patterns.append(own)
    if LINEAR in rank.config.model.converters:  # Otherwise its section would be refused.
        lines += [f"[{LINEAR}]", f"filter_fqns = {json.dumps(patterns)}"]
    if any(layer.groups for layer in out):
        lines += ["", f"[{GROUPED_MM}]", f'recipe = "{BF16}"']
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    # torchtitan's warnings are about this machine, and what it logs as an error it raises, too.
    logging.disable(logging.ERROR)
    sys.exit(main())
