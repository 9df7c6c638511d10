"""Rowwise quantizers of shards of weights that FSDP2 gathers in FP8; q is not transposed.

A shard has whole rows, but only a part of each column, whose scale depends on all ranks. So there
are two kernels, with a collective between them: one quantizes rows and takes the maxima of columns,
the other casts columns. Both round x to the dtype in which it would be gathered.

A thread holds 8 rows by 8 columns, so it finds the maxima of its columns alone. Programs combine
theirs by atomic maxima, and none waits for another. For these, neighboring lanes get neighboring
columns: many programs write to the same few lines of the L2 cache, which take one request for eight
columns as fast as one for a single column. The first kernel reads x twice, once for the maxima and
once for the casts.
"""

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.hopper.quantize_cast import scale_of
from titan_fp8.kernels.hopper.quantize_tile import tile_layout
from titan_fp8.kernels.launch import kernel
from titan_fp8.layouts import E4M3, cdiv

WARPS = 4
TILE = tile_layout((8, 8), (1, 32), (1, WARPS))
"""Layout of a tile of 8 rows by 1024 columns."""
COLUMNS = gl.BlockedLayout([1], [32], [WARPS], [0])
"""Layout of the maxima of its columns when they are written."""


@gluon.jit
def _max(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _load(x, column, R, K, ROUNDED: gl.constexpr, TILE: gl.constexpr):
    """The tile at row 0 and `column` of x (R, K) in FP32, first rounded to bf16 if ROUNDED.

    Zeros past R rows and K columns.
    """
    i = gl.arange(0, TILE.shape[0], gl.SliceLayout(1, TILE))
    j = column + gl.arange(0, TILE.shape[1], gl.SliceLayout(0, TILE))
    inside = (i < R)[:, None] & (j < K)[None, :]
    values = gl.load(x + (i[:, None] * K + j[None, :]), mask=inside, other=0)
    if ROUNDED:
        values = values.to(gl.bfloat16)
    return values.to(gl.float32)


@gluon.jit
def _store(q, values, column, R, K, TILE: gl.constexpr):
    i = gl.arange(0, TILE.shape[0], gl.SliceLayout(1, TILE))
    j = column + gl.arange(0, TILE.shape[1], gl.SliceLayout(0, TILE))
    inside = (i < R)[:, None] & (j < K)[None, :]
    bytes_of = values.to(gl.float8e4nv).to(gl.int8, bitcast=True)
    gl.store(q + (i[:, None] * K + j[None, :]), bytes_of, mask=inside)


@gluon.jit
def _magnitudes(values):
    """The bits of |values|; as integers NaN is above Inf."""
    return values.to(gl.int32, bitcast=True) & 0x7FFFFFFF


# The kernels count columns in sixteens, which tells the compiler that rows start at multiples of 16
# bytes.


@kernel(do_not_specialize=["R"])
def quantize_shard_row_kernel(
    x, q, s, amax, R, K16,
    ROUNDED: gl.constexpr, TILE: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Quantizes 8 rows of x (E, R, K), and raises amax (E, K) to the bits of their maxima.

    K16: K / 16.
    """
    K = K16 * 16
    row = gl.program_id(0) * TILE.shape[0]
    matrix = gl.program_id(1).to(gl.int64)
    start = (matrix * R + row) * K
    rows = R - row
    most = gl.full(TILE.shape, 0, gl.int32, TILE)
    for column in range(0, K, TILE.shape[1]):
        bits = _magnitudes(_load(x + start, column, rows, K, ROUNDED, TILE))
        most = gl.maximum(most, bits)
        highest = gl.convert_layout(gl.reduce(bits, 0, _max), COLUMNS)
        j = column + gl.arange(0, TILE.shape[1], COLUMNS)
        gl.atomic_max(amax + matrix * K + j, highest, mask=j < K, sem="relaxed")
    scale, r = scale_of(gl.reduce(most, 1, _max))
    i = gl.arange(0, TILE.shape[0], gl.SliceLayout(1, TILE))
    gl.store(s + (matrix * R + row) + i, scale, mask=i < rows)
    for column in range(0, K, TILE.shape[1]):
        values = _load(x + start, column, rows, K, ROUNDED, TILE)
        _store(q + start, values * r[:, None], column, rows, K, TILE)


@kernel(do_not_specialize=["R"])
def quantize_shard_col_kernel(
    x, amax, q, R, K16, ROUNDED: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """Casts a tile of x (E, R, K) with the scales of its columns, from the bits amax (E, K)."""
    K = K16 * 16
    row = gl.program_id(0) * TILE.shape[0]
    column = gl.program_id(1) * TILE.shape[1]
    matrix = gl.program_id(2).to(gl.int64)
    j = column + gl.arange(0, TILE.shape[1], gl.SliceLayout(0, TILE))
    bits = gl.load(amax + matrix * K + j, mask=j < K, other=0)
    _, r = scale_of(bits & 0x7FFFFFFF)
    start = (matrix * R + row) * K
    values = _load(x + start, column, R - row, K, ROUNDED, TILE)
    _store(q + start, values * r[None, :], column, R - row, K, TILE)


def quantize_shard_row(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of x (..., R, K), R > 0, as `dtype`: q (..., R, K), s (..., R), amax (..., K)."""
    *lead, rows, columns = x.shape
    q, s = torch.empty_like(x, dtype=E4M3), x.new_empty(*lead, rows, dtype=torch.float32)
    amax = x.new_zeros(*lead, columns, dtype=torch.float32)
    grid = cdiv(rows, TILE.shape[0]), math.prod(lead)
    quantize_shard_row_kernel[grid](
        x, (q, torch.int8), s, (amax, torch.int32), rows, columns // 16, dtype != x.dtype, TILE,
        COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return q, s, amax


def quantize_shard_col(x: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Columns of x (..., R, K), R > 0, as `dtype`, by their maxima amax (..., K): q (..., R, K)."""
    *lead, rows, columns = x.shape
    q = torch.empty_like(x, dtype=E4M3)
    grid = cdiv(rows, TILE.shape[0]), cdiv(columns, TILE.shape[1]), math.prod(lead)
    quantize_shard_col_kernel[grid](
        x, (amax, torch.int32), (q, torch.int8), rows, columns // 16, dtype != x.dtype, TILE,
        num_warps=WARPS,
    )  # fmt: skip
    return q
