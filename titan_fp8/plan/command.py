"""What `python -m titan_fp8.plan` does, once torchtitan can be imported."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from torchtitan.config import ConfigManager

from titan_fp8.plan import advice, report
from titan_fp8.plan.model import parallel_dims, read_run
from titan_fp8.plan.run import Run
from titan_fp8.plan.step import baseline, predict
from titan_fp8.plan.times import load

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Prints the plan; returns the exit status, 0 or 1.

    Raises:
        ValueError, OSError: bad input.
    """
    if options.out is not None and options.filter is None:
        raise ValueError(f"--out = {options.out} needs --filter auto, whose output it is")
    if options.out is not None and options.out.exists():
        raise ValueError(f"--out = {options.out}: the file exists; name a new one")
    if options.out is not None and not options.out.parent.is_dir():
        raise ValueError(f"--out = {options.out}: there is no folder {options.out.parent}")
    if options.ngpu is not None and options.ngpu < 1:
        raise ValueError(f"--ngpu = {options.ngpu}: allowed are positive numbers")
    times = load(options.gpu)
    if options.link_gbps is not None:
        if not options.link_gbps > 0:
            raise ValueError(f"--link_gbps = {options.link_gbps}: allowed are positive numbers")
        times = replace(times, link_gbps=options.link_gbps)
    plan = config_run(options.config, flags, options.ngpu)
    step, bf16 = predict(plan, times), predict(baseline(plan), times)
    advised = advice.changes(plan, times)
    print(report.text(plan, times, step, bf16))
    print(report.bullets("Advice", advice.advice(plan, advised, times)))
    if options.filter:
        fragment = advice.fragment(plan, advised, times)
        print(f"\n{fragment}", end="")
        if options.out is not None:
            options.out.write_text(fragment, encoding="utf-8")
            print(f"\nwritten to {options.out}")
    if advised.refused and not options.filter:
        names = ", ".join(layer.name for layer in advised.refused)
        raise ValueError(f"training would stop at {names}: see the advice above, or --filter auto")
    return 1 if bf16.ms < 0.995 * step.ms else 0


def config_run(file: str, flags: list[str], ngpu: int | None) -> Run:
    """The run of a TOML and of torchtitan's flags; ValueError if they are not allowed."""
    if not Path(file).is_file():
        raise ValueError(f"CONFIG = {file}: no such file")
    try:
        config = ConfigManager().parse_args(["--job.config_file", file, *flags])
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"CONFIG = {file}: {error}") from None
    except (ImportError, KeyError) as error:
        raise ValueError(f"CONFIG = {file}: {error!r}") from None
    return read_run(config, parallel_dims(config, ngpu))
