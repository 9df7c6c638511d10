"""What the ops accept and return: dtypes, shapes and devices of tensors, and values of constants.

A definition names its tensors, each with the dtypes and the dimensions that it may have, and lists
its outputs in the same way:

    primitive(reference.quantize_1x128, fp8(M, K), fp32(M, blocks(K)), x=high(M, K))

A dimension has the same size wherever it occurs. E is the number of groups and is there only if the
op is given `offs`; `...` stands for any number of leading dimensions. `offs`, dtypes and
`scale_fmt` mean the same in every op, so definitions need not list them.

Kernels take addresses. Without these checks they would read FP16 as bf16, or past the end of a
scale.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_fp8.layouts import BLOCK, E4M3, ROW_ALIGNMENT, cdiv, round_up, transposed_width

DTYPES = (torch.bfloat16, torch.float32)
"""The dtypes that quantizers read and GEMMs write."""
SCALE_FMTS = ("fp32", "ue8m0")

Known = dict[str, Any]
"""What is known of a call: its arguments, and the sizes of dimensions that these have shown."""
FIRST = "first tensor"
"""The key of a call's first tensor."""


class Dim(NamedTuple):
    """A dimension: a multiple of `unit`, more than 0 unless it may be `empty`.

    `size`: computes it, if other arguments determine it.
    """

    name: str
    unit: int = 1
    empty: bool = True
    size: Callable[[Known], int] | None = None

    def of(self, known: Known) -> Any:
        """Its size, if that is known."""
        size = known.get(self.name)
        return self.size(known) if size is None and self.size is not None else size

    def in_words(self, known: Known) -> str:
        size = self.of(known)
        if size is not None:
            return f"{self.name} = {size}"
        if self.unit > 1:
            return f"{self.name}, a {'' if self.empty else 'positive '}multiple of {self.unit}"
        return self.name if self.empty else f"{self.name} > 0"


def blocks(dim: Dim) -> Dim:
    """The blocks of 128 along a dimension."""
    return Dim(f"⌈{dim.name}/{BLOCK}⌉", size=lambda known: cdiv(dim.of(known), BLOCK))


def _columns(alignment: int) -> Dim:
    """The columns of a transposed copy of M tokens."""
    width = lambda k: transposed_width(k["M"], k["offs"], k["aligned"], alignment)  # noqa: E731
    return Dim("Mt", size=width)


M, R, T = Dim("M"), Dim("R"), Dim("T")
N, K, H = (Dim(name, unit=16, empty=False) for name in "NKH")
E = Dim("E", empty=False)
C = Dim("C", unit=BLOCK)
"""Rows of groups that end at multiples of 128."""
MT, MT_ROWWISE = Dim("Mt", unit=BLOCK), Dim("Mt", unit=ROW_ALIGNMENT)
"""The columns of a transposed copy, of which nothing else is known."""
MT_OF_M, MT_ROWWISE_OF_M = _columns(BLOCK), _columns(ROW_ALIGNMENT)


class TensorSpec(NamedTuple):
    """What a tensor may be, or what an output is.

    Attributes:
        dtypes: those allowed; the first is that of an output, which has `out_dtype` if there is
            none.
        as_first: it has the dtype of the op's first tensor.
        scale: the argument with its scales, if it may be quantized: given these it is in FP8.
    """

    dtypes: tuple[torch.dtype, ...]
    dims: tuple[Dim | EllipsisType, ...]
    as_first: bool = False
    scale: str | None = None

    @property
    def padded(self) -> bool:
        """Whether these are scales of blocks, whose rows or columns are padded in memory."""
        return any(isinstance(dim, Dim) and dim.name.startswith("⌈") for dim in self.dims)

    def dtypes_in(self, known: Known) -> tuple[torch.dtype, ...]:
        if self.as_first:
            return (known[FIRST].dtype,)
        return (E4M3,) if self.scale and known[self.scale] is not None else self.dtypes

    def dims_in(self, known: Known) -> tuple[Any, ...]:
        return self.dims[1:] if self.dims[0] is E and known["offs"] is None else self.dims

    def fits(self, shape: Sequence[int], known: Known) -> bool:
        """Whether the tensor may have this shape. Adds the sizes of its dimensions to `known`."""
        dims = self.dims_in(known)
        if dims[0] is ...:
            dims = dims[1:]
            leading = len(shape) - len(dims)
            if leading < 0 or known.setdefault("...", shape[:leading]) != shape[:leading]:
                return False
            shape = shape[leading:]
        if len(shape) != len(dims):
            return False
        for size, dim in zip(shape, dims):
            want = dim.of(known)
            if want is not None:
                if size != want:
                    return False
            elif dim.unit > 1 and size % dim.unit or not dim.empty and size < 1:
                return False
            known[dim.name] = size
        return True

    def in_words(self, known: Known) -> str:
        words: list[str] = []
        for dim in self.dims_in(known):
            words += map(str, known.get("...", ["..."])) if dim is ... else [dim.in_words(known)]
        return f"{' or '.join(map(str, self.dtypes_in(known)))} of shape ({', '.join(words)})"

    def empty(self, known: Known) -> Tensor:
        """An output without data."""
        first, dims = known[FIRST], self.dims_in(known)
        shape = [n for d in dims for n in (known["..."] if d is ... else [d.of(known)])]
        dtype = (self.dtypes_in(known) or (known["out_dtype"],))[0]
        if not self.padded:
            return first.new_empty(shape, dtype=dtype)
        *lead, rows, columns = shape
        if dims[-2].name.startswith("⌈"):  # 128x128
            return first.new_empty(*lead, rows, round_up(columns, 4), dtype=dtype)[..., :columns]
        # No slice: its size would be a minimum, of which nothing is known under torch.compile.
        return first.new_empty_strided((rows, columns), (1, round_up(rows, 4)), dtype=dtype)


def _of(*dtypes: torch.dtype) -> Callable[..., TensorSpec]:
    return lambda *dims, **traits: TensorSpec(dtypes, dims, **traits)


high, integers = _of(*DTYPES), _of(torch.int32, torch.int64)
fp8, fp32, bf16 = _of(E4M3), _of(torch.float32), _of(torch.bfloat16)
int32, int64 = _of(torch.int32), _of(torch.int64)
output = _of()
"""One in `out_dtype`."""


def for_kernels(t: Tensor) -> Tensor:
    """t, contiguous, and at a multiple of 16 bytes if it is FP8, which is read by TMA."""
    t = t.contiguous()
    has_address = type(t) in (Tensor, torch.nn.Parameter)
    return t.clone() if t.dtype == E4M3 and has_address and t.data_ptr() % 16 else t


class Check:
    """Raises ValueError unless the arguments of a call are what the op accepts."""

    def __init__(
        self,
        op: str,
        parameters: Mapping[str, inspect.Parameter],
        operands: Mapping[str, TensorSpec],
    ):
        self.op, self._defaults = op, {name: p.default for name, p in parameters.items()}
        kinds = {name: p.annotation for name, p in parameters.items()}
        names = [name for name, kind in kinds.items() if kind in (Tensor, Tensor | None)]
        if "offs" in kinds:
            operands = {"offs": int32(E), **operands}
        if {*names} != operands.keys():
            raise TypeError(f"{op}: the tensors are {names}, not {list(operands)}")
        # Not the scales of blocks, which have a layout of their own (`layouts.py`), nor weights
        # that may be in FP8: the op reads them, or their transpose, as they lie.
        self._contiguous = {
            i
            for i, name in enumerate(kinds)
            if name in names and not operands[name].padded and operands[name].scale is None
        }
        # `offs` comes second, because others depend on it.
        ordered = names[:1] + sorted(names[1:], key=lambda name: name != "offs")
        self._tensors = [(name, kinds[name] != Tensor, operands[name]) for name in ordered]
        values: dict[Any, tuple[Any, ...]] = {torch.dtype: DTYPES}
        values[torch.dtype | None] = *DTYPES, None
        self._constants = {name: values[kind] for name, kind in kinds.items() if kind in values}
        if "scale_fmt" in kinds:
            self._constants["scale_fmt"] = SCALE_FMTS

    def __call__(self, *args: Any, **options: Any) -> Known:
        """What is known of the call."""
        # This costs CPU time at every call.
        known = {**self._defaults, **dict(zip(self._defaults, args)), **options}
        known[FIRST] = first = args[0]
        for name, values in self._constants.items():
            if known[name] not in values:
                raise self._error(f"{name} = {known[name]!r}", *map(repr, filter(None, values)))
        for name, optional, spec in self._tensors:
            t = known[name]
            if t is None and optional:
                continue
            if not isinstance(t, Tensor):
                raise self._error(f"{name} is {t!r}", "a tensor")
            fits = t.dtype in spec.dtypes_in(known) and spec.fits(t.shape, known)
            if not fits or t.device != first.device:
                what = f"{name} is {t.dtype} of shape {tuple(t.shape)}"
                allowed = spec.in_words(known)
                if t.device != first.device:
                    what, allowed = f"{what} on {t.device}", f"{allowed} on {first.device}"
                raise self._error(what, allowed)
        return known

    def laid_out(self, args: Sequence[Any]) -> list[Any]:
        """The arguments as kernels read them."""
        return [
            for_kernels(t) if i in self._contiguous and t is not None else t
            for i, t in enumerate(args)
        ]

    def _error(self, what: str, *allowed: str) -> ValueError:
        are = "are" if len(allowed) > 1 else "is"
        return ValueError(f"titan_fp8::{self.op}: {what}: allowed {are} {' and '.join(allowed)}")
