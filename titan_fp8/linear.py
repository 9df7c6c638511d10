"""FP8Linear, an nn.Linear whose three GEMMs run in FP8, and the conversion of a model's linears.

Conversion changes a module's class in place. Its parameters stay the high-precision tensors they
were, under their own names: initialisation, FSDP2, the optimizer and checkpoints see no difference.

Under tensor parallelism the weight is a DTensor, and each rank multiplies the shards it holds,
quantising locally. What the parallel styles of PyTorch expect then follows from the weight:

    weight        input x        output y    gradient of x    gradient of weight
    Shard(0)      Replicate      Shard(-1)   Partial          Shard(0)
    Shard(1)      Shard(-1)      Partial     Shard(-1)        Shard(1)
    Replicate     Replicate      Replicate   Replicate        Replicate
    Replicate     Shard(d < -1)  Shard(d)    Shard(d)         Partial
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from titan_fp8.functional import InputCache, check_bool, fp8_linear
from titan_fp8.recipe import BF16, RECIPE_NAMES

DEFAULT_FILTER_FQNS = ("output", "router.gate")
"""The logits and the routing decide too much to be rounded: DeepSeek-V3 keeps both, as we do."""


_last_input = InputCache()
"""Shared by all modules: wq, wk and wv of an attention, w1 and w3 of a feed-forward follow each
other with one input."""


@dataclass
class ConversionReport:
    """What a conversion did: for each candidate its name, its shape, and the recipe it now has or
    the reason why it was left as it was."""

    converted: list[tuple[str, str, str]] = field(default_factory=list)
    left: list[tuple[str, str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        """A table of all candidates, ready for a log."""
        rows = [("module", "shape", "recipe / left in high precision because"), *self.converted]
        rows += [(name, shape, f"- {reason}") for name, shape, reason in self.left]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
        return "\n".join(lines)


class FP8Linear(nn.Linear):
    """An nn.Linear that multiplies by `fp8_linear`; made from one by `convert_linears`."""

    recipe: str
    emulate: bool
    fqn: str

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) to (..., N), as nn.Linear; plain tensors or DTensors."""
        if isinstance(self.weight, DTensor):
            return self._forward_sharded(x)
        return self._local_product(x, self.weight, self.bias)

    def _local_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return fp8_linear(
            x, weight, bias, recipe=self.recipe, emulate=self.emulate, cache=_last_input
        )

    def _forward_sharded(self, x: Tensor) -> DTensor:
        w, mesh = self.weight, self.weight.device_mesh
        if not isinstance(x, DTensor):
            raise TypeError(f"{self.fqn}: weight is a DTensor ({w.placements}), the input is not")
        ways = [_sharded_gemm(wp, xp, x.ndim) for wp, xp in zip(w.placements, x.placements)]
        x_in, y_out, dx, dw = zip(*ways)
        if x.placements != x_in:
            # Not where they are equal: its backward would reduce each partial gradient by itself.
            x = x.redistribute(placements=x_in)
        bias = None if self.bias is None else self._local_bias(y_out)
        y = self._local_product(
            x.to_local(grad_placements=dx), w.to_local(grad_placements=dw), bias
        )
        shape = torch.Size((*x.shape[:-1], w.shape[0]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(y, mesh, y_out, run_check=False, shape=shape, stride=stride)

    def _local_bias(self, y_out: Sequence[Placement]) -> Tensor:
        """The bias to add on this rank. Of the ranks whose outputs are summed, one adds it."""
        bias, mesh = self.bias, self.bias.device_mesh
        # Where y is partial, its gradient is whole on every rank; where tokens are sharded, not.
        grad = [
            Partial() if p.is_replicate() and y.is_shard() else p
            for p, y in zip(bias.placements, y_out)
        ]
        local = bias.to_local(grad_placements=grad)
        adds = all(mesh.get_local_rank(d) == 0 for d, y in enumerate(y_out) if y.is_partial())
        # Zero, but the gradient passes.
        return local if adds else local - local.detach()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module's; refuses a weight that torchtitan has sharded too finely for FP8."""
        if name == "weight":
            check_shards(f"{self.fqn}.weight", param, self._parameters.get(name))
        super().register_parameter(name, param)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}, emulate={self.emulate}"


def _sharded_gemm(w: Placement, x: Placement, ndim: int) -> tuple[Placement, ...]:
    """The placements of x as read, y, x's gradient and w's gradient along one mesh dimension."""
    if w.is_shard(0):
        return Replicate(), Shard(ndim - 1), Partial(), w
    if w.is_shard(1):
        return Shard(ndim - 1), Partial(), Shard(ndim - 1), w
    if isinstance(x, Shard) and x.dim % ndim != ndim - 1:
        return x, x, x, Partial()
    return Replicate(), Replicate(), Replicate(), Replicate()


def check_shards(name: str, param: Tensor | None, before: Tensor | None) -> None:
    """ValueError unless the last two dims of each rank's shard are multiples of 16.

    Reads the global shape, so that every rank raises, not only the one with the ragged shard.
    Plain tensors pass, and so does what is sharded as the parameter `before` it was: shards of
    FSDP2's may be of any size, and loading a checkpoint into its modules registers them again.
    """
    if not isinstance(param, DTensor) or (
        isinstance(before, DTensor)
        and (param.device_mesh, param.placements) == (before.device_mesh, before.placements)
    ):
        return
    for dim in (param.dim() - 2, param.dim() - 1):
        sizes = {param.shape[dim]}
        for ranks, placement in zip(param.device_mesh.shape, param.placements, strict=True):
            if placement.is_shard(dim):
                sizes = {part for size in sizes for part in _shard_sizes(size, ranks)}
        ragged = sorted(size for size in sizes if size % 16 or not size)
        if ragged:
            raise ValueError(
                f"{name}: dimension {dim} of {tuple(param.shape)}, sharded as "
                f"{param.placements} over {tuple(param.device_mesh.shape)} ranks, leaves "
                f"{ragged} to a rank; FP8 GEMMs need positive multiples of 16. Use another degree "
                "of parallelism or leave the module out by filter_fqns or fqns"
            )


def _shard_sizes(size: int, ranks: int) -> set[int]:
    whole = -(-size // ranks)
    return {max(0, min(whole, size - rank * whole)) for rank in range(ranks)}


def check_patterns(key: str, patterns: Sequence[str]) -> None:
    """ValueError unless `patterns` is a sequence of non-empty strings."""
    sequence = isinstance(patterns, Sequence) and not isinstance(patterns, str)
    if not sequence or not all(isinstance(p, str) for p in patterns):
        raise ValueError(f"{key} = {patterns!r}: allowed is a list of strings")
    if any(not pattern for pattern in patterns):
        raise ValueError(f"{key} = {list(patterns)!r}: an empty string would match every module")


def check_recipe(key: str, recipe: str) -> None:
    """ValueError unless `recipe` is one that a conversion takes."""
    if not isinstance(recipe, str) or recipe not in RECIPE_NAMES:
        raise ValueError(f"{key} = {recipe!r}: allowed are {', '.join(map(repr, RECIPE_NAMES))}")


def convert_linears(
    model: nn.Module,
    *,
    recipe: str = "blockwise",
    filter_fqns: Sequence[str] = DEFAULT_FILTER_FQNS,
    emulate: bool = False,
) -> ConversionReport:
    """Turns the nn.Linear modules of `model` into FP8Linear, in place.

    Args:
        model: any module, on any device, meta too, before it is parallelized.
        recipe: as in `fp8_linear`, or "bf16": nothing is converted.
        filter_fqns: modules whose qualified name contains one of these stay as they are.
        emulate: as in `fp8_linear`.

    Returns:
        The report on every linear of the model.

    Raises:
        ValueError: a bad recipe or emulate; an empty string among filter_fqns, or one which is not
            among the defaults and matches no module.
    """
    check_recipe("recipe", recipe)
    check_bool("emulate", emulate)
    check_patterns("filter_fqns", filter_fqns)
    # All names of each module: one that is shared has several.
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    for pattern in filter_fqns:
        unused = not any(pattern in name for aliases in names.values() for name in aliases)
        if unused and pattern not in DEFAULT_FILTER_FQNS:
            raise ValueError(
                f"filter_fqns = {list(filter_fqns)!r}: no module's name contains {pattern!r}"
            )
    report = ConversionReport()
    for module, (name, *aliases) in names.items():
        if not isinstance(module, nn.Linear):
            continue
        shape = f"{module.out_features} x {module.in_features}"
        reason = _why_left([name, *aliases], module, recipe, filter_fqns)
        if reason:
            report.left.append((name, shape, reason))
            continue
        module.__class__ = FP8Linear
        module.recipe, module.emulate, module.fqn = recipe, emulate, name
        report.converted.append((name, shape, recipe))
    return report


def _why_left(
    names: Sequence[str], linear: nn.Linear, recipe: str, filter_fqns: Sequence[str]
) -> str | None:
    """Why the linear of these names is not converted; None if it is."""
    if recipe == BF16:
        return 'recipe = "bf16"'
    if isinstance(linear, FP8Linear):
        return f"already converted, {linear.recipe}"
    if type(linear) is not nn.Linear:
        return f"{type(linear).__name__} is a linear of its own kind"
    for pattern in filter_fqns:
        if any(pattern in name for name in names):
            return f'filtered by "{pattern}"'
    for dim, size in (("N", linear.out_features), ("K", linear.in_features)):
        if size % 16 or not size:
            return f"{dim} = {size} is not a multiple of 16"
    if linear.weight.dtype not in (torch.bfloat16, torch.float32):
        return f"{linear.weight.dtype} parameters"
    return None
