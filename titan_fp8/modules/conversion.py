"""What conversions share: a check of the device, patches, errors, logs, and the way back."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from titan_fp8.functional.checks import check_types
from titan_fp8.modules.report import ConversionReport
from titan_fp8.ops import kernels_for
from titan_fp8.patches import FEWER_OPS, RECOMPUTABLE_QUANTIZERS, SAC_POLICY, log_once
from titan_fp8.recipe import BF16

_logger = logging.getLogger()  # torchtitan's own


def check_device(device_type: str, emulate: bool) -> None:
    """Checks that this process can run FP8 layers; warns once if it will emulate them.

    Args:
        device_type: torchtitan's, such as "cuda".

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


def apply_patches(*, compiles: bool = True, recomputes: bool = True) -> None:
    """Applies what FP8 layers need of torchtitan and PyTorch (`patches.py`).

    Args:
        compiles: whether torch.compile may compile the model.
        recomputes: whether its partitioner may recompute quantizers.
    """
    from titan_fp8.compile import activation_checkpointing, graph_passes, recomputation

    SAC_POLICY.apply(activation_checkpointing.with_fp8_policy)
    if compiles and recomputes:
        RECOMPUTABLE_QUANTIZERS.apply(recomputation.with_recomputable_quantizers)
    if compiles:
        FEWER_OPS.apply(graph_passes.FewerOps.after)


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

    Args:
        where: what the errors of `convert` begin with.
        kind: what is converted, for logs.
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


def revert(model: nn.Module) -> list[str]:
    """Turns what titan_fp8 has converted back into the modules of before, in place.

    Linears, experts, feed-forwards, MoE layers and blocks get back their own classes. Parameters,
    buffers, hooks and modes stay the objects that they are. Call it after training, for what does
    not know FP8 modules, such as torchao's `quantize_`, or to convert again by another recipe.

    Not reverted, because the results are the same: what a converter has replaced in torchtitan
    itself, and the dispatchers of torchtitan 0.3.

    Args:
        model: any module, also one that FSDP2 shards, unless it gathers weights in FP8.

    Returns:
        The names of the modules that were changed.

    Raises:
        ValueError: a module that cannot be reverted, and why; then none is.
    """
    check_types((nn.Module,), model=model)
    found = [(name, module) for name, module in model.named_modules() if _classes(type(module))]
    for name, module in found:
        if reason := _why_not_revertible(module):
            raise ValueError(f"{name or type(module).__name__} cannot be reverted: {reason}")
    for _, module in found:
        cls: Any = type(module)
        for ours in _classes(cls):
            for attribute in ours.__dict__.get("__annotations__", ()):
                vars(module).pop(attribute, None)
        vars(module).pop("fp8_gathers", None)  # of what FSDP2 has not sharded yet
        module.__class__ = _reverted(cls)
    return [name for name, _ in found]


def _classes(cls: type) -> list[type]:
    """The classes of titan_fp8 that `cls` is made of."""
    return [each for each in cls.__mro__ if each.__module__.split(".")[0] == "titan_fp8"]


def _plain(cls: type) -> type:
    """The class without those of titan_fp8: the first of its bases that has none."""
    return next(each for each in cls.__mro__ if not _classes(each))


@functools.cache
def _reverted(cls: type) -> type:
    if cls in _classes(cls):
        return _plain(cls)
    wrapper, converted = cls.__bases__
    plain, own = _plain(converted), {"__deepcopy__": vars(cls)["__deepcopy__"]}
    return type(cls.__name__.replace(converted.__name__, plain.__name__), (wrapper, plain), own)


def _is_wrapped_by_torch(cls: type) -> bool:
    """Whether the class is one of ours behind one of PyTorch's, as `fully_shard` makes it."""
    ours = _classes(cls)
    return len(cls.__bases__) == 2 and cls.__bases__[1] in ours and "__deepcopy__" in vars(cls)


def _why_not_revertible(module: nn.Module) -> str | None:
    cls = type(module)
    if cls not in _classes(cls) and not _is_wrapped_by_torch(cls):
        return f"its class, {cls.__name__}, is derived from one of titan_fp8's"
    if "forward" in vars(module):
        return (
            "its forward was replaced after the conversion and may call that of FP8, as in models "
            "that torchtitan 0.3 has parallelized; load its weights into a model without FP8"
        )
    if any(vars(module).get("fp8_gathers", {}).values()):
        return (
            "FSDP2 gathers its weights in FP8; set fsdp_all_gather = false, or load its weights "
            "into a model without FP8"
        )
    return None
