"""`python -m titan_fp8.plan`; see the docstring of the package."""

import argparse
import importlib.metadata
import logging
import sys
import traceback
from pathlib import Path

import torch

from titan_fp8 import cpu_host


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
    add("config", metavar="CONFIG", help="the TOML of the run")
    add("--train", action="store_true", help="train 20 steps in bf16 and in FP8 on all GPUs")
    add("--recipes", metavar="A,B", help="of --train (default: that of CONFIG)")
    add("--ngpu", type=int, metavar="N", help="GPUs of the job (default: what its degrees need)")
    add("--filter", choices=["auto"], help="print the sections that leave out what does not pay")
    add("--out", type=Path, metavar="FILE", help="also write them to this new file")
    options, flags = parser.parse_known_args(argv)
    # torchtitan's warnings are about this machine, and what it logs as an error it raises, too.
    logging.disable(logging.ERROR)
    try:
        if not (version := importlib.metadata.version("torchtitan")).startswith("0.2."):
            wanted = "CONFIG is a TOML file of torchtitan 0.2: use an environment with 0.2.2"
            raise ValueError(f"torchtitan {version} is installed, but {wanted}")
        if not torch.cuda.is_available():
            # Before torchtitan is imported, since otherwise it assumes that there are GPUs.
            cpu_host.prepare()
        from titan_fp8.plan.command import run

        return run(options, flags)
    except Exception as error:
        if not isinstance(error, ValueError | OSError):  # of torchtitan, or of a custom module
            traceback.print_exc()
            error = ValueError(f"no plan can be made of {options.config}: see the error above")
        print(f"titan_fp8.plan: {error}", file=sys.stderr)
        return 2
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    sys.exit(main())
