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
from titan_fp8.plan.model import Layer, Rank, degrees_of, parse, read_rank, refusal
from titan_fp8.recipe import BF16, RECIPES
from titan_fp8.torchtitan_0_2.config import GROUPED_MM, LINEAR


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if --train measured that FP8 is slower; 2 after any error."""
    parser = argparse.ArgumentParser(
        prog="python -m titan_fp8.plan",
        usage="%(prog)s CONFIG [options] [--section.key value ...]",
        description="Measure whether FP8 pays for a model and a parallel plan. Other arguments are "
        "torchtitan's own and override CONFIG, such as --training.seq_len 4096.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("config", metavar="CONFIG", help="the TOML of the run, for torchtitan 0.2")
    add("--train", action="store_true", help="train 20 steps in bf16 and in FP8 on all GPUs")
    add("--recipes", metavar="A,B", help="of --train (default: that of CONFIG)")
    add("--ngpu", type=int, metavar="N", help="GPUs of the job (default: what its degrees need)")
    add("--filter", choices=["auto"], help="print the sections that leave out what does not pay")
    add("--out", type=Path, metavar="FILE", help="also write them to this new file")
    options, flags = parser.parse_known_args(argv)
    try:
        check(options)
        if not options.train:
            plan(options, parse(options.config, flags))
            return 0
        rows, is_slower = train.compare(options, flags)
        print(text_table(rows, right=range(1, 6)))
        return int(is_slower)
    except Exception as error:
        text = str(error)
        if not isinstance(error, ValueError | OSError):
            text = f"{type(error).__name__}: {error}"
            # What torchtitan raises itself is about the config.
            raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
            if "torchtitan" not in Path(raised_in).parts:
                traceback.print_exc()
        print(f"titan_fp8.plan: {options.config}: {text}", file=sys.stderr)
        return 2


def check(options: argparse.Namespace) -> None:
    """ValueError if options do not fit each other or this machine."""
    out, gpus = options.out, torch.cuda.device_count()
    if out is not None and (options.filter is None or out.exists() or not out.parent.is_dir()):
        raise refusal("--out", str(out), "new files in existing folders, with --filter auto")
    if options.train and options.filter:
        raise refusal("--filter", options.filter, "plans without --train, which times whole steps")
    if options.train and not 0 < (wanted := gpus if options.ngpu is None else options.ngpu) <= gpus:
        raise ValueError(f"--train on {wanted} GPUs: this machine has {gpus}")
    for recipe in options.recipes.split(",") if options.recipes else ():
        if not options.train or recipe not in RECIPES:
            raise refusal("--recipes", recipe, f"{', '.join(RECIPES)}, with --train")


def plan(options: argparse.Namespace, config: JobConfig) -> None:
    """Prints the layers of a rank."""
    how, of_layers = "a bound:", bound.report
    try:
        if torch.cuda.is_available() and kernels_for(torch.device("cuda", 0)):
            how = f"on {torch.cuda.get_device_name()}, torch {torch.__version__}:"
            of_layers = measure.report
    except RuntimeError as error:  # a GPU without FP8 kernels
        print(error)
    rank = read_rank(config, degrees_of(config, options.ngpu))
    print(f"{config.model.name} {config.model.flavor}, rank 0 of {rank.dims.world_size}, {how}\n")
    columns, rows, slower, notes = of_layers(rank)
    head = ["layer", "(E,) M, N, K", "count", *columns]
    print(text_table([head, *rows], right=range(2, len(head))), "", *notes, sep="\n")
    print("Left in high precision:")
    print(*(f"- {x.cells[0]}: {x.reason}" for x in rank.layers if x.reason), sep="\n")
    if options.filter:
        text = fragment(rank, slower)
        print(f"\n{text}", end="")
        if options.out is not None:
            options.out.write_text(text, encoding="utf-8")


def fragment(rank: Rank, out: Sequence[Layer]) -> str:
    """TOML sections that leave these layers out, as far as patterns can name them."""
    patterns = list(rank.config.quantize.linear.titan_fp8.filter_fqns)
    lines = ["# By titan_fp8.plan: without what is slower in FP8."]
    linears = [each for each in rank.layers if not each.groups and each.recipe != BF16]
    kept = [name for layer in linears if layer not in out for name in layer.modules]
    for own in [own for layer in out if not layer.groups for own in layer.patterns]:
        if any(own in other for other in kept):
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
