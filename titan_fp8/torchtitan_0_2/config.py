"""The `[quantize.linear.titan_fp8]` and `[quantize.grouped_mm.titan_fp8]` sections of the TOML.

torchtitan merges the `JobConfig` of the module that `[job] custom_config_module` names, field by
field, into its own. It checks the types of flags, but not of values from a TOML, so each section
checks its values when it is built. Checks that need the whole configuration run once it is merged
(`checked_cli`).
"""

# No `from __future__ import annotations` here: torchtitan's merge needs annotations to be types.

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import torch
import tyro
from torchtitan.config import JobConfig as TorchtitanConfig
from torchtitan.protocols import model_converter
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_fp8.checks import (
    PERMUTATIONS,
    check_common_settings,
    check_patterns,
    check_permutation,
    check_recipe,
)
from titan_fp8.linear import DEFAULT_FILTER_FQNS
from titan_fp8.recipe import BF16, RECIPE_NAMES, RECIPES

LINEAR = "quantize.linear.titan_fp8"
GROUPED_MM = "quantize.grouped_mm.titan_fp8"

RecipeName = Literal[RECIPE_NAMES]  # type: ignore[valid-type]
PermutationName = Literal[PERMUTATIONS]  # type: ignore[valid-type]
EXCHANGES = ("bf16", "fp8")
ExchangeName = Literal[EXCHANGES]  # type: ignore[valid-type]


class Origin(str, Enum):
    """Where a section comes from. A TOML value cannot have this type, and JSON can serialize it."""

    FILE = "file"
    DEFAULT = "default"


SectionOrigin = Annotated[Origin, tyro.conf.Suppress]


@dataclass
class TitanFP8Linear:
    """FP8 for nn.Linear modules."""

    recipe: RecipeName = "blockwise"
    """How operands are scaled. "blockwise": 1x128 activations and gradients, 128x128 weights, as
    in DeepSeek-V3. "rowwise": one scale per row. "rowwise_with_gw_hp": rowwise, with weight
    gradients in bf16. "blockwise_pow2": blockwise, with scales that are powers of two. "bf16":
    nothing is converted, for the baseline."""

    filter_fqns: list[str] = field(default_factory=lambda: list(DEFAULT_FILTER_FQNS))
    """Linears whose qualified name contains one of these are left in high precision. The default
    list means the output layer and the routers; in models of Hugging Face the output layer is the
    one that they name, such as lm_head."""

    emulate: bool = False
    """Computes the same numbers in FP32 arithmetic, on any device; slow. CPUs always do."""

    fsdp_all_gather: bool = True
    """With FSDP2 or HSDP each rank quantizes its shard of a weight once a step, and FSDP2 gathers
    FP8. The values are the same. False: FSDP2 gathers high precision."""

    health_freq: int = 0
    """N: every N steps, report what FP8 does to the operands of each layer (underflow, error and
    scales) in TensorBoard and the log. 0: never."""

    origin: SectionOrigin = field(default=Origin.FILE, repr=False)
    """Not a setting: set by the plugin."""

    def __post_init__(self) -> None:
        check_recipe(f"[{LINEAR}] recipe", self.recipe)
        _check_list(f"[{LINEAR}] filter_fqns", self.filter_fqns)
        check_common_settings(f"[{LINEAR}]", self)
        _check_origin(LINEAR, self.origin)


@dataclass
class TitanFP8GroupedMM:
    """FP8 for the grouped GEMMs of MoE experts."""

    recipe: RecipeName | None = None
    """As in the linear section, whose value is the default."""

    fqns: list[str] = field(default_factory=lambda: ["experts"])
    """Grouped experts whose qualified name contains one of these are converted."""

    emulate: bool = False
    """Computes the same numbers in FP32 arithmetic, on any device; slow. CPUs always do."""

    fsdp_all_gather: bool = True
    """With FSDP2 or HSDP each rank quantizes its shard of a weight once a step, and FSDP2 gathers
    FP8. The values are the same. False: FSDP2 gathers high precision."""

    permutation: PermutationName | None = None
    """How tokens are sorted by expert, and back. "gather": by gathers in forward and backward.
    "host": by torchtitan's own functions. The values are the same except for the order of sums and
    for roundings of weighted outputs to the dtype of the activations. The default is "gather", and
    "host" for recipe "bf16"."""

    exchange: ExchangeName = "bf16"
    """What tokens, and the gradients of the experts' outputs, travel in between the ranks of expert
    parallelism. "fp8": each is quantized once, before it is copied for its experts, and weight
    gradients read what is quantized again from that. Needs a blockwise recipe and permutation
    "gather"."""

    exchange_capacity: float = 2.0
    """The rows that a rank's experts can get, relative to balanced routing, where GPUs exchange
    tokens by writing to each other's memory. More rows are an error; the number of the ranks is
    enough for any routing. It costs memory."""

    health_freq: int = 0
    """N: every N steps, report what FP8 does to the operands of each layer (underflow, error and
    scales) in TensorBoard and the log. 0: never."""

    origin: SectionOrigin = field(default=Origin.FILE, repr=False)
    """Not a setting: set by the plugin."""

    def __post_init__(self) -> None:
        if self.recipe is not None:
            check_recipe(f"[{GROUPED_MM}] recipe", self.recipe)
        _check_list(f"[{GROUPED_MM}] fqns", self.fqns)
        if not self.fqns:
            raise ValueError(
                f"[{GROUPED_MM}] fqns = []: it would convert nothing; name the experts to convert "
                f'or drop "{GROUPED_MM}" from model.converters'
            )
        check_common_settings(f"[{GROUPED_MM}]", self)
        _check_origin(GROUPED_MM, self.origin)
        check_permutation(f"[{GROUPED_MM}] permutation", self.permutation)
        if self.exchange not in EXCHANGES:
            raise ValueError(
                f"[{GROUPED_MM}] exchange = {self.exchange!r}: allowed are "
                + ", ".join(map(repr, EXCHANGES))
            )
        capacity = self.exchange_capacity
        if isinstance(capacity, bool) or not isinstance(capacity, int | float) or capacity < 1:
            raise ValueError(
                f"[{GROUPED_MM}] exchange_capacity = {capacity!r}: allowed are numbers from 1 on"
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


def experts_recipe(quantize: Any) -> str:
    """The recipe of experts; by default that of linears. `quantize` is that of the JobConfig."""
    return quantize.grouped_mm.titan_fp8.recipe or quantize.linear.titan_fp8.recipe


@dataclass
class JobConfig:
    """What torchtitan merges into its own JobConfig."""

    quantize: Quantize = field(default_factory=Quantize)


def checked_cli(cli: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `tyro.cli`, which torchtitan calls for the merged configuration, to check it.

    Configurations without titan_fp8's sections pass: a process that has loaded the plugin may parse
    a job that does not load it.
    """

    @functools.wraps(cli)
    def parse(f: Any, *, args: Sequence[str] | None = None, **options: Any) -> Any:
        if isinstance(default := options.get("default"), TorchtitanConfig):
            kinds = {each.name: each.type for each in fields(f)}
            _check_tables("quantize", default.quantize, kinds["quantize"])
        config = cli(f, args=args, **options)
        if isinstance(config, TorchtitanConfig) and hasattr(config.quantize.linear, "titan_fp8"):
            check_merged(config, args or ())
        return config

    return parse


def _check_tables(name: str, value: object, kind: Any) -> None:
    """Checks that a TOML has a table where `kind`, the type of a field, is a dataclass.

    tyro would take the table's default in place of another value.
    """
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return
    if not isinstance(value, kind):
        raise ValueError(
            f"[{name}] is {value!r}: allowed is a table. To train without FP8, say recipe = "
            f'"{BF16}" in [{LINEAR}], or list no converter of titan_fp8 in model.converters'
        )
    for each in fields(kind):
        _check_tables(f"{name}.{each.name}", getattr(value, each.name), each.type)


def import_named(key: str, module: str | None) -> None:
    """Imports the module, if any, that a setting names.

    Raises:
        ValueError: the import fails, or ends the program.
    """
    try:
        if module:
            importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{key} = {module!r}: {error!r}") from error


def custom_import(config: Any) -> None:
    """Imports `experimental.custom_import`, if any, as torchtitan's trainer does."""
    import_named("experimental.custom_import", config.experimental.custom_import)


def _check_names(config: Any) -> None:
    custom_import(config)
    registered = model_converter._registry_model_converter_cls
    for name in config.model.converters:
        if name not in registered:
            raise ValueError(
                f"model.converters = {config.model.converters}: there is no {name!r}; allowed are "
                + ", ".join(map(repr, sorted(registered)))
            )


def check_merged(config: Any, args: Sequence[str]) -> None:
    """Checks that need the whole configuration, merged and parsed from a TOML and from `args`.

    Warns if the job will fail because there is no GPU, before torchtitan's own error.

    Raises:
        ValueError: model.converters is no list, names a converter that does not exist, or names a
            converter of titan_fp8 twice; experimental.custom_import cannot be imported; or a
            section of titan_fp8 is set, by the file or by a flag, and its converter is not listed.
    """
    converters = config.model.converters
    if not isinstance(converters, list) or not all(isinstance(name, str) for name in converters):
        raise ValueError(f"model.converters = {converters!r}: allowed is a list of strings")
    _check_names(config)
    sections: dict[str, tuple[Any, type[TitanFP8Linear] | type[TitanFP8GroupedMM]]] = {
        LINEAR: (config.quantize.linear, TitanFP8Linear),
        GROUPED_MM: (config.quantize.grouped_mm, TitanFP8GroupedMM),
    }
    for name, (parent, kind) in sections.items():
        if converters.count(name) > 1:
            raise ValueError(f"model.converters = {converters} lists {name!r} twice")
        section, default = parent.titan_fp8, kind(origin=Origin.DEFAULT)
        # A flag that repeats a default leaves no other trace.
        has_flag = any(arg.lstrip("-").replace("-", "_").startswith(f"{name}.") for arg in args)
        # A section of the file differs from the default at least in its origin.
        is_set = has_flag or section != default
        if is_set and name not in converters:
            raise ValueError(
                f"[{name}] is set, but model.converters = {converters} does not list "
                f'"{name}": list it there, or remove the section and its flags'
                + (", as for models without experts" if name == GROUPED_MM else "")
            )
    experts, recipe = config.quantize.grouped_mm.titan_fp8, experts_recipe(config.quantize)
    suits = recipe in RECIPES and RECIPES[recipe].feed_forward is not None
    if experts.exchange == "fp8" and not (suits and experts.permutation in (None, "gather")):
        raise ValueError(
            f'[{GROUPED_MM}] exchange = "fp8" with recipe = {recipe!r} and permutation = '
            f'{experts.permutation!r}: it needs a blockwise recipe and permutation "gather"'
        )
    if utils.device_type != "cpu" and not torch.cuda.is_available():
        logger.warning(
            "titan_fp8: no GPU found. torchtitan.train fails without one; "
            "scripts/train.sh CONFIG runs the same file on the CPU, with FP8 emulated"
        )
