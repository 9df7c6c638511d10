"""FP8 experts for torchtitan 0.3, and the conversion of a model's experts.

GroupedExperts computes one `fp8_swiglu`. Experts of another class, such as gpt_oss's with biases,
keep their own forward, and its products run in FP8 through `_grouped_mm`, the method that
torchtitan has for this.

The quantizers pad the groups of tokens, whatever the dispatcher has done.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config.override import derive
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.module import Module

from titan_fp8.functional import fp8_grouped_mm
from titan_fp8.modules.checks import why_no_fp8_experts
from titan_fp8.modules.experts import Candidate, run_experts, select, shapes_of
from titan_fp8.modules.report import ConversionReport
from titan_fp8.modules.settings import ExpertsSettings
from titan_fp8.torchtitan_0_3.linear import FP8Fields, FP8Module, check_converted_once, replace


class FP8Experts(FP8Module, GroupedExperts):
    """A mixin, first among the bases of a class of experts: its grouped products run in FP8."""

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        """A (M, K) times B_t (E, K, N) by group, in FP8."""
        w = B_t.transpose(-2, -1)
        return fp8_grouped_mm(A, w, offs, recipe=self.recipe, emulate=self.emulate)

    def extra_repr(self) -> str:
        return f"recipe={self.recipe}, emulate={self.emulate}"


class FP8GroupedExperts(FP8Experts):
    """torchtitan's GroupedExperts as one `fp8_swiglu`."""

    @dataclass(kw_only=True, slots=True)
    class Config(FP8Fields, GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """x_RD (R, dim), sorted by expert; num_tokens_per_expert_E (E,) local experts; (R, dim)."""
        weights = (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        if isinstance(self.w1_EFD, DTensor):
            weights = tuple(w.to_local() for w in weights)
        return run_experts(*weights, x_RD, num_tokens_per_expert_E, self.recipe, self.emulate)


@functools.cache
def fp8_class(experts: type[GroupedExperts]) -> type[FP8Experts]:
    """The FP8 class of a class of experts."""
    if experts is GroupedExperts:
        return FP8GroupedExperts

    class FP8(FP8Experts, experts):  # type: ignore[misc, valid-type]
        @dataclass(kw_only=True, slots=True)
        class Config(FP8Fields, experts.Config):  # type: ignore[misc, name-defined]
            pass

    FP8.__name__ = FP8.__qualname__ = f"FP8{experts.__name__}"
    return FP8


def convert_experts(model: Module.Config, settings: ExpertsSettings) -> ConversionReport:
    """Converts the experts of a model's config to FP8, in place; returns the report on all.

    Raises:
        ValueError: a pattern of fqns that converts nothing; experts that are converted already, by
            another recipe.
    """
    report, selected = select(_candidates(model, settings), settings.recipe, settings.fqns)
    for fqn, _, _, (config, parent, attribute), _ in selected:
        cls: Any = fp8_class(config._owner)
        replace(parent, attribute, derive(config, cls.Config, **FP8Fields.of(settings, fqn)))
    return report


def _candidates(model: Module.Config, settings: ExpertsSettings) -> Iterator[Candidate]:
    for fqn, config, *place in model.traverse(GroupedExperts.Config):
        is_fp8 = issubclass(config._owner, FP8Experts)
        if is_fp8 and any(pattern in fqn for pattern in settings.fqns):
            check_converted_once(fqn, config.recipe, settings.recipe)
        yield Candidate(fqn, *_describe(config), (config, *place), is_fp8)


def _describe(config: GroupedExperts.Config) -> tuple[str, str | None]:
    """The shapes of the parameters, and why these experts cannot be converted, if they cannot."""
    with torch.device("meta"):
        experts = config.build()
    shape = shapes_of(experts.parameters())
    if isinstance(experts, FP8Experts):
        return shape, f"already converted, {experts.recipe}"
    if type(experts)._grouped_mm is not GroupedExperts._grouped_mm:
        return shape, f"{type(experts).__name__} has grouped products of its own"
    return shape, why_no_fp8_experts(experts)
