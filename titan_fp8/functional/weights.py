"""The weights that a product takes: a tensor in high precision, or one that is in FP8 already.

`operands_of` gives the GEMMs what they read of each kind. Given q and scales, ops quantize no
weight.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_fp8.functional.bodies import WeightOperand
from titan_fp8.functional.checks import check_bool, check_multiples_of_16, check_types
from titan_fp8.layouts import BLOCK, E4M3, cdiv
from titan_fp8.recipe import get_recipe

_aten = torch.ops.aten


class GatheredWeight(Tensor):
    """A weight (N, K) or (E, N, K) that FSDP2 has gathered in FP8, as autograd and layers see it.

    It has the shape and dtype of the weight in high precision, requires grad, and gets its gradient
    in that dtype. Its values, q · s, exist in FP8 only, in the layout of the parameter. Views that
    FSDP2, DTensor and nn.Parameter make are supported; any other op is an error.

    Attributes:
        q: FP8, of the weight's shape. FSDP2 frees its memory and gathers into it again.
        s, s_t: the scales of its 128x128 blocks, as fprop and as dgrad reads them.
    """

    q: Tensor
    s: Tensor
    s_t: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, q: Tensor, s: Tensor, s_t: Tensor, dtype: torch.dtype) -> "GatheredWeight":
        weight = Tensor._make_wrapper_subclass(cls, q.shape, dtype=dtype, device=q.device)
        weight.q, weight.s, weight.s_t = q, s, s_t
        return weight

    @property
    def for_fprop(self) -> tuple[Tensor, Tensor]:
        """q and the scales that fprop reads."""
        return self.q, self.s

    @property
    def for_dgrad(self) -> tuple[Tensor, Tensor]:
        """q, which the op of dgrad transposes, and the scales of the transpose."""
        return self.q, self.s_t

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["q", "s", "s_t"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        tensors: dict[str, Tensor], dtype: torch.dtype, shape: Any, strides: Any
    ) -> "GatheredWeight":
        return GatheredWeight(tensors["q"], tensors["s"], tensors["s_t"], dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        implementation = _IMPLEMENTATIONS.get(func)
        if implementation is None and func._can_decompose():
            # Only in inference mode does this get ops made of other ops.
            return func.decompose(*args, **(kwargs or {}))
        if implementation is None:
            raise NotImplementedError(
                f"titan_fp8: {func} cannot read a weight that FSDP2 has gathered in FP8, only FP8 "
                "products can: set fsdp_all_gather = false or read the sharded parameter"
            )
        return implementation(*args, **(kwargs or {}))


def _same(
    w: GatheredWeight, size: Any = None, stride: Any = None, storage_offset: int | None = None
) -> GatheredWeight:
    """A view of the whole weight: size, strides and offset are its own, if they are given."""
    own = [*w.shape], [*w.stride()], 0
    view = [*(size or own[0])], [*(stride or own[1])], storage_offset or 0
    if view != own:
        raise NotImplementedError(f"{w} cannot be viewed as size, stride, offset {view}")
    return GatheredWeight(w.q, w.s, w.s_t, w.dtype)


def _zeros_like(
    w: GatheredWeight, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Tensor:
    return torch.zeros(w.shape, dtype=dtype or w.dtype, device=device or w.device)


_IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.view.default: _same,
    _aten.as_strided.default: _same,
    _aten.zeros_like.default: _zeros_like,
}


class QuantizedWeight(NamedTuple):
    """A weight that is already in FP8, in the layouts of both GEMMs that read it.

    Attributes:
        recipe: the name of the recipe that it was quantized by.
        rows: q (N, K) or (E, N, K), e4m3, and its FP32 scale, for fprop.
        columns: the transposed q (K, N) or (E, K, N) and its scale, for dgrad.
    """

    recipe: str
    rows: tuple[Tensor, Tensor]
    columns: tuple[Tensor, Tensor]

    @property
    def shape(self) -> torch.Size:
        return self.rows[0].shape

    @property
    def device(self) -> torch.device:
        return self.rows[0].device

    @property
    def requires_grad(self) -> bool:
        return False

    @property
    def dtype(self) -> None:
        """That of its gradient, which it does not get."""

    @property
    def for_fprop(self) -> WeightOperand:
        """q as fprop reads it."""
        return self.rows

    @property
    def for_dgrad(self) -> WeightOperand:
        """The q that dgrad reads, laid out as the weight, a view of its transpose."""
        q_t, s_t = self.columns
        return q_t.mT, s_t


Weight = Tensor | QuantizedWeight
WEIGHTS = (Tensor, QuantizedWeight)
OPTIONAL = (Tensor, type(None))


def operands_of(w: Weight, dtype: torch.dtype) -> tuple[WeightOperand, WeightOperand]:
    """What fprop and dgrad read of a weight: itself and None, or q and the scales of this GEMM.

    Raises:
        NotImplementedError: a GatheredWeight is to be cast to `dtype`, as by autocast.
    """
    if isinstance(w, Tensor) and not isinstance(w, GatheredWeight):
        return (w, None), (w, None)
    if isinstance(w, GatheredWeight) and w.dtype != dtype:
        raise NotImplementedError(
            f"{w} was quantized as {w.dtype} and is to be multiplied as {dtype}: let "
            "mixed_precision_param of FSDP2 be the dtype of autocast, or set "
            "fsdp_all_gather = false"
        )
    return w.for_fprop, w.for_dgrad


@torch.no_grad()
def quantize_weight(
    weight: Tensor, *, recipe: str = "blockwise", emulate: bool = False
) -> QuantizedWeight:
    """Quantize a weight once, for products that read it many times.

    Args:
        weight: (N, K) or (E, N, K), bfloat16 or float32, N and K multiples of 16.
        recipe, emulate: as in `fp8_linear`.

    Returns:
        The weight in FP8. It does not follow later changes of `weight` and gets no gradient.

    Raises:
        ValueError: a recipe, type, shape or dtype other than these.
        RuntimeError: a CUDA device without FP8 kernels, unless `emulate`.
    """
    quantizers = get_recipe(recipe)
    check_bool("emulate", emulate)
    check_types(weight=weight)
    if weight.dim() not in (2, 3):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}: allowed are (N, K) and (E, N, K)"
        )
    check_multiples_of_16("weight", weight.shape)
    weight = weight.contiguous()
    rows = quantizers.quantize_weight(weight, emulate=emulate)
    return QuantizedWeight(recipe, rows, quantizers.quantize_weight_t(weight, emulate=emulate))


def check_weight(name: str, weight: Weight, recipe: str) -> Tensor | None:
    """Checks that `weight` suits the recipe. Returns it, or None if it is a QuantizedWeight."""
    check_multiples_of_16(name, weight.shape)
    if not isinstance(weight, QuantizedWeight):
        return weight
    if weight.recipe != recipe:
        raise ValueError(f"{name} was quantized for {weight.recipe!r}: the recipe is {recipe!r}")
    *groups, n, k = weight.shape
    for part, (q, s), (rows, columns) in (
        ("rows", weight.rows, (n, k)),
        ("columns", weight.columns, (k, n)),
    ):
        blocks = (cdiv(rows, BLOCK), cdiv(columns, BLOCK))
        scales = blocks if get_recipe(recipe).has_weight_blocks else (rows,)
        for what, t, dtype, sizes in (
            ("q", q, E4M3, (rows, columns)),
            ("scale", s, torch.float32, scales),
        ):
            allowed = (*groups, *sizes)
            if t.shape != allowed or t.device != weight.device or t.dtype != dtype:
                raise ValueError(
                    f"{name}.{part}: {what} is {t.dtype} of shape {tuple(t.shape)} on {t.device}: "
                    f"the recipe needs {dtype} of shape {allowed} on {weight.device}"
                )
    return None
