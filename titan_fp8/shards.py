"""Quantises the shards of weights, one per rank, to what quantising the whole weight would give.

A rank has some rows of a weight (N, K), or some experts of (E, N, K), or some rows of each. It
quantises them alone. What it cannot know alone is the scale of a block whose rows are on several
ranks: of 128x128 blocks those that a shard cuts, of rowwise recipes every column. Ranks agree on
it by a maximum, because the scale of a block is the largest of the scales of its parts:

1. Each rank computes the scales of its rows, and of its part of the blocks that it shares. A table
   of all scales of the weight has zeros elsewhere.
2. One all-reduce takes the maximum over the ranks, of all tables at once. Then every rank has all
   scales of the weight, which need not be gathered.
3. Each rank casts what it shares with the agreed scales.

Everything else is quantised in step 1 by the ops that quantise whole weights.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titan_fp8.layouts import BLOCK, E4M3, cdiv, pad_blocks, round_up
from titan_fp8.recipe import Recipe, Scaling, get_recipe
from titan_fp8.reference import cast, scale_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Which part of a weight a rank has.

    Attributes:
        whole: the shape of the weight, (N, K) or (E, N, K).
        dim: the dimension that is sharded, not the last.
        first: where the shard begins along it.
        padded: the shape of the largest shard; the others are padded to it when they are gathered.
        dtype: what the weight is cast to before it is quantised.
        group: the ranks that share the weight; None if this rank has all of it.
    """

    whole: Shape
    dim: int
    first: int
    padded: Shape
    dtype: torch.dtype
    group: dist.ProcessGroup | None

    @property
    def first_row(self) -> int:
        return self.first if self.dim == len(self.whole) - 2 else 0

    def part(self, table: Tensor, size: int) -> Tensor:
        """The experts of a table (E, ...) of which this rank has rows."""
        if self.dim == len(self.whole) - 2:
            return table
        return table[self.first : self.first + size]


class QuantisedShard:
    """The FP8 copies of one rank's shard, and the scales of the whole weight.

    The scales keep their memory: gathered weights refer to it.

    Attributes:
        q: the shard as fprop reads it, padded; None before the first quantisation.
        q_columns: the shard as dgrad reads it, if it is quantised on its own.
        s, s_t: the scales of the whole weight, for fprop and dgrad.
    """

    def __init__(self, recipe: str, emulate: bool, place: Place, device: torch.device):
        self.recipe, self.emulate, self.place = recipe, emulate, place
        self.q: Tensor | None = None
        self.q_columns: Tensor | None = None
        *lead, n, k = place.whole
        if self.blockwise:
            rows, columns = cdiv(n, BLOCK), cdiv(k, BLOCK)
            # In the layout of 128x128 scales (`layouts.py`).
            self.table = torch.zeros(*lead, rows, round_up(columns, 4), device=device)
            table_t = torch.zeros(*lead, columns, round_up(rows, 4), device=device)
            self.s, self.s_t = self.table[..., :columns], table_t[..., :rows]
        else:
            self.table = torch.zeros(*lead, n + k, device=device)
            self.s, self.s_t = (torch.zeros(*lead, size, device=device) for size in (n, k))

    @property
    def ops(self) -> Recipe:
        return get_recipe(self.recipe)

    @property
    def blockwise(self) -> bool:
        return self.ops.fprop.right is Scaling.BLOCK_128X128

    def scale_of(self, amax: Tensor) -> Tensor:
        """By the recipe's rule, from a tensor of maxima in the weight's dtype."""
        fmt = getattr(self.ops.weight, "keywords", {}).get("scale_fmt", "fp32")
        return scale_of(amax.float(), fmt)

    def new_q(self) -> Tensor:
        return torch.zeros(self.place.padded, dtype=E4M3, device=self.table.device)


@dataclass
class _Edge:
    """The part of a 128x128 block row that a shard has where the block spans several ranks.

    Only the first and the last rows of a shard can be such a part.
    """

    shard: QuantisedShard
    x: Tensor
    q: Tensor
    """Where the rows go."""
    s: Tensor
    """The scales of the block, (..., ⌈K/128⌉) in the shard's table."""


@torch.no_grad()
def quantise(shards: Iterable[tuple[QuantisedShard, Tensor]]) -> None:
    """Quantises shards, given with their values in high precision; one collective per group.

    All ranks of a group must call this with the same weights, in the same order.
    """
    shards = list(shards)
    edges: list[_Edge] = []
    for shard, x in shards:
        shard.table.zero_()
        if shard.blockwise:
            edges += _quantise_blocks(shard, x)
        else:
            _quantise_rows(shard, x)
    _scale_edges(edges)
    _agree([shard for shard, _ in shards])
    _cast_edges(edges)
    for shard, x in shards:
        if shard.blockwise:
            shard.s_t.copy_(shard.s.mT)
        else:
            n = shard.place.whole[-2]
            shard.s.copy_(shard.table[..., :n])
            shard.s_t.copy_(shard.table[..., n:])
            _cast_columns(shard, x)


def _quantise_blocks(shard: QuantisedShard, x: Tensor) -> list[_Edge]:
    """Quantises the blocks whose rows all belong to x, and returns the rest."""
    place, n = shard.place, x.shape[-2]
    start, end = place.first_row, place.first_row + n
    s = place.part(shard.s, x.shape[0])
    head = min(-start % BLOCK, n)
    tail = n if end == place.whole[-2] or head == n else n - end % BLOCK
    shard.q = None  # Its memory may serve the next one.
    if (head, tail) == (0, n) and x.shape == place.padded:
        shard.q, own = shard.ops.weight(x.to(place.dtype), emulate=shard.emulate)
        s[..., start // BLOCK : cdiv(end, BLOCK), :] = own
        return []
    shard.q = shard.new_q()
    if not x.numel():
        return []
    q = shard.q[: x.shape[0]]
    if head < tail:
        whole = x[..., head:tail, :].to(place.dtype).contiguous()
        own_q, own = shard.ops.weight(whole, emulate=shard.emulate)
        q[..., head:tail, :] = own_q
        s[..., (start + head) // BLOCK : cdiv(start + tail, BLOCK), :] = own
    edges = []
    for first, last in ((0, head), (tail, n)):
        if first < last:
            rows = slice(first, last)
            block = s[..., (start + first) // BLOCK, :]
            edges.append(_Edge(shard, x[..., rows, :], q[..., rows, :], block))
    return edges


def _by_shape(edges: list[_Edge]) -> Iterable[list[_Edge]]:
    """Edges that can be stacked: a launch for all of them takes the host less time."""
    groups = defaultdict(list)
    for edge in edges:
        key = edge.x.shape, edge.x.dtype, edge.shard.place.dtype, edge.shard.recipe
        groups[key].append(edge)
    return groups.values()


def _stack(edges: list[_Edge]) -> Tensor:
    x = torch.stack([edge.x for edge in edges])
    return x.to(edges[0].shard.place.dtype)


def _scale_edges(edges: list[_Edge]) -> None:
    for group in _by_shape(edges):
        columns = pad_blocks(_stack(group).abs().amax(-2), -1)
        s = group[0].shard.scale_of(columns.unflatten(-1, (-1, BLOCK)).amax(-1))
        for edge, own in zip(group, s):
            edge.s.copy_(own)


def _cast_edges(edges: list[_Edge]) -> None:
    for group in _by_shape(edges):
        x = _stack(group).float()
        s = torch.stack([edge.s for edge in group]).repeat_interleave(BLOCK, -1)
        q = cast(x, s[..., None, : x.shape[-1]])
        for edge, own in zip(group, q):
            edge.q.copy_(own)


def _quantise_rows(shard: QuantisedShard, x: Tensor) -> None:
    """Quantises the rows of x; the scales of its columns are those of its rows alone."""
    place = shard.place
    shard.q = None
    if not x.numel():
        shard.q = shard.new_q()
        return
    x = x.to(place.dtype)
    q, s = shard.ops.weight(x, emulate=shard.emulate)
    if x.shape != place.padded:
        padded = shard.new_q()
        padded[: x.shape[0]] = q
        q = padded
    shard.q = q
    table = place.part(shard.table, x.shape[0])
    table[..., place.first_row : place.first_row + x.shape[-2]] = s
    table[..., place.whole[-2] :] = shard.scale_of(x.abs().amax(-2))


def _cast_columns(shard: QuantisedShard, x: Tensor) -> None:
    shard.q_columns = None
    q = shard.new_q()
    if x.numel():
        s = shard.place.part(shard.s_t, x.shape[0])
        q[: x.shape[0]] = cast(x.to(shard.place.dtype).float(), s.unsqueeze(-2))
    shard.q_columns = q


def _agree(shards: list[QuantisedShard]) -> None:
    """The maximum of each table over the ranks that share its weight."""
    groups = defaultdict(list)
    for shard in shards:
        if shard.place.group is not None:
            groups[shard.place.group].append(shard.table)
    for group, tables in groups.items():
        # As integers: they order positive numbers alike, put NaN above Inf, and no maximum of
        # integers loses a NaN. The sign of a NaN is cleared.
        flat = torch.cat([table.flatten() for table in tables]).view(torch.int32)
        flat.bitwise_and_(0x7FFFFFFF)
        dist.all_reduce(flat, dist.ReduceOp.MAX, group)
        parts = flat.view(torch.float32).split([table.numel() for table in tables])
        for table, part in zip(tables, parts):
            table.copy_(part.view_as(table))
