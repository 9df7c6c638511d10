"""Finds the layer of each operand of the FP8 GEMMs of a step, and collects their statistics.

An observer sits inside the ops, below autograd, torch.compile, checkpointing and the parallel plan
(`ops.observe`). So it sees the very q and scales that the GEMMs read, on local shards, and the
compiled code is the same whether a step is observed or not.

No op is told its layer, since layers share compiled code. It follows from the arguments:

- The ops of fprop and dgrad are given the parameter of the layer, or what FSDP2 has gathered of it
  in FP8. What they quantize themselves is w of this layer.
- Their left operand, x or g of this layer, is what a quantizer has written to its address last.
- wgrad reads columns that were written together with the rows of fprop or dgrad, at least on one
  side.

Operands of which this says no layer are left out. A weight that FSDP2 gathers in FP8 is sampled
where it was quantized, on the ranks that have its shards. Only `table` waits for the device.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_fp8.fsdp.sharded_weight import ShardGather, gathers_of
from titan_fp8.functional.weights import GatheredWeight
from titan_fp8.health.sampling import Sampler
from titan_fp8.health.statistics import MAXIMA, Stat
from titan_fp8.health.watch import WatchedOps

SAMPLED_ROWS = 16
"""Tokens of each operand, or rows of a weight, whose elements are sampled."""

OPERANDS = ("x fprop", "w fprop", "g dgrad", "w dgrad", "g wgrad", "x wgrad")
"""What the three GEMMs of a layer read."""


class Layer(NamedTuple):
    """A weight that FP8 GEMMs read, as the parameter `parameter` of `module`."""

    name: str
    module: nn.Module
    parameter: str

    def address(self) -> int:
        """Of the local tensor as it is now: sharded, gathered or gathered in FP8."""
        weight: Any = getattr(self.module, self.parameter)
        if isinstance(weight, DTensor):
            weight = weight._local_tensor
        return (weight.q if isinstance(weight, GatheredWeight) else weight).data_ptr()


@dataclass(eq=False)
class Operand:
    """What one call of a quantizer has written along one dimension."""

    sample: int
    """The row of its results."""
    twin: "Operand | None" = None
    """For columns: the rows that the same call has written."""
    roles: set[tuple[int, str]] = field(default_factory=set)
    """Layers, by index, and which of OPERANDS this is to them."""


class Observer:
    """Watches the ops that `wrap` returns, and collects statistics until `table` is called.

    Args:
        layers: the layers to observe. Those that share a parameter report the same.
        observing: whether to observe the ops that run now.
        phase: shifts the samples, so that not all steps sample the same tokens.
    """

    def __init__(
        self, layers: Sequence[Layer], observing: Callable[[], bool] = lambda: True, phase: int = 0
    ):
        self.layers, self.observing = layers, observing
        self.sampler = Sampler(SAMPLED_ROWS, phase)
        self._operands: list[Operand] = []
        self._by_address: dict[int, Operand] = {}
        self._wgrads: list[tuple[Operand, Operand]] = []
        self._tokens: list[list[Tensor]] = [[] for _ in layers]
        self._layers_at: dict[int, list[int]] = {}
        for index, layer in enumerate(layers):
            if gather := gathers_of(layer.module).get(layer.parameter):
                self._note_shard(index, gather)

    def wrap(self, module: Any) -> WatchedOps:
        """The ops over the functions of `module`, watched; for `ops.observe`."""
        return WatchedOps(module, self)

    # What was quantized

    def note(self, q: Tensor, sample: int, twin: Operand | None = None) -> Operand:
        """A quantizer has written q."""
        operand = self._by_address[q.data_ptr()] = Operand(sample, twin)
        self._operands.append(operand)
        return operand

    def forget(self, *quantized: Tensor) -> None:
        """What is at these addresses now is not what a quantizer has written there before."""
        for q in quantized:
            self._by_address.pop(q.data_ptr(), None)

    def _note_shard(self, layer: int, gather: ShardGather) -> None:
        """Samples what this rank has quantized of a weight that FSDP2 gathers in FP8.

        GEMMs read what shards were quantized to after the last step of the optimizer, and no rank
        has the gathered weight in high precision.
        """
        shard, w = gather.shard, gather.values  # (N, K) or (E, N, K).
        if shard is None or not gather.fresh or not w.numel():
            return
        gather.layouts(shard)  # Has been released, if it has been gathered.
        assert shard.q is not None
        s = shard.s if w.dim() == 2 else shard.spec.part(shard.s, len(w))
        sample = self.sampler.take_weight(w, shard.q, s, shard.spec.first_row, shard.spec.dtype)
        # Both read the same 128x128 blocks.
        roles = {(layer, "w fprop"), (layer, "w dgrad")}
        self._operands.append(Operand(sample, roles=roles))

    # What was multiplied

    def multiplied(
        self, gemm: str, offs: Tensor | None, *products: tuple[Tensor, Tensor, Tensor | None]
    ) -> None:
        """fprop or dgrad of each a and weight, which has a scale if it was in FP8 already."""
        quantized = [w for _, w, w_scale in products if w_scale is None]
        # The product has quantized them itself, and nothing else.
        weights = iter(self._operands[len(self._operands) - len(quantized) :])
        for a, w, w_scale in products:
            layers = self._layers_of(w)
            if w_scale is None:
                next(weights).roles = {(layer, f"w {gemm}") for layer in layers}
            if left := self._by_address.get(a.data_ptr()):
                role = "x fprop" if gemm == "fprop" else "g dgrad"
                left.roles |= {(layer, role) for layer in layers}
            if offs is not None and gemm == "fprop":
                tokens = offs.diff(prepend=offs.new_zeros(1))
                for layer in layers:
                    self._tokens[layer].append(tokens)

    def multiplied_columns(self, g: Tensor, x: Tensor) -> None:
        """wgrad of the columns of g and x."""
        left, right = (self._by_address.get(t.data_ptr()) for t in (g, x))
        if left and right:
            self._wgrads.append((left, right))

    def _layers_of(self, w: Tensor) -> list[int]:
        """The layers whose parameter, or gathered weight in FP8, is in the memory of w."""
        address = w.data_ptr()
        known = self._layers_at.get(address, ())
        found = [index for index in known if address == self.layers[index].address()]
        if not found:  # FSDP2 has gathered others.
            self._layers_at = defaultdict(list)
            for index, layer in enumerate(self.layers):
                self._layers_at[layer.address()].append(index)
            found = self._layers_at.get(address, [])
        return found

    # Results

    def table(self) -> tuple[Tensor, list[list[Tensor]]]:
        """Computes the results; waits for the device.

        Returns:
            The statistics (layers, OPERANDS, Stat), float64, on the CPU, zero and -inf where there
            are none; and for each layer the tokens (E,) of each of its products of experts.
        """
        self._trace_columns()
        results = self.sampler.results()
        places = [
            (layer * len(OPERANDS) + OPERANDS.index(role), operand.sample)
            for operand in self._operands
            for layer, role in operand.roles
        ]
        cells, samples = torch.tensor(places, dtype=torch.int64).view(-1, 2).unbind(1)
        table = torch.zeros(len(self.layers) * len(OPERANDS), len(Stat), dtype=torch.float64)
        table.index_add_(0, cells, results[samples])
        table[:, MAXIMA] = -torch.inf
        of_maxima = cells[:, None].expand(-1, 2), results[samples, MAXIMA], "amax"
        table[:, MAXIMA] = table[:, MAXIMA].scatter_reduce(0, *of_maxima)
        tokens = [[of_experts.cpu() for of_experts in products] for products in self._tokens]
        return table.view(len(self.layers), len(OPERANDS), len(Stat)), tokens

    def _trace_columns(self) -> None:
        for g, x in self._wgrads:
            layers = _layers_with("g dgrad", g.twin)
            if not layers and len(inputs := _layers_with("x fprop", x.twin)) == 1:
                layers = inputs
            g.roles |= {(layer, "g wgrad") for layer in layers}
            x.roles |= {(layer, "x wgrad") for layer in layers}


def _layers_with(role: str, operand: Operand | None) -> list[int]:
    return [layer for layer, each in operand.roles if each == role] if operand else []
