"""Quantizes shards of weights, with the same result as quantizing the whole weights.

A rank has some rows of a weight (N, K), or some experts of (E, N, K), or some rows of each expert.
It quantizes them alone, except for blocks that span several ranks: 128x128 blocks at the edge of a
shard, and with rowwise recipes every column. The scale of such a block is the largest of the scales
of its parts, so the ranks agree on it by a maximum:

1. Each rank quantizes the blocks that it has to itself. It computes the scales of its parts of
   128x128 blocks, and the absolute maxima of its parts of columns. All of these go into a table for
   the whole weight, which is zero elsewhere.
2. One all-reduce takes the maximum over the ranks, of the tables of all weights at once. Then every
   rank knows all scales of the weight, and they need not be gathered.
3. Each rank casts its parts of shared blocks with the agreed scales.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titan_fp8.layouts import BLOCK, E4M3, cdiv, pad_blocks, round_up
from titan_fp8.recipe import Recipe, get_recipe
from titan_fp8.reference import cast, scale_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShardSpec:
    """Which part of a weight a rank has.

    Attributes:
        whole: the shape of the weight, (N, K) or (E, N, K).
        dim: the dimension that is sharded, not the last.
        first: where the shard begins along it.
        padded: the shape of the largest shard; the others are padded to it when they are gathered.
        dtype: what the weight is cast to before it is quantized.
        group: the ranks that share the weight; None if this rank has all of it.
    """

    whole: Shape
    dim: int
    first: int
    padded: Shape
    dtype: torch.dtype
    group: dist.ProcessGroup | None

    @property
    def is_even(self) -> bool:
        """Whether all ranks have shards of one size."""
        ranks = 1 if self.group is None else self.group.size()
        return self.padded[self.dim] * ranks == self.whole[self.dim]

    @property
    def carrier(self) -> torch.dtype:
        """The dtype as which FSDP2 gathers FP8 shards; not every op that it calls supports FP8.

        That of the unit's other parameters, if possible: if dtypes differ, FSDP2 views all of them
        as bytes and copies these one by one. Where it looks at the shape of what it gathers,
        because shards have different sizes or are not of the first dimension, that must be the
        shard's.
        """
        return self.dtype if self.is_even and self.dim == 0 else torch.uint8

    @property
    def first_row(self) -> int:
        """Where the shard begins along N."""
        return self.first if self.dim == len(self.whole) - 2 else 0

    def part(self, table: Tensor, size: int) -> Tensor:
        """The entries of a table for the shard's experts, of which there are `size`."""
        if self.dim == len(self.whole) - 2:
            return table
        return table[self.first : self.first + size]


class QuantizedShard:
    """The FP8 copies of one rank's shard, and the scales of the whole weight.

    The scales are always updated in place, because gathered weights refer to them.

    Attributes:
        q: the shard as fprop reads it, padded; None before the first quantization and once
            released.
        q_columns: rowwise, the shard quantized along its columns, for dgrad; else None.
        s, s_t: the scales of the whole weight, for fprop and dgrad.
        table: what the ranks agree on. Blockwise, the scales, of which `s` is a view; rowwise, the
            scales of the rows, and then the absolute maxima of the columns.
    """

    def __init__(self, recipe: str, emulate: bool, spec: ShardSpec, device: torch.device):
        self.recipe, self.emulate, self.spec = recipe, emulate, spec
        self.q: Tensor | None = None
        self.q_columns: Tensor | None = None
        *lead, n, k = spec.whole
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
        return self.ops.has_weight_blocks

    def scale_of(self, amax: Tensor) -> Tensor:
        """The recipe's scales for blocks with these absolute maxima."""
        return scale_of(amax.float(), self.ops.scale_fmt)

    def new_q(self) -> Tensor:
        return torch.zeros(self.spec.padded, dtype=E4M3, device=self.table.device)

    def release(self) -> None:
        """Frees the FP8 copies. The scales stay, and with them `cast_shard` makes the same ones."""
        self.q = self.q_columns = None


@dataclass
class _Edge:
    """A shard's part of a row of 128x128 blocks that spans several ranks.

    It is at the beginning or the end of the shard, fewer than 128 rows.

    Attributes:
        x: these rows in high precision.
        q: where they go in the shard's q.
        s: the scales of the blocks, (..., ⌈K/128⌉), in the shard's table.
    """

    shard: QuantizedShard
    x: Tensor
    q: Tensor
    s: Tensor


@torch.no_grad()
def quantize_shards(shards: Iterable[tuple[QuantizedShard, Tensor]]) -> None:
    """Quantizes shards, given with their values in high precision.

    Runs one collective per process group, whose ranks must all call this with their shards of the
    same weights, in the same order.
    """
    shards = list(shards)
    for shard, _ in shards:
        shard.release()  # The new copies may take their memory.
    torch._foreach_zero_([shard.table for shard, _ in shards])
    edges: list[_Edge] = []
    copies: list[tuple[Tensor, Tensor]] = []
    for shard, x in shards:
        if shard.blockwise:
            edges += _quantize_blocks(shard, x, copies)
        else:
            _quantize_rows(shard, x, copies)
    _copy(copies)
    _scale_edges(edges)
    _agree([shard for shard, _ in shards])
    _cast_edges(edges)
    _copy((shard.s_t, shard.s.mT) for shard, _ in shards if shard.blockwise)
    _finish_rowwise([(shard, x) for shard, x in shards if not shard.blockwise])


@torch.no_grad()
def cast_shard(shard: QuantizedShard, x: Tensor) -> None:
    """Makes the FP8 copies again, of values that have not changed: no collective is needed."""
    if shard.blockwise:
        _cast_edges(_quantize_blocks(shard, x, []))
    else:
        _quantize_rows(shard, x, [])
        _cast_columns(shard, x)


def _copy(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Makes all copies, pairs of (destination, source), in one call."""
    pairs = list(copies)
    if pairs:
        destinations, sources = zip(*pairs)
        torch._foreach_copy_(destinations, sources)


def _quantize_blocks(
    shard: QuantizedShard, x: Tensor, copies: list[tuple[Tensor, Tensor]]
) -> list[_Edge]:
    """Quantizes the blocks whose rows all belong to x, and returns the rest.

    Appends to `copies` the copies that the caller has to make, as (destination, source).
    """
    spec, n = shard.spec, x.shape[-2]
    start, end = spec.first_row, spec.first_row + n
    s = spec.part(shard.s, x.shape[0])
    # Rows before `head` and from `tail` on are in blocks that other ranks share.
    head = min(-start % BLOCK, n)
    tail = n if end == spec.whole[-2] or head == n else n - end % BLOCK
    if (head, tail) == (0, n) and x.shape == spec.padded:
        shard.q, own = shard.ops.quantize_weight(x, spec.dtype, emulate=shard.emulate)
        copies.append((s[..., start // BLOCK : cdiv(end, BLOCK), :], own))
        return []
    shard.q = shard.new_q()
    if not x.numel():
        return []
    q = shard.q[: x.shape[0]]
    if head < tail:
        whole = x[..., head:tail, :].contiguous()
        own_q, own = shard.ops.quantize_weight(whole, spec.dtype, emulate=shard.emulate)
        q[..., head:tail, :] = own_q
        copies.append((s[..., (start + head) // BLOCK : cdiv(start + tail, BLOCK), :], own))
    edges = []
    for first, last in ((0, head), (tail, n)):
        if first < last:
            rows = slice(first, last)
            block = s[..., (start + first) // BLOCK, :]
            edges.append(_Edge(shard, x[..., rows, :], q[..., rows, :], block))
    return edges


def _by_shape(edges: list[_Edge]) -> Iterable[list[_Edge]]:
    """Groups of edges that can be stacked, so that one launch handles a whole group."""
    groups = defaultdict(list)
    for edge in edges:
        key = edge.x.shape, edge.x.dtype, edge.shard.spec.dtype, edge.shard.recipe
        groups[key].append(edge)
    return groups.values()


def _stack(edges: list[_Edge]) -> Tensor:
    x = torch.stack([edge.x for edge in edges])
    return x.to(edges[0].shard.spec.dtype)


def _scale_edges(edges: list[_Edge]) -> None:
    """Step 1 for edges: the scales of this rank's rows."""
    for group in _by_shape(edges):
        columns = pad_blocks(_stack(group).abs().amax(-2), -1)
        s = group[0].shard.scale_of(columns.unflatten(-1, (-1, BLOCK)).amax(-1))
        for edge, own in zip(group, s):
            edge.s.copy_(own)


def _cast_edges(edges: list[_Edge]) -> None:
    """Step 3 for edges: casts them with the agreed scales."""
    for group in _by_shape(edges):
        x = _stack(group).float()
        s = torch.stack([edge.s for edge in group]).repeat_interleave(BLOCK, -1)
        q = cast(x, s[..., None, : x.shape[-1]])
        for edge, own in zip(group, q):
            edge.q.copy_(own)


def _quantize_rows(shard: QuantizedShard, x: Tensor, copies: list[tuple[Tensor, Tensor]]) -> None:
    """Quantizes the rows of x and takes the maxima of its columns; `copies` as for blocks."""
    spec = shard.spec
    if not x.numel():
        shard.q = shard.new_q()
        return
    q, s, amax = torch.ops.titan_fp8.quantize_shard_row(x, spec.dtype, emulate=shard.emulate)
    shard.q = _padded(q, shard)
    table = spec.part(shard.table, x.shape[0])
    copies.append((table[..., spec.first_row : spec.first_row + x.shape[-2]], s))
    copies.append((table[..., spec.whole[-2] :], amax))


def _finish_rowwise(shards: list[tuple[QuantizedShard, Tensor]]) -> None:
    """Sets the scales, and casts the columns, once the ranks agree on the maxima of columns."""
    if not shards:
        return
    maxima = [shard.table[..., shard.spec.whole[-2] :] for shard, _ in shards]
    # The scales of all weights at once, because every operation is a launch.
    scales = scale_of(torch.cat([amax.flatten() for amax in maxima]))
    parts = scales.split([amax.numel() for amax in maxima])
    _copy((shard.s_t.view(-1), part) for (shard, _), part in zip(shards, parts))
    _copy((shard.s, shard.table[..., : shard.spec.whole[-2]]) for shard, _ in shards)
    for shard, x in shards:
        _cast_columns(shard, x)


def _cast_columns(shard: QuantizedShard, x: Tensor) -> None:
    """Rowwise: casts the columns of x with the agreed maxima."""
    spec = shard.spec
    if not x.numel():
        shard.q_columns = shard.new_q()
        return
    amax = spec.part(shard.table, x.shape[0])[..., spec.whole[-2] :].contiguous()
    quantize = torch.ops.titan_fp8.quantize_shard_col
    q = quantize(x, amax, spec.dtype, emulate=shard.emulate)
    shard.q_columns = _padded(q, shard)


def _padded(q: Tensor, shard: QuantizedShard) -> Tensor:
    """q, padded with zeros to the shape of the largest shard."""
    if q.shape == shard.spec.padded:
        return q
    padded = shard.new_q()
    padded[: q.shape[0]] = q
    return padded


def _agree(shards: list[QuantizedShard]) -> None:
    """Sets each table to its maximum over the ranks that share its weight."""
    groups = defaultdict(list)
    for shard in shards:
        if shard.spec.group is not None:
            groups[shard.spec.group].append(shard.table)
    for group, tables in groups.items():
        # Compared as integers, which order positive numbers as floats do and put NaN above Inf, so
        # that no NaN is lost. The sign of a NaN is cleared first.
        flat = torch.cat([table.flatten() for table in tables]).view(torch.int32)
        flat.bitwise_and_(0x7FFFFFFF)
        dist.all_reduce(flat, dist.ReduceOp.MAX, group)
        parts = flat.view(torch.float32).split([table.numel() for table in tables])
        _copy((table, part.view_as(table)) for table, part in zip(tables, parts))
