"""What conversions share: a check of the device, errors and logs."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from titan_fp8.modules.report import ConversionReport
from titan_fp8.ops import kernels_for
from titan_fp8.patches import log_once
from titan_fp8.recipe import BF16

_logger = logging.getLogger()  # torchtitan's own


def check_device(device_type: str, emulate: bool) -> None:
    """Warns once if FP8 layers will be emulated on torchtitan's device type, such as "cuda".

    Raises:
        RuntimeError: the current GPU has no FP8 kernels, and `emulate` is False.
    """
    if emulate or device_type != "cuda" or not torch.cuda.is_available():
        log_once(
            logging.WARNING,
            "titan_fp8: FP8 is emulated in FP32 arithmetic: the loss is that of the recipe, the "
            "speed is that of the emulation",
        )
    else:
        kernels_for(torch.device("cuda", torch.cuda.current_device()))


@contextlib.contextmanager
def errors_prefixed(prefix: str) -> Iterator[None]:
    """Puts the TOML section or the converter in front of the ValueErrors of a conversion."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{prefix} {error}") from None


def convert_and_log(
    model: Any,
    where: str,
    kind: str,
    recipe: str,
    convert: Callable[[Any], ConversionReport],
    fuse: Callable[[Any], int],
) -> ConversionReport:
    """Converts a model or its config, and fuses its feed-forwards; logs both.

    Errors begin with `where`, and logs name the `kind` of what is converted.
    """
    with errors_prefixed(where):
        report = convert(model)
    count, total = len(report.converted), len(report.converted) + len(report.left)
    _logger.info(f"titan_fp8: converted {count} of {total} {kind}, {recipe}\n{report}")
    if recipe != BF16 and not count:
        _logger.warning(
            f"titan_fp8: {where.removesuffix(':')} converted nothing in this model; the table "
            "above says why"
        )
    if fused := fuse(model):
        _logger.info(f"titan_fp8: {fused} feed-forwards run fused")
    return report


def log_gathers(where: str, what: str, report: ConversionReport) -> None:
    """Logs what FSDP2 gathers in FP8, such as "8 weights", and what it does not."""
    left = f"; these in high precision:\n{ConversionReport(left=report.left)}"
    _logger.info(f"titan_fp8: {where} FSDP2 gathers {what} in FP8" + (left if report.left else ""))
