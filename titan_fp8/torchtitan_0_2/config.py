"""The `[quantize.linear.titan_fp8]` and `[quantize.grouped_mm.titan_fp8]` sections of the TOML.

torchtitan merges the `JobConfig` of the module that `[job] custom_config_module` names, field by
field, into its own. Its values arrive unchecked from a TOML (only flags are checked against their
types), so each section checks itself when it is built. What takes the whole file to see is checked
once all of it is merged, where torchtitan validates its own configuration.
"""

# No `from __future__ import annotations` here: torchtitan's merge reads the annotations as types.

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from typing import Annotated, Literal, get_args

import torch
import tyro
from torchtitan.config import ConfigManager
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_fp8.checks import check_bool, check_patterns, check_recipe
from titan_fp8.linear import DEFAULT_FILTER_FQNS

LINEAR = "quantize.linear.titan_fp8"
GROUPED_MM = "quantize.grouped_mm.titan_fp8"

RecipeName = Literal["blockwise", "rowwise", "rowwise_with_gw_hp", "bf16"]
PermutationName = Literal["gather", "host"]


class Origin(str, Enum):
    """Where a section comes from; of a type that no TOML can write, and JSON can."""

    FILE = "file"
    DEFAULT = "default"


SectionOrigin = Annotated[Origin, tyro.conf.Suppress]


@dataclass
class TitanFP8Linear:
    """FP8 for nn.Linear modules."""

    recipe: RecipeName = "blockwise"
    """How operands are scaled. "blockwise": 1x128 activations and gradients, 128x128 weights, as
    DeepSeek-V3. "rowwise": one scale per row. "rowwise_with_gw_hp": rowwise, weight gradients in
    bf16. "bf16": nothing is converted, the baseline."""

    filter_fqns: list[str] = field(default_factory=lambda: list(DEFAULT_FILTER_FQNS))
    """Modules whose qualified name contains one of these are left in high precision."""

    emulate: bool = False
    """Computes the same numerics in FP32 arithmetic, on any device; slow. CPUs always do."""

    origin: SectionOrigin = field(default=Origin.FILE, repr=False)
    """Not a setting."""

    def __post_init__(self) -> None:
        check_recipe(f"[{LINEAR}] recipe", self.recipe)
        _check_list(f"[{LINEAR}] filter_fqns", self.filter_fqns)
        check_bool(f"[{LINEAR}] emulate", self.emulate)
        _check_origin(LINEAR, self.origin)


@dataclass
class TitanFP8GroupedMM:
    """FP8 for the grouped GEMMs of MoE experts."""

    recipe: RecipeName | None = None
    """As in the linear section; left out, what the linear section says."""

    fqns: list[str] = field(default_factory=lambda: ["experts"])
    """Grouped experts whose qualified name contains one of these are converted."""

    emulate: bool = False
    """Computes the same numerics in FP32 arithmetic, on any device; slow. CPUs always do."""

    permutation: PermutationName | None = None
    """How tokens are sorted by expert, and back. "gather": by gathers, in forward and backward.
    "host": by torchtitan's own functions, which give the same values but for the order of sums and
    roundings of weighted outputs to the dtype of the activations.
    Left out, "gather", but for recipe "bf16" "host"."""

    origin: SectionOrigin = field(default=Origin.FILE, repr=False)
    """Not a setting."""

    def __post_init__(self) -> None:
        if self.recipe is not None:
            check_recipe(f"[{GROUPED_MM}] recipe", self.recipe)
        _check_list(f"[{GROUPED_MM}] fqns", self.fqns)
        if not self.fqns:
            raise ValueError(
                f"[{GROUPED_MM}] fqns = []: it would convert nothing; name the experts to convert "
                f'or drop "{GROUPED_MM}" from model.converters'
            )
        check_bool(f"[{GROUPED_MM}] emulate", self.emulate)
        _check_origin(GROUPED_MM, self.origin)
        allowed = get_args(PermutationName)
        if self.permutation not in (None, *allowed):
            raise ValueError(
                f"[{GROUPED_MM}] permutation = {self.permutation!r}: allowed are "
                + ", ".join(map(repr, allowed))
            )


def _check_list(key: str, value: object) -> None:
    if not isinstance(value, list):
        raise ValueError(f"{key} = {value!r}: allowed is a list of strings")
    check_patterns(key, value)


def _check_origin(section: str, value: object) -> None:
    if not isinstance(value, Origin):
        raise ValueError(f"[{section}] origin = {value!r}: there is no such key")


@dataclass
class QuantizedLinear:
    titan_fp8: TitanFP8Linear = field(default_factory=lambda: TitanFP8Linear(origin=Origin.DEFAULT))
    """titan_fp8 for nn.Linear modules"""


@dataclass
class QuantizedGroupedMM:
    titan_fp8: TitanFP8GroupedMM = field(
        default_factory=lambda: TitanFP8GroupedMM(origin=Origin.DEFAULT)
    )
    """titan_fp8 for the grouped GEMMs of MoE experts"""


@dataclass
class Quantize:
    linear: QuantizedLinear = field(default_factory=QuantizedLinear)
    grouped_mm: QuantizedGroupedMM = field(default_factory=QuantizedGroupedMM)


@dataclass
class JobConfig:
    """What torchtitan merges into its own JobConfig."""

    quantize: Quantize = field(default_factory=Quantize)


def check_merged(config: JobConfig) -> None:
    """ValueError where a section of ours is set and its converter is not listed.

    Warns where the job would fail for want of an accelerator, before torchtitan's own error.
    """
    sections = {
        LINEAR: (config.quantize.linear, TitanFP8Linear),
        GROUPED_MM: (config.quantize.grouped_mm, TitanFP8GroupedMM),
    }
    for name, (parent, kind) in sections.items():
        section, default = parent.titan_fp8, kind(origin=Origin.DEFAULT)
        if not isinstance(section, kind):
            raise ValueError(f"[{name}] is {section!r}: allowed is a table of its keys")
        # A flag that repeats a default leaves no other trace.
        flag = any(arg.lstrip("-").replace("-", "_").startswith(f"{name}.") for arg in sys.argv)
        is_set = section.origin is Origin.FILE or flag or section != default
        if is_set and name not in config.model.converters:
            raise ValueError(
                f"[{name}] is set, but model.converters = {config.model.converters} does not list "
                f'"{name}": nothing would read it'
            )
    if utils.device_type != "cpu" and not torch.cuda.is_available():
        logger.warning(
            "titan_fp8: no GPU found. torchtitan.train fails without one; "
            "scripts/train.sh CONFIG runs the same file on the CPU, with FP8 emulated"
        )


def check_with_host() -> None:
    """Makes torchtitan's ConfigManager call `check_merged` after its own validation."""
    # `python -m torchtitan.config.manager` reads the file with a class of its own.
    main = getattr(sys.modules["__main__"], "ConfigManager", ConfigManager)
    for manager in {ConfigManager, main}:
        manager._validate_config = _validating(manager._validate_config)


def _validating(host_validate: Callable[[ConfigManager], None]) -> Callable[[ConfigManager], None]:
    def validate(self: ConfigManager) -> None:
        host_validate(self)
        for name in ("linear", "grouped_mm"):
            table = getattr(self.config.quantize, name)
            if not is_dataclass(table):
                raise ValueError(
                    f"[quantize.{name}] is {table!r}: allowed is a table of converters"
                )
        # A job that does not load the plugin, in a process that has, lacks the sections.
        if hasattr(self.config.quantize.linear, "titan_fp8"):
            check_merged(self.config)

    return validate
