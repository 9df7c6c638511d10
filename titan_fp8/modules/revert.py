"""The way back from converted modules to those of before."""

import functools
from typing import Any

from torch import nn

from titan_fp8.functional.checks import check_types


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
