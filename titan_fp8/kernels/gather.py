"""Rows of a tensor by an index, for the permutation around the experts: a copy and nothing else.

A program copies some rows of the result, or a part of each where they are long. Each warp takes
rows of its own and reads them 512 bytes at a time, and eight 16-byte loads a thread are under way
at once: which rows they are is known from one load of the index, and no thread waits for another.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.tile import layout
from titan_fp8.reference import cdiv

WARPS = 4
LOADS = 8
"""16-byte loads of a thread."""
ACROSS = 4
"""How many of them lie along one row, if it is long enough."""


@gluon.jit(do_not_specialize=["M", "R"])
def _gather_kernel(x, index, out, M, R, units, blocks, UNIT: gl.constexpr, TILE: gl.constexpr):
    # So that the compiler knows K as a multiple of the elements of a load.
    K = units * UNIT
    row = gl.program_id(0) // blocks * TILE.shape[0]
    column = gl.program_id(0) % blocks * TILE.shape[1]
    i = row + gl.arange(0, TILE.shape[0], gl.SliceLayout(1, TILE))
    j = column + gl.arange(0, TILE.shape[1], gl.SliceLayout(0, TILE))
    source = gl.load(index + i, mask=i < R, other=-1).to(gl.int64)
    inside = (source >= 0) & (source < M)
    values = gl.load(
        x + (source[:, None] * K + j[None, :]), mask=inside[:, None] & (j < K)[None, :], other=0
    )
    there = (i < R)[:, None] & (j < K)[None, :]
    gl.store(out + (i.to(gl.int64)[:, None] * K + j[None, :]), values, mask=there)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Row index[i] of x (M, K) as row i, zeros where x has no such row: (R, K); index (R,)."""
    (m, k), r = x.shape, index.shape[0]
    out = x.new_empty(r, k)
    # Rows that do not begin at multiples of 16 bytes are copied element by element.
    unit = 16 // x.element_size() if k * x.element_size() % 16 == 0 else 1
    across = min(ACROSS, triton.next_power_of_2(cdiv(max(k, 1), 32 * unit)))
    tile = layout((1, unit), (1, 32), (WARPS, 1), (LOADS // across, across))
    blocks = cdiv(k, tile.shape[1])
    if out.numel():
        _gather_kernel[(cdiv(r, tile.shape[0]) * blocks,)](
            x, index.contiguous(), out, m, r, k // unit, blocks, unit, tile, num_warps=WARPS
        )
    return out
