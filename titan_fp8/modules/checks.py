"""Checks of configuration values, of modules to convert and of their shards.

Each raises a ValueError that names the key or module, its value and what is allowed.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from titan_fp8.functional.checks import check_bool, fits_fp8
from titan_fp8.ops import DTYPES
from titan_fp8.recipe import RECIPE_NAMES

PERMUTATIONS = ("gather", "host")
"""The allowed values of `permutation`."""
EXCHANGES = ("bf16", "fp8")
"""The allowed values of `exchange`."""

# Configuration values


def check_choice(key: str, value: object, allowed: Sequence[str] = RECIPE_NAMES) -> None:
    """Allowed is one of these, by default of the recipes with "bf16"."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{key} = {value!r}: allowed are {', '.join(map(repr, allowed))}")


def check_patterns(key: str, patterns: Any) -> None:
    """Allowed is a sequence of non-empty strings."""
    sequence = isinstance(patterns, Sequence) and not isinstance(patterns, str)
    if not sequence or not all(isinstance(p, str) for p in patterns):
        raise ValueError(f"{key} = {patterns!r}: allowed is a list of strings")
    if any(not pattern for pattern in patterns):
        raise ValueError(f"{key} = {list(patterns)!r}: an empty string would match every module")


def check_experts_patterns(key: str, patterns: Any) -> None:
    """Allowed is a sequence of non-empty strings that is not empty itself."""
    check_patterns(key, patterns)
    if not patterns:
        raise ValueError(
            f"{key} = []: it would convert nothing; name the experts to convert, or leave their "
            "conversion out"
        )


def check_freq(key: str, value: object) -> None:
    """Allowed are numbers of steps."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{key} = {value!r}: allowed are whole numbers of steps, 0 for never")


def check_capacity(key: str, value: object) -> None:
    """Allowed are finite numbers from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < math.inf:
        raise ValueError(f"{key} = {value!r}: allowed are finite numbers from 1 on")


CHECKS: dict[str, Callable[[str, Any], None]] = {
    "recipe": check_choice,
    "filter_fqns": check_patterns,
    "fqns": check_experts_patterns,
    "emulate": check_bool,
    "fsdp_all_gather": check_bool,
    "health_freq": check_freq,
    "host_speedups": check_bool,
    "cuda_graph": check_bool,
    "permutation": functools.partial(check_choice, allowed=PERMUTATIONS),
    "exchange": functools.partial(check_choice, allowed=EXCHANGES),
    "exchange_capacity": check_capacity,
}
"""The check of each key (`settings.py`)."""


# Modules to convert


def check_filter_fqns(
    filter_fqns: Sequence[str], defaults: Collection[str], names: Iterable[str]
) -> None:
    """Every pattern must be part of the name of a module, unless it is one of the defaults."""
    names = list(names)
    for pattern in filter_fqns:
        if pattern not in defaults and not any(pattern in name for name in names):
            raise ValueError(
                f"filter_fqns = {list(filter_fqns)!r}: no module's name contains {pattern!r}"
            )


def why_no_fp8_gemm(n: int, k: int) -> str | None:
    """Why FP8 GEMMs cannot compute a linear with a weight (n, k); None if they can."""
    for dim, size in (("N", n), ("K", k)):
        if not fits_fp8(size):
            return f"{dim} = {size} is not a {'' if size else 'positive '}multiple of 16"
    return None


def why_no_fp8_experts(experts: nn.Module) -> str | None:
    """Why FP8 GEMMs cannot multiply by the weights (E, N, K) of these experts; None if they can."""
    for name, param in experts.named_parameters():
        if param.dim() == 3 and (reason := why_no_fp8_gemm(*param.shape[1:])):
            return f"{name}: {reason}"
        if param.dtype not in DTYPES:
            return f"{param.dtype} parameters"
    return None


# Shards


def check_shards(name: str, param: Tensor | None, before: Tensor | None) -> None:
    """The last two dimensions of every rank's shard of `param` must be multiples of 16.

    The check reads the global shape, so every rank raises, not only the one with the ragged shard.
    Plain tensors pass. So does a parameter that is sharded like `before`, the one that it replaces:
    FSDP2's shards may have any size, and loading a checkpoint registers them again.
    """
    if not isinstance(param, DTensor) or (
        isinstance(before, DTensor)
        and (param.device_mesh, param.placements) == (before.device_mesh, before.placements)
    ):
        return
    mesh_shape = tuple(param.device_mesh.shape)
    check_shard_sizes(name, param.shape, mesh_shape, param.placements)


def check_shard_sizes(
    name: str, shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> None:
    """As `check_shards`, for a parameter of this global shape that is still to be sharded."""
    for dim in (len(shape) - 2, len(shape) - 1):
        shards = zip(mesh_shape, placements, strict=True)
        ranks = math.prod(ranks for ranks, placement in shards if placement.is_shard(dim))
        if not fits_fp8(shape[dim]) or shape[dim] % (16 * ranks):
            raise ValueError(
                f"{name}: dimension {dim} of {tuple(shape)}, sharded as {tuple(placements)} over "
                f"{tuple(mesh_shape)} ranks, gives shards of size [{shape[dim] / ranks:g}]; FP8 "
                "GEMMs need positive multiples of 16. Use another degree of parallelism or leave "
                "the module out by filter_fqns or fqns"
            )
