"""What the converters for torchtitan 0.2 and 0.3 share: a check of the device, errors and logs."""

import contextlib
import functools
import logging
from collections.abc import Iterator

import torch

from titan_fp8.checks import ConversionReport
from titan_fp8.ops import kernels_for

_logger = logging.getLogger()  # torchtitan's own


def check_device(device_type: str, emulate: bool) -> None:
    """Checks that this process can run FP8 layers; warns once if it will emulate them.

    Args:
        device_type: torchtitan's, such as "cuda".

    Raises:
        RuntimeError: the current GPU has no FP8 kernels, and `emulate` is False.
    """
    if emulate or device_type != "cuda" or not torch.cuda.is_available():
        warn_of_emulation()
    else:
        kernels_for(torch.device("cuda", torch.cuda.current_device()))


@functools.cache
def warn_of_emulation() -> None:
    _logger.warning(
        "titan_fp8: FP8 is emulated in FP32 arithmetic: the loss is that of the recipe, the speed "
        "is that of the emulation"
    )


@contextlib.contextmanager
def errors_prefixed(prefix: str) -> Iterator[None]:
    """Puts the TOML section or the converter in front of the ValueErrors of a conversion."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{prefix} {error}") from None


def log_conversion(what: str, recipe: str, report: ConversionReport) -> None:
    """Logs how many modules of a kind were converted, and the table of all."""
    count, total = len(report.converted), len(report.converted) + len(report.left)
    _logger.info(f"titan_fp8: converted {count} of {total} {what}, {recipe}\n{report}")
