"""FP8GroupedExperts, torchtitan's GroupedExperts with grouped GEMMs in FP8.

As for linears, conversion changes the class and keeps the parameters.

Under expert parallelism torchtitan's dispatch sorts tokens by local expert and pads each expert's
group to a multiple of TOKEN_GROUP_ALIGN_SIZE_M, which the converter sets to the recipe's alignment.
If that is a multiple of 128, as for blockwise, `aligned = True` tells the quantizers so. Otherwise
(rowwise, no expert parallelism, DeepEP's dispatch) they pad the groups themselves.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.models.moe import utils as moe_utils
from torchtitan.models.moe.moe import GroupedExperts

from titan_fp8.functional.checks import check_bool, check_types
from titan_fp8.layouts import BLOCK
from titan_fp8.modules.checks import (
    check_choice,
    check_experts_patterns,
    check_shards,
    why_no_fp8_experts,
)
from titan_fp8.modules.experts import Candidate, run_experts, select, shapes_of
from titan_fp8.modules.report import ConversionReport
from titan_fp8.recipe import get_recipe


@functools.cache
def compiled_run_experts(backend: str) -> Callable[..., Tensor]:
    """`run_experts`, compiled once for any number of tokens, which changes with the routing."""
    compiled = torch.compile(run_experts, backend=backend, fullgraph=True)

    def run(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, *args: Any) -> Tensor:
        torch._dynamo.mark_dynamic(x, 0)
        return compiled(w1, w2, w3, x, *args)

    return run


class FP8GroupedExperts(GroupedExperts):
    """A GroupedExperts that computes `fp8_swiglu`; `convert_experts` makes it from one."""

    recipe: str
    emulate: bool
    fqn: str
    dispatch_aligns: bool
    """Whether the dispatch of expert parallelism pads groups to TOKEN_GROUP_ALIGN_SIZE_M."""
    compile_backend: str | None
    health_freq: int = 0

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor | Callable[..., Tensor]) -> Tensor:
        """x (M, dim), sorted by expert, and tokens (E,) of the local experts. Returns (M, dim).

        Or tokens x (T, dim), and what `FP8Dispatcher.dispatch` returns with them. Returns (T, dim).
        """
        weights = (self.w1, self.w2, self.w3)
        aligned = False
        if isinstance(self.w1, DTensor):
            mesh_dims = self.w1.device_mesh.mesh_dim_names or ()
            is_whole = moe_utils.TOKEN_GROUP_ALIGN_SIZE_M % BLOCK == 0
            aligned = self.dispatch_aligns and "ep" in mesh_dims and is_whole
            weights = tuple(w.to_local() for w in weights)
        run = run_experts
        # Inside a compiled region the experts are part of that region.
        if self.compile_backend is not None and not torch.compiler.is_compiling():
            run = compiled_run_experts(self.compile_backend)
        try:
            if isinstance(num_tokens_per_expert, Tensor):
                return run(*weights, x, num_tokens_per_expert, self.recipe, self.emulate, aligned)
            w1, w2, w3 = weights
            options = {"recipe": self.recipe, "emulate": self.emulate}
            return num_tokens_per_expert(x, w1=w1, w2=w2, w3=w3, **options)
        except ValueError as error:
            raise ValueError(f"{self.fqn}: {error}" if self.fqn else str(error)) from None

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module's; ValueError if a shard's dims are not multiples of 16."""
        check_shards(f"{self.fqn}.{name}", param, self._parameters.get(name))
        super().register_parameter(name, param)

    def extra_repr(self) -> str:
        return f"recipe={self.recipe}, emulate={self.emulate}"


def convert_experts(
    model: nn.Module,
    *,
    recipe: str = "blockwise",
    fqns: Sequence[str] = ("experts",),
    emulate: bool = False,
    compile_backend: str | None = None,
) -> ConversionReport:
    """Turns the GroupedExperts of a torchtitan `model` into FP8GroupedExperts, in place.

    Args:
        model: any module, on any device, meta too, best before it is parallelized.
        recipe: as in `titan_fp8.fp8_linear`, or "bf16": nothing is converted.
        fqns: grouped experts whose qualified name contains one of these are converted.
        emulate: as in `titan_fp8.fp8_linear`.
        compile_backend: compile the experts with this backend of torch.compile, if given and if
            the recipe leaves operations to fuse.

    Returns:
        The report on every grouped experts module of the model.

    Raises:
        ValueError: a bad model, recipe, emulate or compile_backend; an empty fqns or string in it;
            a pattern that converts nothing; a DTensor whose shards are too small for FP8 GEMMs.
    """
    check_types((nn.Module,), model=model)
    check_choice("recipe", recipe)
    check_bool("emulate", emulate)
    check_types((str, type(None)), compile_backend=compile_backend)
    check_experts_patterns("fqns", fqns)
    report, selected = select(_candidates(model), recipe, fqns)
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        for name, _, _, module, _ in selected:
            for parameter, p in module.named_parameters():
                check_shards(f"{name}.{parameter}", p, None)
    for name, _, _, module, _ in selected:
        module.__class__ = FP8GroupedExperts
        module.recipe, module.emulate, module.fqn = recipe, emulate, name
        # If our ops fuse the feed-forward, nothing is left to the compiler, and calling compiled
        # code would only take CPU time.
        is_fused = get_recipe(recipe).feed_forward is not None
        module.compile_backend = None if is_fused else compile_backend
        # Compared by name, since importing the class takes the deep_ep package.
        parent = model.get_submodule(name.rpartition(".")[0])
        module.dispatch_aligns = type(parent).__name__ != "DeepEPMoE"
    return report


def is_grouped_experts(module: nn.Module) -> bool:
    """Whether `module`, of any class, has stacked expert weights (E, N, K) of its own."""
    return any(p.dim() == 3 for p in module.parameters(recurse=False))


def _candidates(model: nn.Module) -> Iterator[Candidate]:
    for name, module in list(model.named_modules()):
        if is_grouped_experts(module):
            yield Candidate(name, shapes_of(module.parameters()), _why_left(module), module)


def _why_left(experts: nn.Module) -> str | None:
    """Why these experts cannot be converted; None if they can."""
    if isinstance(experts, FP8GroupedExperts):
        return f"already converted, {experts.recipe}"
    if type(experts) is not GroupedExperts:
        return f"{type(experts).__name__} differs from GroupedExperts (in biases, for example)"
    return why_no_fp8_experts(experts)
