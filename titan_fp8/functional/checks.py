"""Checks of the arguments of a product.

Each raises a ValueError that names the argument, its value and what is allowed.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_fp8.ops import DTYPES

_DTYPES = set(DTYPES)


def check_bool(key: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{key} = {value!r}: allowed are true and false")


def check_types(allowed: tuple[type, ...] = (Tensor,), **arguments: object) -> None:
    """Every argument must be of one of these types; `type(None)` stands for None."""
    for name, value in arguments.items():
        if not isinstance(value, allowed):
            names = " or ".join("None" if t is type(None) else t.__name__ for t in allowed)
            raise ValueError(f"{name} is {reprlib.repr(value)}: allowed is a {names}")


def checked_dtype(x: Tensor, others: Mapping[str, Any]) -> torch.dtype:
    """The dtype in which F.linear would compute, bfloat16 or float32, also under autocast.

    `others`: the other operands by name, `offs` too. All must be on x's device, since kernels do
    not check addresses. Tensors but offs must have x's dtype, unless there is autocast.
    """
    device, dtypes = x.device, {"x": x.dtype}
    for name, t in others.items():
        if t.device != device:
            raise ValueError(f"{name} is on {t.device} and x on {device}: must be the same")
        if isinstance(t, Tensor) and name != "offs":
            dtypes[name] = t.dtype
    if not _DTYPES.issuperset(dtypes.values()):
        name, dtype = next(item for item in dtypes.items() if item[1] not in _DTYPES)
        raise ValueError(f"{name} is {dtype}: allowed are torch.bfloat16 and torch.float32")
    # is_autocast_enabled raises for meta; amp.is_autocast_available would cause a graph break.
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        if dtype not in DTYPES:
            raise ValueError(f"autocast to {dtype}: allowed are torch.bfloat16 and torch.float32")
        return dtype
    if len({*dtypes.values()}) > 1:
        raise ValueError(f"dtypes differ outside autocast: {dtypes}")
    return x.dtype


def fits_fp8(size: int) -> bool:
    """Whether FP8 GEMMs take a dimension of this size: a positive multiple of 16."""
    return size > 0 and size % 16 == 0


def check_multiples_of_16(name: str, shape: Sequence[int]) -> None:
    """N and K of a weight (..., N, K) must be positive multiples of 16."""
    if len(shape) < 2:
        raise ValueError(f"{name} has shape {tuple(shape)}: allowed are (N, K) and (E, N, K)")
    n, k = shape[-2:]
    if not (fits_fp8(n) and fits_fp8(k)):
        raise ValueError(
            f"{name} has shape {tuple(shape)}: FP8 GEMMs need N = {n} and K = {k} to be "
            "positive multiples of 16"
        )


def checked_offs(offs: Any, groups: int) -> Tensor:
    """The group ends, contiguous; `offs` must be a (groups,) int32 tensor."""
    if not groups:
        raise ValueError("weight has 0 groups: at least one is needed")
    check_types(offs=offs)
    if offs.dtype != torch.int32 or offs.shape != (groups,):
        raise ValueError(
            f"offs is {offs.dtype} of shape {tuple(offs.shape)}: "
            f"allowed is torch.int32 of shape ({groups},)"
        )
    return offs.contiguous()
