"""FP8Linear for torchtitan 0.3, and the conversion of a model's linear configs.

Conversion replaces a `Linear.Config` by an `FP8Linear.Config` with the same fields, so parameters,
their initialization and their sharding stay as they are. What torchtitan derives from Linear, such
as RowParallelLinear, computes something else or calls other kernels and is left alone. So are the
linears of modules that read the weight instead of calling the linear.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from torchtitan.config.override import derive
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.dist_gemm import AllGatherFusedFeedForward, AllGatherFusedQKVLinear
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import resolve_placements

from titan_fp8.fsdp import gather_in_fp8
from titan_fp8.modules import linear
from titan_fp8.modules.checks import check_filter_fqns, check_shard_sizes, why_no_fp8_gemm
from titan_fp8.modules.report import ConversionReport
from titan_fp8.modules.settings import LinearSettings, Settings
from titan_fp8.patches import log_once
from titan_fp8.recipe import BF16

DEFAULT_FILTER_FQNS = ("lm_head", "router.gate")
"""Logits and routing are sensitive to rounding; DeepSeek-V3 keeps both in high precision, too."""

_READ_WEIGHTS = (AllGatherFusedFeedForward.Config, AllGatherFusedQKVLinear.Config)
"""Modules that multiply by the weights of their linears under tensor parallelism."""


@dataclass(kw_only=True)
class FP8Fields:
    """What the configs of FP8 modules have besides torchtitan's fields."""

    recipe: str
    emulate: bool
    fqn: str
    """The name of the module in the model."""
    health_freq: int
    fsdp_all_gather: bool = False

    @classmethod
    def of(cls, settings: Settings, fqn: str) -> dict[str, Any]:
        """The fields by which `settings` convert a config."""
        names = ("recipe", "emulate", "health_freq")
        return {"fqn": fqn, **{name: getattr(settings, name) for name in names}}


class FP8Module(Module):
    """A mixin before a class of torchtitan, whose weights FP8 products read."""

    recipe: str
    emulate: bool
    fqn: str
    health_freq: int
    fsdp_all_gather: bool

    def __init__(self, config: Any):
        # Before nn.Module registers parameters, which names the module in errors.
        self.__dict__.update({each.name: getattr(config, each.name) for each in fields(FP8Fields)})
        super().__init__(config)  # type: ignore[call-arg]
        if self.fsdp_all_gather:
            gather_in_fp8(self, type(self))

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """As torchtitan's; ValueError if a shard's dims are not multiples of 16."""
        # The biases of gpt_oss's experts have two dimensions and take no part in GEMMs.
        dims = max(p.dim() for p in self.parameters(recurse=False))
        sharding = self._sharding_config
        layouts = {} if sharding is None else sharding.state_shardings
        for name, parameter in self.named_parameters(recurse=False):
            if parameter.dim() < dims or name not in layouts:
                continue
            mesh = parallel_dims.resolve_mesh(layouts[name].axes())
            if mesh is not None:  # Before they are sharded, on every rank alike.
                placements = resolve_placements(layouts[name], mesh)
                check_shard_sizes(f"{self.fqn}.{name}", parameter.shape, mesh.shape, placements)
        if self.fsdp_all_gather and not parallel_dims.fsdp_enabled:
            message = "titan_fp8: fsdp_all_gather = True changes nothing: the plan has no FSDP"
            log_once(logging.WARNING, message)
        super().parallelize(parallel_dims)


class FP8Linear(FP8Module, linear.FP8Linear, Linear):
    """torchtitan's Linear with FP8 GEMMs. Tensors are plain or DTensors, as in the SPMD backend."""

    @dataclass(kw_only=True, slots=True)
    class Config(FP8Fields, Linear.Config):
        pass

    tensor_parallel: bool = False

    # torchtitan finds the sharding of inputs by the name of the argument.
    def forward(self, input: Tensor) -> Tensor:
        """input (..., K) to (..., N)."""
        return super().forward(input)

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        super().parallelize(parallel_dims)
        self.wrapper, self.tensor_parallel = vars(self).get("forward"), parallel_dims.tp_enabled


def check_converted_once(fqn: str, has: str, recipe: str) -> None:
    """ValueError if what has been converted to the recipe `has` shall get another one."""
    if has != recipe:
        raise ValueError(
            f"recipe = {recipe!r}: {fqn} is already converted, {has!r}. A config is converted "
            "once: by its converters, or by an override of a config without converters"
        )


def replace(parent: Any, attribute: Any, config: Any) -> None:
    """Puts `config` where `traverse` found one."""
    if isinstance(parent, list):
        parent[attribute] = config
    else:
        setattr(parent, attribute, config)


def convert_linears(model: Module.Config, settings: LinearSettings) -> ConversionReport:
    """Converts the `Linear.Config`s of a model's config, in place; returns the report on all.

    Raises:
        ValueError: a pattern of filter_fqns that is not a default and matches no module; a linear
            that is converted already, by another recipe.
    """
    recipe, filter_fqns = settings.recipe, settings.filter_fqns
    names = [fqn for fqn, *_ in model.traverse(Module.Config, recurse=True)]
    check_filter_fqns(filter_fqns, DEFAULT_FILTER_FQNS, names)
    report = ConversionReport()
    for fqn, config, parent, attribute in list(model.traverse(Linear.Config)):
        shape = f"{config.out_features} x {config.in_features}"
        if isinstance(config, FP8Linear.Config):
            check_converted_once(fqn, config.recipe, recipe)
        reason = _why_left(fqn, config, parent, recipe, filter_fqns)
        if report.add(fqn, shape, recipe, reason):
            added = FP8Fields.of(settings, fqn)
            replace(parent, attribute, derive(config, FP8Linear.Config, **added))
    return report


def _why_left(
    fqn: str, config: Linear.Config, parent: Any, recipe: str, filter_fqns: Sequence[str]
) -> str | None:
    """Why the linear is not converted; None if it is."""
    if isinstance(config, FP8Linear.Config):
        return f"already converted, {config.recipe}"
    if recipe == BF16:
        return 'recipe = "bf16"'
    if type(config) is not Linear.Config:
        return f"its class is {config._owner.__name__}, not Linear"
    if isinstance(parent, _READ_WEIGHTS):
        return f"{parent._owner.__name__} multiplies by the weight itself"
    for pattern in filter_fqns:
        if pattern in fqn:
            return f'filtered by "{pattern}"'
    return why_no_fp8_gemm(config.out_features, config.in_features)
