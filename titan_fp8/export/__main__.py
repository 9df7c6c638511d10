"""`python -m titan_fp8.export`; see the docstring of the package."""

import argparse
import math
import sys

import torch

from titan_fp8 import cpu_host


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 after bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m titan_fp8.export",
        usage="%(prog)s CHECKPOINT OUT --config CONFIG [--section.key value ...]",
        description="Write a torchtitan checkpoint as Hugging Face safetensors in block-FP8.",
        epilog="Other arguments are torchtitan's own and override CONFIG, such as "
        "--model.flavor 8B; without CONFIG, --model.name and --model.flavor are needed.",
        allow_abbrev=False,
    )
    checkpoint = "folder of one step, as DCP saves it: a pickle, so only one that you trust"
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=checkpoint)
    parser.add_argument("out", metavar="OUT", help="folder to create")
    # The others are torchtitan's flag for it.
    names = ("--config", "--job.config_file", "--job.config-file")
    parser.add_argument(*names, dest="config", metavar="CONFIG", help="the TOML of the run")
    size = "largest file in GB (default: %(default)s)"
    parser.add_argument("--shard_gb", type=float, default=5.0, help=size)
    fuse = "write weights that vLLM, SGLang or transformers would refuse in high precision"
    parser.add_argument("--fuse", action="store_true", help=fuse)
    tp = "degree of tensor parallelism in vLLM or SGLang (default: %(default)s)"
    parser.add_argument("--tp", type=int, default=1, help=tp)
    options, flags = parser.parse_known_args(argv)
    # Before torchtitan is imported, since otherwise it assumes that this machine has GPUs.
    if not torch.cuda.is_available():
        cpu_host.prepare()
    from titan_fp8.export.exporter import export
    from titan_fp8.export.run import job_config

    try:
        if not 0 < (shard_bytes := options.shard_gb * 1e9) < math.inf:
            raise ValueError(f"--shard_gb = {options.shard_gb}: allowed are positive numbers")
        if options.tp < 1:
            raise ValueError(f"--tp = {options.tp}: allowed are positive integers")
        config = job_config(options.config, flags)
        export(
            options.checkpoint,
            options.out,
            config,
            shard_bytes=int(shard_bytes),
            fuse=options.fuse,
            tp=options.tp,
        )
    except (ValueError, OSError) as error:
        print(f"titan_fp8.export: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
