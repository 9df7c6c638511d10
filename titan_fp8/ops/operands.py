"""What the ops accept: dtypes, shapes and devices of their tensors, and the values of constants.

A definition lists its tensors in the order of its arguments, each with the dtypes and the
dimensions that it may have:

    primitive(reference.blockwise_mm, ..., a=fp8(M, K), sa=fp32(M, blocks(K)), b=fp8(E, N, K), ...)

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

from titan_fp8.layouts import BLOCK, E4M3, ROW_ALIGNMENT, cdiv, transposed_width

DTYPES = (torch.bfloat16, torch.float32)
"""The dtypes that quantizers read and GEMMs write."""
SCALE_FMTS = ("fp32", "ue8m0")


Sizes = dict[str, Any]
"""The sizes of dimensions that a call has shown so far, and its integers."""
Size = Callable[[Sizes, Tensor | None, bool], int]
"""Computes a size from others, `offs` and `aligned`."""


class Dim(NamedTuple):
    """A dimension: a multiple of `unit`, more than 0 unless it may be `empty`.

    `size`: computes it, if other arguments determine it.
    """

    name: str
    unit: int = 1
    empty: bool = True
    size: Size | None = None


def blocks(dim: Dim) -> Dim:
    """The blocks of 128 along a dimension."""
    name = dim.name
    return Dim(f"⌈{name}/{BLOCK}⌉", size=lambda sizes, *_: cdiv(sizes[name], BLOCK))


def _width(alignment: int) -> Size:
    return lambda sizes, offs, aligned: transposed_width(sizes["M"], offs, aligned, alignment)


M, R, T = Dim("M"), Dim("R"), Dim("T")
N, K, H = (Dim(name, unit=16, empty=False) for name in "NKH")
E = Dim("E", empty=False)
MT = Dim("Mt", unit=BLOCK)
"""The tokens of a transposed copy, of which nothing else is known."""
MT_ROWWISE = Dim("Mt", unit=ROW_ALIGNMENT)
MT_OF_M = Dim("Mt", size=_width(BLOCK))
"""The same, of M tokens."""
MT_ROWWISE_OF_M = Dim("Mt", size=_width(ROW_ALIGNMENT))


class Accepted(NamedTuple):
    """What a tensor may be.

    Attributes:
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


def high(*dims: Dim | EllipsisType, as_first: bool = False) -> Accepted:
    """In high precision."""
    return Accepted(DTYPES, dims, as_first)


def weight(*dims: Dim | EllipsisType, scale: str = "w_scale") -> Accepted:
    """In high precision, or in FP8 if the op is given its scales."""
    return Accepted(DTYPES, dims, scale=scale)


def fp8(*dims: Dim | EllipsisType) -> Accepted:
    return Accepted((E4M3,), dims)


def fp32(*dims: Dim | EllipsisType) -> Accepted:
    return Accepted((torch.float32,), dims)


def bf16(*dims: Dim | EllipsisType) -> Accepted:
    return Accepted((torch.bfloat16,), dims)


def integers(*dims: Dim | EllipsisType) -> Accepted:
    return Accepted((torch.int32, torch.int64), dims)


def for_kernels(t: Tensor) -> Tensor:
    """t, contiguous, and at a multiple of 16 bytes if it is FP8, which is read by TMA."""
    t = t.contiguous()
    if t.dtype != E4M3 or t.is_meta or type(t) not in (Tensor, torch.nn.Parameter):
        return t
    if torch.compiler.is_compiling():
        return t
    return t.clone() if t.data_ptr() % 16 else t


_OFFS = Accepted((torch.int32,), (E,))


class Check:
    """Raises ValueError unless the arguments of a call are what the op accepts.

    Attributes:
        contiguous: the positions of tensors that kernels read as contiguous ones: all but the
            scales of blocks, which have a layout of their own (`layouts.py`).
    """

    def __init__(
        self, op: str, parameters: Mapping[str, inspect.Parameter], operands: Mapping[str, Accepted]
    ):
        self.op, names = op, list(parameters)
        self._first = names[0]
        kinds = {name: p.annotation for name, p in parameters.items()}
        tensors = [name for name in names if kinds[name] in (Tensor, Tensor | None)]
        # `offs` comes first, because others depend on it.
        listed = {"offs": _OFFS} if "offs" in names else {}
        listed |= {name: operands[name] for name in tensors if name in operands}
        if len(listed) < len(tensors) or operands.keys() - listed.keys():
            raise TypeError(f"{op}: the tensors are {tensors}, not {list(operands)}")
        at = {name: names.index(name) for name in names}
        self._tensors = [
            (at[name], name, kinds[name] != Tensor, operand, at.get(operand.scale or ""))
            for name, operand in listed.items()
        ]
        self.contiguous = {i for i, _, _, operand, _ in self._tensors if not operand.padded}
        self._constants = [
            (at[name], p.default, name)
            for name, p in parameters.items()
            if kinds[name] in (int, torch.dtype, torch.dtype | None)
        ]
        self._offs, self._aligned = (at.get(name, len(names)) for name in ("offs", "aligned"))

    def __call__(self, *args: Any, scale_fmt: str = "fp32") -> None:
        # This costs CPU time at every call whose launches are not replayed.
        sizes: Sizes = {}
        given = len(args)
        offs = args[self._offs] if given > self._offs else None
        aligned = args[self._aligned] if given > self._aligned else False
        for at, default, name in self._constants:
            value = args[at] if at < given else default
            if isinstance(value, (int, torch.SymInt)):
                sizes[name] = value
            elif value is not None and value not in DTYPES:
                raise self._error(f"{name} = {value}", *map(str, DTYPES))
        if scale_fmt not in SCALE_FMTS:
            raise self._error(f"scale_fmt = {scale_fmt!r}", *map(repr, SCALE_FMTS))
        first = args[0] if args else None
        if not isinstance(first, Tensor):
            raise self._error(f"{self._first} is {first!r}", "a tensor")
        for at, name, optional, operand, scale in self._tensors:
            t = args[at] if at < given else None
            if t is None and optional:
                continue
            dtypes = (first.dtype,) if operand.as_first else operand.dtypes
            if scale is not None and scale < given and args[scale] is not None:
                dtypes = (E4M3,)
            if (
                not isinstance(t, Tensor)
                or t.dtype not in dtypes
                or t.device != first.device
                or not _fits(t.shape, operand.dims, sizes, offs, aligned)
            ):
                raise self._refusal(name, t, operand, dtypes, first, (sizes, offs, aligned))

    def laid_out(self, args: Sequence[Any]) -> list[Any]:
        """The arguments as kernels read them."""
        return [
            for_kernels(t) if i in self.contiguous and t is not None else t
            for i, t in enumerate(args)
        ]

    def _error(self, what: str, *allowed: str) -> ValueError:
        are = "are" if len(allowed) > 1 else "is"
        return ValueError(f"titan_fp8::{self.op}: {what}: allowed {are} {' and '.join(allowed)}")

    def _refusal(
        self, name: str, t: Any, operand: Accepted, dtypes: tuple, first: Tensor, call: tuple
    ) -> ValueError:
        if not isinstance(t, Tensor):
            return self._error(f"{name} is {t!r}", "a tensor")
        what = f"{name} is {t.dtype} of shape {tuple(t.shape)}"
        allowed = f"{' or '.join(map(str, dtypes))} of shape ({_in_words(operand.dims, *call)})"
        if t.device != first.device:
            what, allowed = f"{what} on {t.device}", f"{allowed} on {first.device}"
        return self._error(what, allowed)


def _fits(shape: torch.Size, dims: tuple, sizes: Sizes, offs: Tensor | None, aligned: bool) -> bool:
    if dims[0] is ...:
        dims = dims[1:]
        leading = len(shape) - len(dims)
        if leading < 0 or sizes.setdefault("...", shape[:leading]) != shape[:leading]:
            return False
        shape = shape[leading:]
    elif dims[0] is E and offs is None:
        dims = dims[1:]
    if len(shape) != len(dims):
        return False
    for size, (name, unit, empty, computed) in zip(shape, dims):
        want = sizes.get(name)
        if want is None and computed is not None:
            want = computed(sizes, offs, aligned)
        if want is None:
            if unit > 1 and size % unit or not empty and size < 1:
                return False
        elif size != want:
            return False
        sizes[name] = size
    return True


def _in_words(dims: tuple, sizes: Sizes, offs: Tensor | None, aligned: bool) -> str:
    words: list[str] = []
    for dim in dims[1:] if dims[0] is E and offs is None else dims:
        if dim is ...:
            words += map(str, sizes.get("...", ["..."]))
            continue
        size = sizes.get(dim.name)
        if size is None and dim.size is not None:
            size = dim.size(sizes, offs, aligned)
        if size is not None:
            words.append(f"{dim.name} = {size}")
        elif dim.unit > 1:
            words.append(f"{dim.name}, a {'' if dim.empty else 'positive '}multiple of {dim.unit}")
        else:
            words.append(dim.name if dim.empty else f"{dim.name} > 0")
    return ", ".join(words)
