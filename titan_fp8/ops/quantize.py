"""The quantizers: bfloat16 or float32 in, e4m3 (q) and FP32 scales (s) out.

Names give the block that shares a scale, (rows x columns) of the input; `_t` says that the output
is written transposed. The last dimension of inputs is a multiple of 16. `layouts.py` explains Mt,
`offs` and `aligned`, `reference.py` the arithmetic. `scale_fmt` is the format of scales: "fp32", or
"ue8m0" for powers of two.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from titan_fp8.layouts import BLOCK, E4M3, ROW_ALIGNMENT, cdiv, round_up, transposed_width
from titan_fp8.ops.operands import K, M, R, fp32, high
from titan_fp8.ops.registry import primitive


def new_fp8(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.new_empty(shape, dtype=E4M3)


def new_scale(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


def new_scale_1x128(x: Tensor, rows: int, columns: int) -> Tensor:
    """(rows, ⌈columns/128⌉), stride 1 along the rows, which are padded to a multiple of 4."""
    return new_scale(x, (cdiv(columns, BLOCK), round_up(rows, 4)))[:, :rows].t()


def new_scale_128x128(w: Tensor, n: int, k: int) -> Tensor:
    """(..., ⌈n/128⌉, ⌈k/128⌉), the last dimension padded to a multiple of 4."""
    storage = new_scale(w, (*w.shape[:-2], cdiv(n, BLOCK), round_up(cdiv(k, BLOCK), 4)))
    return storage[..., : cdiv(k, BLOCK)]


# Blockwise


@primitive(x=high(M, K))
def quantize_1x128(
    x: Tensor, *, scale_fmt: str = "fp32", emulate: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows of x (M, K): q (M, K) and s (M, ⌈K/128⌉)."""
    return new_fp8(x, x.shape), new_scale_1x128(x, *x.shape)


@primitive(x=high(M, K))
def quantize_128x1_t(
    x: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    *,
    scale_fmt: str = "fp32",
    emulate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Columns of x (M, K): q (K, Mt) and s (K, Mt/128)."""
    k, width = x.shape[1], transposed_width(x.shape[0], offs, aligned, BLOCK)
    return new_fp8(x, (k, width)), new_scale_1x128(x, k, width)


@primitive(x=high(M, K))
def quantize_1x128_128x1_t(
    x: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    *,
    scale_fmt: str = "fp32",
    emulate: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows and columns of x (M, K) from one read: the outputs of the two ops above."""
    return (*quantize_1x128(x), *quantize_128x1_t(x, offs, aligned))


@primitive(w=high(..., R, K))
def quantize_128x128(
    w: Tensor,
    dtype: torch.dtype | None = None,
    *,
    scale_fmt: str = "fp32",
    emulate: bool = False,
) -> tuple[Tensor, Tensor]:
    """A weight (..., N, K), as `dtype`: q (..., N, K) and s (..., ⌈N/128⌉, ⌈K/128⌉).

    dtype: what w is rounded to before it is quantized, one of `DTYPES`; by default its own.
    """
    return new_fp8(w, w.shape), new_scale_128x128(w, *w.shape[-2:])


@primitive(w=high(..., R, K))
def quantize_128x128_t(
    w: Tensor, *, scale_fmt: str = "fp32", emulate: bool = False
) -> tuple[Tensor, Tensor]:
    """A weight (..., N, K), transposed: q (..., K, N) and s (..., ⌈K/128⌉, ⌈N/128⌉)."""
    *lead, n, k = w.shape
    return new_fp8(w, (*lead, k, n)), new_scale_128x128(w, k, n)


# Rowwise


@primitive(x=high(..., K))
def quantize_row(x: Tensor, *, emulate: bool = False) -> tuple[Tensor, Tensor]:
    """Rows of x (..., R, C): q (..., R, C) and s (..., R)."""
    return new_fp8(x, x.shape), new_scale(x, x.shape[:-1])


@primitive(x=high(M, K))
def quantize_col_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False, *, emulate: bool = False
) -> tuple[Tensor, Tensor]:
    """Columns of x (M, K), by group: q (K, Mt) and s (K,), with groups (E, K)."""
    k, width = x.shape[1], transposed_width(x.shape[0], offs, aligned, ROW_ALIGNMENT)
    return new_fp8(x, (k, width)), new_scale(x, (k,) if offs is None else (offs.shape[0], k))


@primitive(x=high(M, K))
def quantize_row_col_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False, *, emulate: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows and columns of x (M, K): q (M, K), s (M,), q (K, Mt), s (K,) or (E, K)."""
    return (*quantize_row(x), *quantize_col_t(x, offs, aligned))


@primitive(w=high(..., R, K))
def quantize_weight_col_t(w: Tensor, *, emulate: bool = False) -> tuple[Tensor, Tensor]:
    """Columns of a weight (..., N, K): q (..., K, N) and s (..., K)."""
    *lead, n, k = w.shape
    return new_fp8(w, (*lead, k, n)), new_scale(w, (*lead, k))


# Of both recipes


def cast_weight(impl: Any, w: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A weight as a quantizer of `impl` reads it: of this dtype, by default its own, contiguous.

    Autocast casts weights. Ops cast them here, because an observer knows a layer by the memory of
    its parameter, and a copy has another address.
    """
    cast = w.to(dtype or w.dtype).contiguous()
    if cast is not w and hasattr(impl, "note_cast"):
        impl.note_cast(w, cast)
    return cast


# Rowwise, of a rank's shard of a weight that FSDP2 gathers in FP8


@primitive(x=high(..., R, K))
def quantize_shard_row(
    x: Tensor, dtype: torch.dtype, *, emulate: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of x (..., R, K), R > 0, as `dtype`: q (..., R, K), s (..., R).

    The third output is the absolute maxima (..., K) of the columns, FP32.
    """
    *lead, rows, columns = x.shape
    return new_fp8(x, x.shape), new_scale(x, (*lead, rows)), new_scale(x, (*lead, columns))


@primitive(x=high(..., R, K), amax=fp32(..., K))
def quantize_shard_col(
    x: Tensor, amax: Tensor, dtype: torch.dtype, *, emulate: bool = False
) -> Tensor:
    """Columns of x (..., R, K), R > 0, as `dtype`, not transposed: q (..., R, K).

    amax (..., K): the absolute maxima of the whole columns, of which x has some rows.
    """
    return new_fp8(x, x.shape)
