"""GatheredWeight: a weight that FSDP2 has gathered in FP8, as autograd and the layers see it.

The tensor has the shape and dtype of the weight in high precision, requires grad, and gets its
gradient in that dtype. Its values exist in FP8 only: q and scales, in the layout of the parameter.
An FP8 product is called with it as with any weight: its autograd function takes q and the scales
out of it (`functional.py`) and passes them to the ops, which then quantize no weight.

Views that FSDP2, DTensor and nn.Parameter make are supported; any other op is an error.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


class GatheredWeight(Tensor):
    """A weight (N, K) or (E, N, K) whose values are q · s.

    Attributes:
        q: FP8, of the weight's shape. FSDP2 frees its memory and gathers into it again.
        s: the scales of q, as fprop reads them.
        q_columns: the weight quantized along its columns, of the weight's shape; the op of dgrad
            transposes it. None if q serves for both, as with blocks of 128x128.
        s_t: the scales that dgrad reads.
    """

    q: Tensor
    s: Tensor
    q_columns: Tensor | None
    s_t: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, q: Tensor, s: Tensor, q_columns: Tensor | None, s_t: Tensor, dtype: torch.dtype
    ) -> "GatheredWeight":
        weight = Tensor._make_wrapper_subclass(cls, q.shape, dtype=dtype, device=q.device)
        weight.q, weight.s, weight.q_columns, weight.s_t = q, s, q_columns, s_t
        return weight

    @property
    def for_fprop(self) -> tuple[Tensor, Tensor]:
        """q and the scales that fprop reads."""
        return self.q, self.s

    @property
    def for_dgrad(self) -> tuple[Tensor, Tensor]:
        """q, which the op of dgrad transposes, and the scales of the transpose."""
        return self.q if self.q_columns is None else self.q_columns, self.s_t

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raises NotImplementedError if it should be cast, as by autocast, which q cannot be."""
        if dtype != self.dtype:
            raise NotImplementedError(
                f"{self} was quantized as {self.dtype} and is to be multiplied as {dtype}: let "
                "mixed_precision_param of FSDP2 be the dtype of autocast, or set "
                "fsdp_all_gather = false"
            )

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        columns = [] if self.q_columns is None else ["q_columns"]
        return ["q", "s", *columns, "s_t"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        tensors: dict[str, Tensor], dtype: torch.dtype, shape: Any, strides: Any
    ) -> "GatheredWeight":
        columns = tensors.get("q_columns")
        return GatheredWeight(tensors["q"], tensors["s"], columns, tensors["s_t"], dtype)

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


def _same(w: GatheredWeight, *args: Any) -> GatheredWeight:
    """A view of the whole weight: `args` are its own size, strides and offset."""
    for sizes, own in zip(args, (w.shape, w.stride())):
        if tuple(sizes) != tuple(own):
            raise NotImplementedError(f"{w} cannot be viewed as {tuple(sizes)}")
    return GatheredWeight(w.q, w.s, w.q_columns, w.s_t, w.dtype)


def _as_strided(w: GatheredWeight, size: Any, stride: Any, offset: int = 0) -> GatheredWeight:
    return _same(w, size, stride)


def _zeros_like(w: GatheredWeight, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return torch.zeros(w.shape, dtype=dtype or w.dtype, device=w.device)


_IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.view.default: _same,
    _aten.as_strided.default: _as_strided,
    _aten.zeros_like.default: _zeros_like,
}
