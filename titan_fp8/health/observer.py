"""Watches the quantizers and GEMMs of some steps, and takes samples of the operands.

An observer sits inside the ops, below autograd, torch.compile, checkpointing and the parallel plan
(`ops.observe`). So it sees the very q and scales that the GEMMs read, on local shards, and the
compiled code is the same whether a step is observed or not.

Ops do not know the layer that calls them. The observer finds out by the memory of their arguments:

- A GEMM's operand is what a quantizer has written to its address last.
- The right operand of fprop and dgrad is a weight. The tensor that was quantized to it has the
  address of the parameter of one of the layers, or is a copy that the op has made of it, because
  autocast casts weights.
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

from titan_fp8.fsdp.sharded_weight import gathers_of
from titan_fp8.functional.weights import GatheredWeight
from titan_fp8.health.sampling import Sample, Sampler
from titan_fp8.health.shards import samples_of_shard
from titan_fp8.health.statistics import MAXIMA, SUMS, Stat, in_absolute_units
from titan_fp8.health.watch import WatchedOps

SAMPLED_ROWS = 16

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


@dataclass(eq=False)
class Operand:
    """What one call of a quantizer has written along one dimension."""

    sample: Sample
    source: int
    """For an operand that may be a weight: the address of its parameter."""
    gemm: str
    """For a weight: the GEMM that reads this layout."""
    twin: "Operand | None"
    """For columns: the rows that the same call has written."""
    owners: list[tuple[int, str]] = field(default_factory=list)
    """Layers, by index, and which of OPERANDS this is to them."""


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
        self._group_sizes: list[tuple[int, Tensor]] = []
        self._products: list[tuple[Operand, Operand]] = []
        self._by_address: dict[int, Operand] = {}
        self._transposed: dict[int, int] = {}
        self._casts: dict[int, int] = {}
        self._last = 0
        self._note_gathered()

    def wrap(self, implementation: Any) -> Any:
        """The implementation, watched; for `ops.observe`."""
        return WatchedOps(implementation, self)

    # What was quantized

    def cast(self, weight: Tensor, cast: Tensor) -> None:
        """`cast` is a copy of `weight`, made to be quantized next."""
        self._casts[cast.data_ptr()] = weight.data_ptr()

    def source(self, weight: Tensor) -> int:
        """The address of what is quantized now, or was cast for it."""
        return self._casts.pop(weight.data_ptr(), weight.data_ptr())

    def note(
        self, sample: Sample, source: int = 0, gemm: str = "", twin: Operand | None = None
    ) -> Operand:
        operand = Operand(sample, source, gemm, twin)
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
                operand = Operand(sample, 0, "", None)
                operand.owners = [(index, f"w {gemm}") for gemm in gemms]
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
        owner = self._find(q.data_ptr())
        if owner is not None:
            self._transposed[q_t.data_ptr()] = owner

    def _owner_and_gemm(self, b: Tensor) -> tuple[int | None, str]:
        """The layer of a right operand of fprop or dgrad, and which of the two it is."""
        address = b.data_ptr()
        if address in self._transposed:
            return self._transposed.pop(address), "dgrad"
        # A weight is quantized for one GEMM. Later its memory may be that of a gathered weight.
        operand = self._by_address.pop(address, None)
        owner = self._find(operand.source) if operand is not None and operand.source else None
        if operand is None or owner is None:
            return self._find(address), "fprop"
        operand.owners.append((owner, f"w {operand.gemm}"))
        return owner, operand.gemm

    def _find(self, address: int) -> int | None:
        """The layer of the parameter, or of the gathered weight in FP8, at this address."""
        for index in self._outward():
            if address in _addresses(self.layers[index].weight):
                self._last = index
                return index
        return None

    def _outward(self) -> Iterator[int]:
        """All layers, first the neighbors of the one that was found last."""
        count = len(self.layers)
        for step in range(count):
            yield (self._last + (step + 1) // 2 * (1 if step % 2 else -1)) % count

    # Results

    def table(self) -> tuple[Tensor, list[list[Tensor]]]:
        """Computes the results; waits for the device.

        Returns:
            The statistics (layers, OPERANDS, Stat), float64, on the CPU, zero and -inf where there
            are none; and for each layer the tokens (E,) of each of its products of experts.
        """
        self._trace_columns()
        of_products = [counts for _, counts in self._group_sizes]
        elements, scales, *counts = _on_cpu([*self.sampler.results(), *of_products])
        places = {
            (owner * len(OPERANDS) + OPERANDS.index(role), operand.sample.position)
            for operand in self._operands
            for owner, role in operand.owners
        }
        cells, positions = torch.tensor(sorted(places), dtype=torch.int64).view(-1, 2).unbind(1)
        results = in_absolute_units(elements, scales)[positions]
        table = torch.zeros(len(self.layers) * len(OPERANDS), len(Stat), dtype=torch.float64)
        table[:, MAXIMA] = -torch.inf
        table[:, SUMS].index_add_(0, cells, results[:, SUMS])
        of_maxima = cells[:, None].expand(-1, 2)
        table[:, MAXIMA] = table[:, MAXIMA].scatter_reduce(0, of_maxima, results[:, MAXIMA], "amax")
        sizes: list[list[Tensor]] = [[] for _ in self.layers]
        for (owner, _), of_experts in zip(self._group_sizes, counts, strict=True):
            sizes[owner].append(of_experts)
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


def _on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies to the CPU, of which only the last waits for the device."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.current_stream().synchronize()
    return copies


def _addresses(weight: Any) -> tuple[int, ...]:
    if isinstance(weight, GatheredWeight):
        return tuple(q.data_ptr() for q in (weight.q, weight.q_columns) if q is not None)
    return (weight.data_ptr(),)
