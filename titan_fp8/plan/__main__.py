"""`python -m titan_fp8.plan`; see the docstring of the package."""

import argparse
import importlib.metadata
import logging
import sys
import traceback
from pathlib import Path

from titan_fp8 import cpu_host

USAGE = "python -m titan_fp8.plan CONFIG [--gpu GPU] [--ngpu N] [--section.key value ...]"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if FP8 would be slower than bf16; 2 after any error."""
    parser = argparse.ArgumentParser(
        prog="python -m titan_fp8.plan",
        usage=USAGE,
        description="Predict whether FP8 pays for a model and a parallel plan.",
        epilog="Other arguments are torchtitan's own and override CONFIG, such as "
        "--training.seq_len 4096.",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="the TOML of the run")
    parser.add_argument(
        "--gpu",
        default="h200",
        help="h100, h200 or another that has a table in titan_fp8/plan/tables "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--ngpu",
        type=int,
        metavar="N",
        help="GPUs of the job (default: the product of its degrees)",
    )
    parser.add_argument(
        "--link_gbps", type=float, metavar="GB/S", help="GB/s that a rank receives in collectives"
    )
    parser.add_argument(
        "--filter", choices=["auto"], help="print the sections that leave out what does not pay"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="also write them to this new file",
    )
    options, flags = parser.parse_known_args(argv)
    version = importlib.metadata.version("torchtitan")
    if not version.startswith("0.2."):
        print(
            f"titan_fp8.plan: torchtitan {version} is installed, but CONFIG is a TOML file of "
            "torchtitan 0.2: use an environment with torchtitan 0.2.2",
            file=sys.stderr,
        )
        return 2
    # Before torchtitan is imported, since otherwise it assumes that this machine has GPUs.
    cpu_host.prepare()
    from titan_fp8.plan.command import run

    # torchtitan's warnings are about this machine, and what it logs as an error it raises, too.
    logging.disable(logging.ERROR)
    try:
        return run(options, flags)
    except (ValueError, OSError) as error:
        print(f"titan_fp8.plan: {error}", file=sys.stderr)
        return 2
    except Exception:  # of torchtitan, or of a module that the config imports
        traceback.print_exc()
        print(
            f"titan_fp8.plan: no plan can be made of {options.config} and these flags: the error "
            "above says where it failed",
            file=sys.stderr,
        )
        return 2
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    sys.exit(main())
