"""The `[quantize.linear.titan_fp8]` and `[quantize.grouped_mm.titan_fp8]` sections of the TOML.

torchtitan merges the `JobConfig` of the module that `[job] custom_config_module` names, field by
field, into its own. It checks the types of flags, but not of values from a TOML, so each section
checks its values when it is built (`titan_fp8/modules/settings.py`). Checks that need the whole
configuration run once it is merged (`checked_cli`).
"""

# No `from __future__ import annotations` here: torchtitan's merge needs annotations to be types.

import copy
import functools
import importlib
import itertools
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torchtitan.config import ConfigManager
from torchtitan.config import JobConfig as TorchtitanConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models import _supported_models
from torchtitan.protocols import model_converter
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_fp8.modules.linear import DEFAULT_FILTER_FQNS
from titan_fp8.modules.settings import (
    ExchangeName,
    ExpertsSettings,
    LinearSettings,
    PermutationName,
    RecipeName,
)
from titan_fp8.recipe import BF16, RECIPES

LINEAR = "quantize.linear.titan_fp8"
GROUPED_MM = "quantize.grouped_mm.titan_fp8"


@dataclass(kw_only=True)
class TitanFP8Linear(LinearSettings):
    """FP8 for nn.Linear modules."""

    where = f"[{LINEAR}]"
    filter_fqns: list[str] = field(default_factory=lambda: list(DEFAULT_FILTER_FQNS))

    cuda_graph: bool = False
    """Whether forward, loss and backward of a step are captured as one CUDA graph, which later
    steps replay, where nothing in them waits for the CPU. The values are the same. It needs no FP8.
    """


@dataclass(kw_only=True)
class TitanFP8GroupedMM(ExpertsSettings):
    """FP8 for the grouped GEMMs of MoE experts."""

    where = f"[{GROUPED_MM}]"
    recipe: RecipeName | None = None
    """As in the linear section, whose value is the default."""

    permutation: PermutationName | None = None
    """How tokens are sorted by expert, and back. "gather": by gathers in forward and backward.
    "host": by torchtitan's own functions. The values are the same except for the order of sums and
    for roundings of weighted outputs to the dtype of the activations. The default is "gather" with
    host_speedups, and otherwise "host"."""

    exchange: ExchangeName = "bf16"
    """How tokens, and the gradients of the experts' outputs, travel between the ranks of expert
    parallelism. "bf16": in the dtype of the activations. "fp8": each is quantized once, before it
    is copied for its experts, and weight gradients read what is quantized again from that. Needs a
    blockwise recipe and permutation by gathers."""

    exchange_capacity: float = 2.0
    """The rows that a rank's experts can get, relative to balanced routing, where GPUs exchange
    tokens by writing to each other's memory: in FP8, or with cuda_graph. More rows are an error;
    the number of the ranks is enough for any routing. It costs memory."""


@dataclass
class QuantizedLinear:
    titan_fp8: TitanFP8Linear = field(default_factory=TitanFP8Linear)
    """titan_fp8 for nn.Linear modules"""


@dataclass
class QuantizedGroupedMM:
    titan_fp8: TitanFP8GroupedMM = field(default_factory=TitanFP8GroupedMM)
    """titan_fp8 for the grouped GEMMs of MoE experts"""


@dataclass
class Quantize:
    linear: QuantizedLinear = field(default_factory=QuantizedLinear)
    grouped_mm: QuantizedGroupedMM = field(default_factory=QuantizedGroupedMM)


def experts_recipe(config: Any) -> str:
    """The recipe of a job's experts; by default that of linears."""
    quantize = config.quantize
    return quantize.grouped_mm.titan_fp8.recipe or quantize.linear.titan_fp8.recipe


def host_speedups_of(config: Any) -> bool:
    """Whether a job uses `host_speedups`; by default if one of its listed converters is for FP8."""
    quantize = config.quantize
    if (key := quantize.linear.titan_fp8.host_speedups) is not None:
        return key
    recipes = {LINEAR: quantize.linear.titan_fp8.recipe, GROUPED_MM: experts_recipe(config)}
    return any(recipes.get(name, BF16) != BF16 for name in config.model.converters)


def permutation_of(config: Any) -> str:
    """The `permutation` of a job; by default it is one of the `host_speedups`."""
    key = config.quantize.grouped_mm.titan_fp8.permutation
    return key or ("gather" if host_speedups_of(config) else "host")


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
        if not isinstance(options.get("default"), TorchtitanConfig):
            return cli(f, args=args, **options)
        args = args or ()
        in_file = sections_of_file(args)
        config = cli(f, args=args, **options)
        if hasattr(config.quantize.linear, "titan_fp8"):
            # A flag that repeats a default leaves no other trace.
            spelled = [arg.lstrip("-").replace("-", "_") for arg in args]
            flags = {n for n in (LINEAR, GROUPED_MM) for arg in spelled if arg.startswith(f"{n}.")}
            check_merged(config, in_file | flags)
        return config

    return parse


def sections_of_file(args: Sequence[str]) -> set[str]:
    """Which of titan_fp8's sections the TOML of this command line has.

    Raises:
        ValueError: it has a value in place of a table. tyro would take the table's default.
    """
    found = set()
    for name in (LINEAR, GROUPED_MM):
        table: Any = ConfigManager._maybe_load_toml(None, args) or {}
        for key in itertools.accumulate(name.split("."), "{}.{}".format):
            table = table.get(key.rpartition(".")[2])
            if table is None:
                break
            if not isinstance(table, dict):
                raise ValueError(
                    f"[{key}] is {table!r}: allowed is a table. To train without FP8, say recipe = "
                    f'"{BF16}" in [{LINEAR}], or list no converter of titan_fp8 in model.converters'
                )
        else:
            found.add(name)
    return found


def custom_import(config: Any) -> None:
    """Imports `experimental.custom_import`, if any, as torchtitan's trainer does.

    Raises:
        ValueError: the import fails, or ends the program.
    """
    if module := config.experimental.custom_import:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise ValueError(f"experimental.custom_import = {module!r}: {error!r}") from error


def check_merged(config: Any, is_set: Collection[str]) -> None:
    """Checks that need the whole configuration, in which the sections `is_set` are set.

    Warns if the job will fail because there is no GPU, before torchtitan's own error.

    Raises:
        ValueError: one of model.converters is wrong, or missing for a section that is set;
            experimental.custom_import fails; or tokens cannot be exchanged as asked.
    """
    converters = config.model.converters
    if not isinstance(converters, list) or not all(isinstance(name, str) for name in converters):
        raise ValueError(f"model.converters = {converters!r}: allowed is a list of strings")
    if config.quantize.linear.titan_fp8.cuda_graph:
        # NCCL reads it once. Else it would register what a captured step sends, in memory that
        # PyTorch's allocator remaps if it has expandable segments.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    custom_import(config)
    registered = model_converter._registry_model_converter_cls
    for name in converters:
        if name not in registered:
            raise ValueError(
                f"model.converters = {converters}: there is no {name!r}; allowed are "
                + ", ".join(map(repr, sorted(registered)))
            )
    for name in (LINEAR, GROUPED_MM):
        if converters.count(name) > 1:
            raise ValueError(f"model.converters = {converters} lists {name!r} twice")
        if name in is_set and name not in converters:
            raise ValueError(
                f"[{name}] is set, but model.converters = {converters} does not list "
                f'"{name}": list it there, or remove the section and its flags'
                + (", as for models without experts" if name == GROUPED_MM else "")
            )
    recipe, permutation = experts_recipe(config), permutation_of(config)
    suits = recipe == BF16 or (RECIPES[recipe].feed_forward and permutation == "gather")
    if config.quantize.grouped_mm.titan_fp8.exchange == "fp8" and not suits:
        raise ValueError(
            f'[{GROUPED_MM}] exchange = "fp8" with recipe = {recipe!r} and permutation = '
            f'{permutation!r}: allowed are a blockwise recipe and "gather"'
        )
    if utils.device_type != "cpu" and not torch.cuda.is_available():
        logger.warning(
            "titan_fp8: no GPU found. torchtitan.train fails without one; "
            "scripts/train.sh CONFIG runs the same file on the CPU, with FP8 emulated"
        )


def model_of(config: Any) -> tuple[Any, Any]:
    """torchtitan's TrainSpec of a job's model, and its flavor's arguments, as the job sets them.

    Raises:
        ValueError: there is no such model or flavor.
    """
    name, flavor = config.model.name, config.model.flavor
    try:
        spec: Any = get_train_spec(name)
    except ValueError:
        raise ValueError(
            f"model.name = {name!r}: allowed are {sorted(_supported_models)}, or what "
            "experimental.custom_import registers"
        ) from None
    if flavor not in [*spec.model_args]:
        allowed = ", ".join(map(repr, spec.model_args))
        raise ValueError(f"model.flavor = {flavor!r}: allowed for {name} are {allowed}")
    args = copy.deepcopy(spec.model_args[flavor])
    args.update_from_config(config)
    return spec, args


def check_sizes(config: Any, dims: ParallelDims) -> None:
    """Checks what torchtitan finds out only when it trains, without saying which key is wrong.

    Raises:
        ValueError: a batch, a sequence or a degree of parallelism does not fit the model or the
            other degrees.
    """
    spec, training = get_train_spec(config.model.name), config.training
    args = spec.model_args.get(config.model.flavor)
    batch, whole = training.local_batch_size, training.global_batch_size
    step = max(1, batch) * dims.dp_replicate * dims.dp_shard
    experts = getattr(getattr(args, "moe_args", None), "num_experts", 0)
    ranks = dims.dp_shard * dims.cp * dims.tp // dims.etp

    def check(key: str, value: int, is_allowed: bool, allowed: str) -> None:
        if not is_allowed:
            raise ValueError(f"{key} = {value!r}: allowed are {allowed}")

    check("training.local_batch_size", batch, batch > 0, "positive numbers")
    check("training.seq_len", training.seq_len, training.seq_len > 0, "positive numbers")
    multiples = f"multiples of {step}, training.local_batch_size times data-parallel ranks"
    check("training.global_batch_size", whole, whole <= 0 or whole % step == 0, multiples)
    alone = f"1, since torchtitan has no pipeline for model.name = {config.model.name!r}"
    has_pipeline = dims.pp == 1 or spec.pipelining_fn is not None
    check("parallelism.pipeline_parallel_degree", dims.pp, has_pipeline, alone)
    for kind, degree, what, count in (
        ("tensor", dims.tp, "n_heads", getattr(args, "n_heads", 0)),
        ("tensor", dims.tp, "n_kv_heads", getattr(args, "n_kv_heads", 0)),
        ("expert", dims.ep, "experts", experts),
        ("expert", dims.ep, "ranks of FSDP, CP and TP", ranks),
    ):
        divides = not count or count % degree == 0
        divisors = f"divisors of {what} = {count}"
        check(f"parallelism.{kind}_parallel_degree", degree, divides, divisors)
