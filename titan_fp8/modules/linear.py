"""FP8Linear, an nn.Linear whose three GEMMs run in FP8, and the conversion of a model's linears.

Conversion changes a module's class in place. Its parameters stay the high-precision tensors that
they were, under their own names, so initialization, the optimizer and checkpoints see no
difference. Each forward and each backward quantizes the weight that it finds, unless FSDP2 has
gathered it in FP8 (`titan_fp8/fsdp/`).

Under tensor parallelism the weight is a DTensor. Each rank multiplies its local shards and
quantizes them locally. The placements follow from the weight's, as PyTorch's parallel styles expect
them:

    weight        input x        output y    gradient of x    gradient of weight
    Shard(0)      Replicate      Shard(-1)   Partial          Shard(0)
    Shard(1)      Shard(-1)      Partial     Shard(-1)        Shard(1)
    Replicate     Replicate      Replicate   Replicate        Replicate
    Replicate     Shard(d < -1)  Shard(d)    Shard(d)         Partial
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from titan_fp8.functional import fp8_linear
from titan_fp8.functional.checks import check_bool, check_types
from titan_fp8.modules.checks import (
    check_choice,
    check_filter_fqns,
    check_patterns,
    check_shards,
    why_no_fp8_gemm,
)
from titan_fp8.modules.report import ConversionReport
from titan_fp8.ops import DTYPES
from titan_fp8.recipe import BF16

DEFAULT_FILTER_FQNS = ("output", "router.gate")
"""torchtitan's names of the output layer and of the routers, the default of `filter_fqns` in TOML.

Logits and routing are sensitive to rounding; DeepSeek-V3 keeps both in high precision, too.
"""
_OUTPUT_NAMES = ("output", "lm_head")
"""What torchtitan and Hugging Face call the output layer."""


class FP8Linear(nn.Linear):
    """An nn.Linear that computes `fp8_linear`; `convert_linears` makes it from one.

    Attributes:
        recipe, emulate: as in `fp8_linear`.
        fqn: its name in the model, for error messages.
        health_freq: every how many steps its health is observed (`health/`); 0: never.
        wrapper: the forward of its own that torchtitan 0.3 has given the module, if it has. Without
            tensor parallelism it only calls the one of the class.
    """

    recipe: str = "blockwise"
    emulate: bool = False
    fqn: str = ""
    health_freq: int = 0
    wrapper: Callable[..., Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) to (..., N), as nn.Linear; plain tensors or DTensors."""
        if isinstance(self.weight, DTensor) or isinstance(x, DTensor):
            return self._forward_sharded(x)
        return self._local_product(x, self.weight, self.bias)

    def _local_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        try:
            return fp8_linear(x, weight, bias, recipe=self.recipe, emulate=self.emulate)
        except ValueError as error:
            raise ValueError(f"{self.fqn}: {error}" if self.fqn else str(error)) from None

    def _forward_sharded(self, x: Tensor) -> DTensor:
        """`forward` for DTensors: multiplies local shards, placed as in the table above."""
        mesh = (x if isinstance(x, DTensor) else cast(DTensor, self.weight)).device_mesh
        for name, t in (("input", x), ("weight", self.weight), ("bias", self.bias)):
            if t is None or isinstance(t, DTensor) and t.device_mesh == mesh:
                continue
            where = t.device_mesh if isinstance(t, DTensor) else "no mesh"
            raise TypeError(
                f"{self.fqn or 'FP8Linear'}: the {name} is on {where}, another operand on {mesh}: "
                "input, weight and bias must be DTensors on the same mesh"
            )
        x, w = cast(DTensor, x), cast(DTensor, self.weight)
        per_dim = [_placements(wp, xp, x.ndim) for wp, xp in zip(w.placements, x.placements)]
        x_in, y_out, dx, dw = zip(*per_dim)
        if x.placements != x_in:
            # A redistribute to equal placements is not a no-op: its backward would all-reduce each
            # partial gradient separately.
            x = x.redistribute(placements=x_in)
        bias = None if self.bias is None else self._local_bias(y_out)
        y = self._local_product(
            x.to_local(grad_placements=dx), w.to_local(grad_placements=dw), bias
        )
        shape = torch.Size((*x.shape[:-1], w.shape[0]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(y, mesh, y_out, run_check=False, shape=shape, stride=stride)

    def _local_bias(self, y_out: Sequence[Placement]) -> Tensor:
        """The bias that this rank adds: zero if outputs are summed and another rank adds it."""
        bias = cast(DTensor, self.bias)
        mesh = bias.device_mesh
        # If y is Partial, every rank has the whole gradient of y. If the tokens are sharded, each
        # rank has its tokens' gradient, and the bias's is Partial.
        grad = [
            Partial() if p.is_replicate() and y.is_shard() else p
            for p, y in zip(bias.placements, y_out)
        ]
        local = bias.to_local(grad_placements=grad)
        adds = all(mesh.get_local_rank(d) == 0 for d, y in enumerate(y_out) if y.is_partial())
        # Zero, but the bias still gets its gradient.
        return local if adds else local - local.detach()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module's, but refuses a weight whose shards are too small for FP8 GEMMs."""
        if name == "weight":
            check_shards(f"{self.fqn}.weight", param, self._parameters.get(name))
        super().register_parameter(name, param)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}, emulate={self.emulate}"


def _placements(w: Placement, x: Placement, ndim: int) -> tuple[Placement, ...]:
    """Along one mesh dimension, the placements of x as read, y, x's gradient and w's gradient."""
    if w.is_shard(0):
        return Replicate(), Shard(ndim - 1), Partial(), w
    if w.is_shard(1):
        return Shard(ndim - 1), Partial(), Shard(ndim - 1), w
    if isinstance(x, Shard) and x.dim % ndim != ndim - 1:
        return x, x, x, Partial()
    return Replicate(), Replicate(), Replicate(), Replicate()


def convert_linears(
    model: nn.Module,
    *,
    recipe: str = "blockwise",
    filter_fqns: Sequence[str] | None = None,
    emulate: bool = False,
) -> ConversionReport:
    """Convert the nn.Linear modules of `model` to FP8Linear, in place.

    Args:
        model: any module, on any device, meta too, best before it is parallelized.
        recipe: as in `fp8_linear`, or "bf16": nothing is converted.
        filter_fqns: linears whose qualified name contains one of these are not converted; with []
            all are. None, the default, leaves out the output layer and torchtitan's routers: a
            linear that is itself called `output` or `lm_head`, that a module of Hugging Face
            returns from `get_output_embeddings`, or whose weight is that of an nn.Embedding; and
            those whose name contains "router.gate".
        emulate: as in `fp8_linear`.

    Returns:
        The report on every linear of the model.

    Raises:
        ValueError: a bad model, recipe or emulate; a pattern of filter_fqns that is empty, or that
            matches no module and is neither "output" nor "router.gate"; a DTensor weight whose
            shards are too small for FP8 GEMMs.
    """
    check_types((nn.Module,), model=model)
    check_choice("recipe", recipe)
    check_bool("emulate", emulate)
    output_layers = _output_layers(model) if filter_fqns is None else set()
    filter_fqns = DEFAULT_FILTER_FQNS[1:] if filter_fqns is None else filter_fqns
    check_patterns("filter_fqns", filter_fqns)
    # A shared module has several names.
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    every_name = (name for aliases in names.values() for name in aliases)
    check_filter_fqns(filter_fqns, DEFAULT_FILTER_FQNS, every_name)
    shards_are_gathered = any(isinstance(module, FSDPModule) for module in names)
    report, to_convert = ConversionReport(), []
    for module, (name, *aliases) in names.items():
        if not isinstance(module, nn.Linear):
            continue
        shape = f"{module.out_features} x {module.in_features}"
        reason = _why_left([name, *aliases], module, recipe, filter_fqns)
        if reason is None and module in output_layers:
            reason = "the output layer"
        if reason is None and not shards_are_gathered:
            check_shards(f"{name}.weight", module.weight, None)
        if report.add(name, shape, recipe, reason):
            to_convert.append((module, name))
    for module, name in to_convert:
        module.__class__ = FP8Linear
        vars(module).update(recipe=recipe, emulate=emulate, fqn=name)
    return report


def _output_layers(model: nn.Module) -> set[nn.Module]:
    """The linears that compute logits, by their own name, by Hugging Face's API or by a tie."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {m for name, m in modules.items() if name.rpartition(".")[2] in _OUTPUT_NAMES}
    # A weight that is computed, by a parametrization or by pruning, is no parameter.
    tied = {m._parameters.get("weight") for m in modules.values() if isinstance(m, nn.Embedding)}
    for module in modules.values():
        if isinstance(module, nn.Linear) and module._parameters.get("weight") in tied - {None}:
            found.add(module)
        if callable(of_hugging_face := getattr(module, "get_output_embeddings", None)):
            with contextlib.suppress(NotImplementedError):  # The model has none.
                layer = of_hugging_face()
                found |= {layer} if isinstance(layer, nn.Module) else set()
    return found


def _why_left(
    names: Sequence[str], linear: nn.Linear, recipe: str, filter_fqns: Sequence[str]
) -> str | None:
    """Why `linear`, which the model has under these names, is not converted; None if it is."""
    if recipe == BF16:
        return 'recipe = "bf16"'
    if isinstance(linear, FP8Linear):
        return f"already converted, {linear.recipe}"
    if type(linear) is not nn.Linear:
        return f"its class is {type(linear).__name__}, not nn.Linear"
    for pattern in filter_fqns:
        if any(pattern in name for name in names):
            return f'filtered by "{pattern}"'
    if reason := why_no_fp8_gemm(linear.out_features, linear.in_features):
        return reason
    if linear.weight.dtype not in DTYPES:
        return f"{linear.weight.dtype} parameters"
    return None
