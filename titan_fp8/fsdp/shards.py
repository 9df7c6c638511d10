"""Quantizes shards of weights, with the same result as quantizing the whole weights.

A rank has some rows of a weight (N, K), or some experts of (E, N, K), or some rows of each expert.
It quantizes them alone, except for 128x128 blocks at the edge of a shard, which span several ranks.
The scale of such a block is the largest of the scales of its parts, so the ranks agree on it by a
maximum:

1. Each rank quantizes what it has to itself. Where it shares blocks, it pads its rows to whole
   ones, to compute the scales of its parts. All scales go into a table for the whole weight, zero
   elsewhere.
2. One all-reduce takes the maximum over the ranks, of the tables of all weights at once. Then every
   rank knows all scales of the weight, and they need not be gathered.
3. A rank that shares blocks casts its whole shard with the agreed scales.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_fp8.layouts import BLOCK, E4M3, cdiv, pad_blocks, round_up
from titan_fp8.recipe import get_recipe
from titan_fp8.reference import cast


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

    whole: tuple[int, ...]
    dim: int
    first: int
    padded: tuple[int, ...]
    dtype: torch.dtype
    group: dist.ProcessGroup | None

    @property
    def carrier(self) -> torch.dtype:
        """The dtype as which FSDP2 gathers FP8 shards; not every op that it calls supports FP8.

        That of the unit's other parameters, if possible: if dtypes differ, FSDP2 views all of them
        as bytes and copies these one by one. Where it looks at the shape of what it gathers,
        because shards have different sizes or are not of the first dimension, that must be the
        shard's.
        """
        ranks = 1 if self.group is None else self.group.size()
        is_even = self.padded[self.dim] * ranks == self.whole[self.dim]
        return self.dtype if is_even and self.dim == 0 else torch.uint8

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
    """The FP8 copy of one rank's shard, and the scales of the whole weight.

    The scales are always updated in place, because gathered weights refer to them.

    Attributes:
        q: the shard in FP8, padded; None before the first quantization and once released.
        s, s_t: the scales of the whole weight, for fprop and dgrad.
        table: what the ranks agree on, of which `s` is a view.
    """

    def __init__(self, recipe: str, emulate: bool, spec: ShardSpec, device: torch.device):
        self.emulate, self.spec = emulate, spec
        self.recipe = get_recipe(recipe)
        self.q: Tensor | None = None
        *lead, n, k = spec.whole
        rows, columns = cdiv(n, BLOCK), cdiv(k, BLOCK)
        fp32: Any = {"dtype": torch.float32, "device": device}
        # In the layout of 128x128 scales (`layouts.py`).
        self.table = torch.zeros(*lead, rows, round_up(columns, 4), **fp32)
        table_t = torch.zeros(*lead, columns, round_up(rows, 4), **fp32)
        self.s, self.s_t = self.table[..., :columns], table_t[..., :rows]

    def shares_blocks(self, x: Tensor) -> bool:
        """Whether other ranks have rows of the first or the last 128x128 blocks of the shard x."""
        first, n = self.spec.first_row, self.spec.whole[-2]
        last = first + x.shape[-2]
        return bool(x.numel() and (first % BLOCK or last % BLOCK and last < n))

    def padded(self, q: Tensor) -> Tensor:
        """q, FP8 or empty, padded with zeros to the shape of the largest shard."""
        if q.shape == self.spec.padded:
            return q
        padded = torch.zeros(self.spec.padded, dtype=E4M3, device=q.device)
        padded[: q.shape[0]] = q
        return padded

    def release(self) -> None:
        """Frees the FP8 copy. The scales stay, and with them `cast_shard` makes the same one."""
        self.q = None


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
    _copy(copy for shard, x in shards for copy in _quantize_alone(shard, x))
    _agree([shard for shard, _ in shards])
    _copy((shard.s_t, shard.s.mT) for shard, _ in shards)
    for shard, x in shards:
        _cast_shared(shard, x)


@torch.no_grad()
def cast_shard(shard: QuantizedShard, x: Tensor) -> None:
    """Makes the FP8 copy again, of values that have not changed: no collective is needed."""
    if not shard.shares_blocks(x):
        _quantize_alone(shard, x)
    _cast_shared(shard, x)


def _copy(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Makes all copies, pairs of (destination, source), in one call."""
    pairs = list(copies)
    if pairs:
        destinations, sources = zip(*pairs)
        torch._foreach_copy_(destinations, sources)


def _quantize_alone(shard: QuantizedShard, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Step 1. Returns what belongs into the table, as copies to make."""
    spec = shard.spec
    if not x.numel():
        shard.q = shard.padded(x)
        return []
    start, end = spec.first_row, spec.first_row + x.shape[-2]
    scales = spec.part(shard.s, x.shape[0])
    if shared := shard.shares_blocks(x):
        x = nn.functional.pad(x, (0, 0, start % BLOCK, -end % BLOCK))
    q, s = shard.recipe.quantize_weight(x, spec.dtype, emulate=shard.emulate)
    if not shared:
        shard.q = shard.padded(q)
    return [(scales[..., start // BLOCK : cdiv(end, BLOCK), :], s)]


def _cast_shared(shard: QuantizedShard, x: Tensor) -> None:
    """Step 3: casts with the scales on which the ranks agree."""
    spec = shard.spec
    if shard.shares_blocks(x):
        rows = slice(spec.first_row, spec.first_row + x.shape[-2])
        s = spec.part(shard.s, x.shape[0]).repeat_interleave(BLOCK, -2)[..., rows, :, None]
        blocks = pad_blocks(x.to(spec.dtype).float(), -1).unflatten(-1, (-1, BLOCK))
        shard.q = shard.padded(cast(blocks, s).flatten(-2)[..., : x.shape[-1]].contiguous())


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
