"""Runs a benchmark on one Hopper GPU, prints its table and, with --json, writes it to a file.

    python scripts/bench NAME [--json FILE]

Each has a module in scripts/bench whose docstring says what it measures; the first paragraph goes
into the result. Other commands have options of their own (--help):

    plans         trains production models under many parallel plans
    release       makes a table and a chart of results of plans
    kernel_table  measures the table that `titan_fp8.plan` reads without a GPU
    render        writes docs/kernels.md from the files of --json
"""

import argparse
import importlib
import sys
from pathlib import Path

BENCHMARKS = ("linear", "grouped", "memory", "host", "gemm", "quantize", "exchange")
"""In the order of docs/kernels.md."""
COMMANDS = ("plans", "release", "kernel_table", "render")


def main(argv: list[str]) -> int | None:
    if argv and argv[0] in COMMANDS:
        return importlib.import_module(f"bench.{argv[0]}").main(argv[1:])
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python scripts/bench", None, __doc__, formatter_class=raw)
    parser.add_argument("name", choices=(*BENCHMARKS, *COMMANDS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    args = parser.parse_args(argv)
    from bench.common import report, require_hopper

    require_hopper()
    benchmark = importlib.import_module(f"bench.{args.name}")
    rows, facts = benchmark.measure()
    about, *_ = benchmark.__doc__.split("\n\n")
    report(rows, args.json, benchmark.TITLE, about.replace("\n", " "), **facts)
    return None


if __name__ == "__main__":
    # Not this folder, whose modules are those of the package `bench`, but scripts/ and the root.
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])
    sys.exit(main(sys.argv[1:]))
