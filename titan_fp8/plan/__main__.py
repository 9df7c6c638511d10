"""`python -m titan_fp8.plan`; see the docstring of the package."""

import importlib.metadata
import sys


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if --train measured that FP8 is slower; 2 after any error."""
    if not (version := importlib.metadata.version("torchtitan")).startswith("0.2."):
        wanted = "CONFIG is a TOML file of torchtitan 0.2: use an environment with 0.2.2"
        print(f"titan_fp8.plan: torchtitan {version} is installed, but {wanted}", file=sys.stderr)
        return 2
    from titan_fp8.plan.command import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
