"""Which token goes where: the indices of the permutation around the experts, in one launch.

torchtitan makes them of a score of operations on short vectors. They stand between the moment when
a rank learns how many tokens it is to get, for which its process has waited for the GPU, and the
first work that the GPU has from then on.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.launch import kernel

WARPS = 4
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS], [0]))
TABLE = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0]))
"""Who holds what of the counts, by rank and expert."""
CHUNK = gl.constexpr(1024)
"""Indices that a program writes at a time."""


@gluon.jit
def _write(out, first, count, value, STEP: gl.constexpr):
    """out[first + i] = value + STEP · i for i < count."""
    for begin in range(0, count, CHUNK):
        i = begin + gl.arange(0, CHUNK, LANES)
        gl.store(out + first + i, value + STEP * i, mask=i < count)


@kernel(do_not_specialize=["experts", "ranks", "length", "alignment"])
def _places_kernel(
    counts, tokens, places, sizes, experts, ranks, length, alignment,
    RANKS: gl.constexpr, EXPERTS: gl.constexpr,
):  # fmt: skip
    """The tokens of one expert from one rank; behind the last rank's the expert's padding."""
    part = gl.program_id(0)
    rank = part // experts
    expert = part % experts
    r = gl.arange(0, RANKS, gl.SliceLayout(1, TABLE))[:, None]
    e = gl.arange(0, EXPERTS, gl.SliceLayout(0, TABLE))[None, :]
    index = r * experts + e
    count = gl.load(counts + index, mask=(r < ranks) & (e < experts), other=0).to(gl.int32)
    token = gl.sum(gl.sum(gl.where(index < part, count, 0), 0), 0)
    mine = gl.sum(gl.sum(gl.where((r == rank) & (e == expert), count, 0), 0), 0)
    ahead = gl.sum(gl.sum(gl.where((r < rank) & (e == expert), count, 0), 0), 0)

    # torchtitan gives an expert without tokens a place for padding, too.
    size = gl.maximum(gl.cdiv(gl.sum(count, 0), alignment), 1) * alignment
    of = gl.arange(0, EXPERTS, gl.SliceLayout(0, TABLE))
    begin = gl.sum(gl.where(of < expert, size, 0), 0)
    size = gl.sum(gl.where(of == expert, size, 0), 0)
    place = begin + ahead
    _write(tokens, place, mine, token, 1)
    _write(places, token, mine, place, 1)
    if rank == 0:
        gl.store(sizes + expert, size)
    if rank == ranks - 1:
        place += mine
        end = gl.where(expert == experts - 1, length, begin + size)
        _write(tokens, place, end - place, -1, 0)


def places_of_tokens(
    counts: Tensor, experts: int, ranks: int, tokens: int, length: int, alignment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The token at each place, -1 for padding, the place of each token, and the aligned sizes.

    counts (ranks · experts,) integers, the tokens that come from each rank for each expert, by rank
    first; `tokens` is their sum, `length` at least that of the sizes. Returns (length,), (tokens,)
    and (experts,), int32.
    """
    of_place, of_token, sizes = (
        counts.new_empty(n, dtype=torch.int32) for n in (length, tokens, experts)
    )
    _places_kernel[(ranks * experts,)](
        counts, of_place, of_token, sizes, experts, ranks, length, alignment,
        triton.next_power_of_2(ranks), triton.next_power_of_2(experts), num_warps=WARPS,
    )  # fmt: skip
    return of_place, of_token, sizes
