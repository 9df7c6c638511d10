"""Watches the quantizers and GEMMs of some steps, and takes samples of the operands.

An observer sits inside the ops, below autograd, torch.compile, checkpointing and the parallel plan
(`ops.observe`). So it sees the very q and scales that the GEMMs read, on local shards, and the
compiled code is the same whether a step is observed or not.

Ops do not know the layer that calls them. The observer finds out by the memory of their arguments:

- A GEMM's operand is what a quantizer has written to its address last.
- The right operand of fprop and dgrad is a weight, and the tensor that was quantized to it is the
  parameter of one of the layers: it has its address or, if it was cast on the way, its values.
- fprop's left operand is then x of that layer and dgrad's is g. wgrad reads columns that were
  written together with the rows of fprop or dgrad, at least on one side.

Operands that cannot be traced to a layer are left out. A weight that FSDP2 gathers in FP8 is
sampled where it was quantized, on the ranks that have its shards (`shards.py`).

Elements are sampled: of each operand SAMPLED_ROWS tokens, or rows of a weight, evenly spaced.
Scales are read in full. Only `table` waits for the device.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_fp8.gathered_weight import GatheredWeight
from titan_fp8.health.sampling import Sample, Sampler
from titan_fp8.health.shards import samples_of_shard
from titan_fp8.health.statistics import MAXIMA, SUMS, Stat, in_absolute_units
from titan_fp8.health.watch import WatchedOps
from titan_fp8.sharded_weight import gathers_of

SAMPLED_ROWS = 16
COMPARED = 64
"""The number of elements by which a weight that was cast is recognized."""

OPERANDS = ("x fprop", "w fprop", "g dgrad", "w dgrad", "g wgrad", "x wgrad")
"""What the three GEMMs of a layer read."""


class Layer(NamedTuple):
    """A weight that FP8 GEMMs read, as the parameter `parameter` of `module`."""

    name: str
    module: nn.Module
    parameter: str

    @property
    def weight(self) -> Any:
        """The local tensor as it is now: sharded, gathered or gathered in FP8."""
        weight = getattr(self.module, self.parameter)
        return weight._local_tensor if isinstance(weight, DTensor) else weight


class Owner(NamedTuple):
    """The layer of an operand: the first of `layers` for which `matches` is true; else none."""

    layers: list[int]
    matches: Tensor | None
    """Booleans on the device; None: all match."""


@dataclass(eq=False)
class Operand:
    """What one call of a quantizer has written along one dimension."""

    sample: Sample
    weight: Callable[[], Owner | None] | None
    """For an operand that may be a weight: finds its layer."""
    gemm: str
    """For a weight: the GEMM that reads this layout."""
    twin: "Operand | None"
    """For columns: the rows that the same call has written."""
    owners: list[tuple[Owner, str]] = field(default_factory=list)
    """Layers, and which of OPERANDS this is to them."""


class Observer:
    """Watches the ops that `wrap` returns, and collects statistics until `table` is called.

    Args:
        layers: the layers to observe.
        observing: whether to observe the ops that run now.
        phase: shifts the samples, so that not all steps sample the same tokens.
    """

    def __init__(
        self, layers: Sequence[Layer], observing: Callable[[], bool] = lambda: True, phase: int = 0
    ):
        self.layers, self.observing = layers, observing
        self.sampler = Sampler(SAMPLED_ROWS, phase)
        self._operands: list[Operand] = []
        self._group_sizes: list[tuple[Owner, Tensor]] = []
        self._products: list[tuple[Operand, Operand]] = []
        self._by_address: dict[int, Operand] = {}
        self._transposed: dict[int, Owner] = {}
        self._values: dict[Any, tuple[list[int], Tensor | None]] = {}
        self._last = 0
        self._results: Callable[[], list[Tensor]] | None = None
        self._note_gathered()

    def wrap(self, implementation: Any) -> Any:
        """The implementation, watched; for `ops.observe`."""
        return WatchedOps(implementation, self)

    # What was quantized

    def note(
        self,
        sample: Sample,
        weight: Callable[[], Owner | None] | None = None,
        gemm: str = "",
        twin: Operand | None = None,
    ) -> Operand:
        operand = Operand(sample, weight, gemm, twin)
        self._operands.append(operand)
        self._by_address[sample.address] = operand
        return operand

    def _note_gathered(self) -> None:
        """Weights that FSDP2 gathers in FP8: each rank has quantized its shard for this step."""
        for index, layer in enumerate(self.layers):
            gather = gathers_of(layer.module).get(layer.parameter)
            if gather is None:
                continue
            for gemms, sample in samples_of_shard(self.sampler, gather):
                operand = Operand(sample, None, "", None)
                operand.owners = [(Owner([index], None), f"w {gemm}") for gemm in gemms]
                self._operands.append(operand)

    # What was multiplied

    def multiplied(self, a: Tensor, b: Tensor, offs: Tensor | None) -> None:
        """fprop or dgrad of a and the weight b."""
        owner, gemm = self._owner_and_gemm(b)
        if owner is None:
            return
        left = self._by_address.get(a.data_ptr())
        if left is not None:
            left.owners.append((owner, "x fprop" if gemm == "fprop" else "g dgrad"))
        if offs is not None and gemm == "fprop":
            self._group_sizes.append((owner, offs.diff(prepend=offs.new_zeros(1))))

    def multiplied_columns(self, g: Tensor, x: Tensor) -> None:
        """wgrad of the columns of g and x."""
        left, right = (self._by_address.get(t.data_ptr()) for t in (g, x))
        if left is not None and right is not None:
            self._products.append((left, right))

    def transposed(self, q: Tensor, q_t: Tensor) -> None:
        """A weight that is in FP8 already, transposed for dgrad."""
        owner = self._find_by_address(q)
        if owner is not None:
            self._transposed[q_t.data_ptr()] = owner

    def _owner_and_gemm(self, b: Tensor) -> tuple[Owner | None, str]:
        """The owner of a right operand of fprop or dgrad, and which of the two it is."""
        address = b.data_ptr()
        if address in self._transposed:
            return self._transposed.pop(address), "dgrad"
        # A weight is quantized for one GEMM. Later its memory may be that of a gathered weight.
        operand = self._by_address.pop(address, None)
        owner = None if operand is None or operand.weight is None else operand.weight()
        if operand is None or owner is None:
            return self._find_by_address(b), "fprop"
        operand.owners.append((owner, f"w {operand.gemm}"))
        return owner, operand.gemm

    def find(self, weight: Tensor) -> Owner | None:
        """The layer of a weight that is quantized now."""
        return self._find_by_address(weight) or self._find_by_values(weight)

    def _find_by_address(self, weight: Tensor) -> Owner | None:
        """The layer of a parameter, or of a gathered weight in FP8."""
        address = weight.data_ptr()
        for index in self._outward():
            if address in _addresses(self.layers[index].weight):
                self._last = index
                return Owner([index], None)
        return None

    def _outward(self) -> Iterator[int]:
        """All layers, first the neighbors of the one that was found last."""
        count = len(self.layers)
        for step in range(count):
            yield (self._last + (step + 1) // 2 * (1 if step % 2 else -1)) % count

    def _find_by_values(self, weight: Tensor) -> Owner | None:
        key = weight.shape, weight.dtype
        if key not in self._values:
            candidates = [
                (i, _some_values(layer.weight, weight.dtype))
                for i, layer in enumerate(self.layers)
                if layer.weight.shape == weight.shape and layer.weight.dtype != weight.dtype
            ]
            indices, values = [i for i, _ in candidates], [v for _, v in candidates]
            self._values[key] = indices, torch.stack(values) if values else None
        indices, table = self._values[key]
        if table is None:
            return None
        return Owner(indices, (table == _some_values(weight)).all(1))

    # Results

    def finish(self) -> None:
        """Computes the results, and copies them to the CPU, without waiting for the device."""
        self._trace_columns()
        counts = [counts for _, counts in self._group_sizes]
        self._results = copied_to_cpu([*self.sampler.results(), *self._matches(), *counts])

    def table(self) -> tuple[Tensor, list[list[Tensor]]]:
        """The results; waits for the device to come to the end of `finish`.

        Returns:
            The statistics (layers, OPERANDS, Stat), float64, on the CPU, zero and -inf where there
            are none; and for each layer the tokens (E,) of each of its products of experts.
        """
        if self._results is None:
            self.finish()
        assert self._results is not None
        elements, scales, *others = self._results()
        matches = self._matches()
        index_of = self._indices(dict(zip(map(id, matches), others)))
        places: set[tuple[int, int]] = set()
        for operand in self._operands:
            for owner, role in operand.owners:
                if index_of(owner) >= 0:
                    cell = index_of(owner) * len(OPERANDS) + OPERANDS.index(role)
                    places.add((cell, operand.sample.position))
        cells, positions = torch.tensor(sorted(places), dtype=torch.int64).view(-1, 2).unbind(1)
        results = in_absolute_units(elements, scales)[positions]
        table = torch.zeros(len(self.layers) * len(OPERANDS), len(Stat), dtype=torch.float64)
        table[:, MAXIMA] = -torch.inf
        table[:, SUMS].index_add_(0, cells, results[:, SUMS])
        of_maxima = cells[:, None].expand(-1, 2)
        table[:, MAXIMA] = table[:, MAXIMA].scatter_reduce(0, of_maxima, results[:, MAXIMA], "amax")
        sizes: list[list[Tensor]] = [[] for _ in self.layers]
        for (owner, _), counts in zip(self._group_sizes, others[len(matches) :], strict=True):
            if index_of(owner) >= 0:
                sizes[index_of(owner)].append(counts)
        return table.view(len(self.layers), len(OPERANDS), len(Stat)), sizes

    def _trace_columns(self) -> None:
        for g, x in self._products:
            owners = [o for o, role in (g.twin.owners if g.twin else ()) if role == "g dgrad"]
            if not owners and x.twin:
                inputs = [o for o, role in x.twin.owners if role == "x fprop"]
                owners = inputs if len(inputs) == 1 else []
            for owner in owners:
                g.owners.append((owner, "g wgrad"))
                x.owners.append((owner, "x wgrad"))

    def _owners(self) -> Iterator[Owner]:
        for operand in self._operands:
            yield from (owner for owner, _ in operand.owners)
        yield from (owner for owner, _ in self._group_sizes)

    def _matches(self) -> list[Tensor]:
        """The tensors that tell the owners that were found by their values."""
        found = {id(o.matches): o.matches for o in self._owners() if o.matches is not None}
        return list(found.values())

    def _indices(self, matches: dict[int, Tensor]) -> Callable[[Owner], int]:
        """The layer of an owner, or -1; `matches` are those tensors on the CPU, by their id."""
        lists = {key: each.tolist() for key, each in matches.items()}

        def index_of(owner: Owner) -> int:
            if owner.matches is None:
                return owner.layers[0]
            of_layers = zip(owner.layers, lists[id(owner.matches)])
            return next((index for index, match in of_layers if match), -1)

        return index_of


def copied_to_cpu(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Starts copies to the CPU; the function that is returned waits for them."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    if not any(tensor.is_cuda for tensor in tensors):
        return lambda: copies
    done = torch.cuda.Event()
    done.record()

    def wait() -> list[Tensor]:
        done.synchronize()
        return copies

    return wait


def _addresses(weight: Any) -> tuple[int, ...]:
    if isinstance(weight, GatheredWeight):
        return tuple(q.data_ptr() for q in (weight.q, weight.q_columns) if q is not None)
    return (weight.data_ptr(),)


def _some_values(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Some values, first cast to `dtype`, as integers, of which NaN equals NaN."""
    values = weight.detach().flatten()
    values = values[:: max(1, values.numel() // COMPARED)][:COMPARED].to(dtype or weight.dtype)
    bits = values.view(torch.int16 if values.itemsize == 2 else torch.int32)
    return bits.masked_fill(values.isnan(), -1)
