"""A weight, or FSDP2's shard of it, that is gathered in FP8; `fsdp.py` says how it is used.

A ShardedWeight is an ordinary tensor that remembers how it is to be quantized. Its
`__torch_dispatch__` computes every op as on a plain tensor. The result keeps the class after the
ops by which FSDP2, DTensor and `Module.to_empty` make shards. In-place writes are recorded, because
version counters do not count those that DTensor makes. The schema of an op says which arguments it
writes to. Those of collectives do not say, so whatever is not named as an input counts as written.

Views made by other ops, such as `w[0]` or `w.t()`, are plain tensors, which PyTorch can print and
convert to NumPy. A write through one of them goes unnoticed until the next write to the shard,
which is that of the optimizer. Change weights between two steps by ops on the shard itself or on
slices of it.

A shard is quantized at the first gather after a write, so once a step, also with several
micro-batches. Quantizing is a collective, so every rank must write, or none. A rank may read alone:
it may copy or send its shard, for example. The FP8 copy stays in memory: one byte per element of
the shard, two with a rowwise recipe.
"""

import contextlib
import functools
import inspect
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._mode_utils import no_dispatch

from titan_fp8.columns_buffer import ColumnsBuffer
from titan_fp8.gathered_weight import GatheredWeight
from titan_fp8.layouts import E4M3
from titan_fp8.ops import DTYPES
from titan_fp8.recipe import get_recipe
from titan_fp8.shards import QuantizedShard, ShardSpec, quantize_shards

_log = logging.getLogger(__name__)
_aten = torch.ops.aten
_VIEWS = {
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.view.default,
}
_COPIES = {
    _aten._pin_memory.default,
    _aten._to_copy.default,
    _aten.clone.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
}
_READS = {_aten.record_stream.default, torch.ops.c10d.send.default}
"""Ops that only read, although their schemas say that they write, or do not say."""


class _Memory:
    """State that belongs to the memory of a shard, and so is shared by all views of it.

    Attributes:
        shard: the FP8 copy; None before the first gather.
        gathered: what FSDP2 gathers of it, as the dtype `ShardSpec.carrier`.
        stale: True if the shard has been written to since it was quantized.
        values: the view that FSDP2 gathers; None before the first gather.
        columns: chooses the layouts of each gather; None: each moves all.
    """

    def __init__(self) -> None:
        self.shard: QuantizedShard | None = None
        self.gathered: tuple[Tensor, ...] = ()
        self.stale = True
        self.values: weakref.ref[ShardedWeight] | None = None
        self.columns: ColumnsBuffer | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Memory":
        return _Memory()  # The copy of a shard is quantized anew.


class ShardedWeight(Tensor):
    """A weight, or FSDP2's shard of it, that is gathered in FP8.

    Attributes:
        recipe, emulate: how it is quantized.
        memory: what all views of the shard share.
    """

    recipe: str
    emulate: bool
    memory: _Memory

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, values: Tensor, recipe: str, emulate: bool, memory: _Memory | None = None
    ) -> "ShardedWeight":
        weight = Tensor._make_subclass(cls, values, values.requires_grad)
        weight.recipe, weight.emulate = recipe, emulate
        weight.memory = memory or _Memory()
        return weight

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._can_decompose():  # Only in inference mode does this get ops made of other ops.
            return func.decompose(*args, **(kwargs or {}))
        with no_dispatch():
            out = func(*args, **(kwargs or {}))
        if written := _written_arguments(func):
            for i, name in written:
                value = args[i] if i < len(args) else (kwargs or {}).get(name)
                for tensor in pytree.tree_leaves(value):
                    if isinstance(tensor, ShardedWeight):
                        tensor.memory.stale = True
        elif func in _VIEWS or func in _COPIES:
            source = args[0]
            memory = source.memory if func in _VIEWS else None
            return pytree.tree_map_only(
                Tensor, lambda t: ShardedWeight(t, source.recipe, source.emulate, memory), out
            )
        return out

    def plain(self) -> Tensor:
        """The same memory as a torch.Tensor."""
        with no_dispatch():
            return self.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Checkpoints hold plain tensors.
        return self.plain().__reduce_ex__(protocol)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], Any]:
        """FSDP2's extension: the tensors to gather, and metadata for `fsdp_post_all_gather`."""
        memory = self.memory
        if memory.shard is None:
            spec = _spec_of(self, mesh, outer_size, mp_policy.param_dtype or self.dtype)
            reason = _why_high_precision(self.recipe, spec)
            if reason is not None:
                _warn(reason)
                return (_padded(self.plain(), spec),), None
            # Its scales are written in place, which later steps cannot do to inference tensors.
            with _on_default_stream(self.device), torch.inference_mode(False):
                memory.shard = QuantizedShard(self.recipe, self.emulate, spec, self.device)
            memory.values = weakref.ref(self)
        if memory.stale:
            with _on_default_stream(self.device):
                quantize_weights([self])
        layouts = memory.gathered
        if memory.columns is not None:
            layouts = memory.columns.layouts_to_gather(layouts)
        return layouts, (outer_size, memory)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """FSDP2's extension: makes the unsharded parameter, or updates `out`, that of last time.

        FSDP2 frees and refills the memory of `all_gather_outputs` in place, so q of `out` is
        already new. Its scales are the shard's, which may be another one than last time.
        """
        if metadata is None:
            return None if out is not None else (all_gather_outputs[0], ())
        shape, memory = metadata
        shard = memory.shard
        if memory.columns is not None:
            memory.columns.restore()
        if out is not None:
            weight = out._local_tensor if isinstance(out, DTensor) else out
            assert isinstance(weight, GatheredWeight)
            weight.s, weight.s_t = shard.s, shard.s_t
            return None
        # The gathered rows may end in padding.
        q, *columns = (
            output.flatten().view(E4M3)[: shape.numel()].view(shape)
            for output in all_gather_outputs
        )
        q_columns = columns[0] if columns else None
        return GatheredWeight(q, shard.s, q_columns, shard.s_t, param_dtype), ()


@functools.cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Position and name of each argument that an op may write to."""
    if func in _READS:
        return []

    def may_be_written(argument: Any) -> bool:
        if func.namespace == "c10d":
            return not argument.name.startswith("input")
        return argument.alias_info is not None and argument.alias_info.is_write

    arguments = enumerate(func._schema.arguments)
    return [(i, argument.name) for i, argument in arguments if may_be_written(argument)]


# FSDP2 asks for the signature at each gather of each weight. Python would derive it each time,
# which takes longer than the method itself.
ShardedWeight.fsdp_pre_all_gather.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    ShardedWeight.fsdp_pre_all_gather
)


def _spec_of(shard: Tensor, mesh: DeviceMesh, whole: torch.Size, dtype: torch.dtype) -> ShardSpec:
    """Where this rank's shard lies in a weight of shape `whole`, sharded over `mesh`.

    FSDP2 cuts the sharded dimension into parts of ⌈size / ranks⌉; the last ones may be smaller.
    """
    # FSDP2's `replicate` gives each rank all of it. A shard has all of it only if it is one row.
    replicated = shard.shape == whole and whole[0] > 1
    ranks, rank = (1, 0) if replicated else (mesh.size(), mesh.get_local_rank())
    dim = next((d for d in range(len(whole)) if shard.shape[d] != whole[d]), 0)
    padded = list(whole)
    padded[dim] = -(-whole[dim] // ranks)
    first = min(rank * padded[dim], whole[dim])
    group = mesh.get_group() if ranks > 1 else None
    return ShardSpec(tuple(whole), dim, first, tuple(padded), dtype, group)


def _why_high_precision(recipe: str, spec: ShardSpec) -> str | None:
    """Why a weight is gathered in high precision; None if it is gathered in FP8."""
    if spec.dtype not in DTYPES:
        return f"{spec.dtype} weights are not quantized"
    if spec.dim == len(spec.whole) - 1:
        return "its last dimension is sharded"
    if spec.group is None and not get_recipe(recipe).has_weight_blocks:
        return "one rank has all of it, and FSDP2 then handles one tensor per weight, not two"
    return None


@functools.cache
def _warn(reason: str) -> None:
    _log.warning(f"titan_fp8: a weight is gathered in high precision: {reason}")


def _padded(values: Tensor, spec: ShardSpec) -> Tensor:
    """`values` as FSDP2 gathers it without an extension: cast, padded to the largest shard."""
    values = values.to(spec.dtype)
    if values.shape == spec.padded:
        return values
    padded = values.new_zeros(spec.padded)
    padded[: values.shape[0]] = values
    return padded


@contextlib.contextmanager
def _on_default_stream(device: torch.device) -> Iterator[None]:
    """FP8 shards live from step to step, so their memory must not belong to FSDP2's own streams."""
    if device.type != "cuda":
        yield
        return
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    default.wait_stream(current)
    with torch.cuda.stream(default):
        yield
    current.wait_stream(default)


def quantize_weights(weights: Sequence[ShardedWeight]) -> None:
    """Brings the FP8 copies of the weights up to date."""
    shards = []
    for weight in weights:
        memory = weight.memory
        assert memory.shard is not None
        shards.append((memory.shard, weight.plain()))
        memory.gathered, memory.stale = (), False  # The new copies may take the old ones' memory.
    quantize_shards(shards)
    for weight, (shard, _) in zip(weights, shards, strict=True):
        copies = (q for q in (shard.q, shard.q_columns) if q is not None)
        weight.memory.gathered = tuple(q.view(shard.spec.carrier) for q in copies)
