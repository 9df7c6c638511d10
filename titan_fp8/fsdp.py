"""What FSDP2 does with an FP8 module, and how it gathers the module's weights in FP8.

To FSDP2 an FP8 module is an ordinary one, with high-precision parameters under their own names:

- forward: FSDP2 all-gathers the parameters in `mixed_precision_param`, bf16 by default. fprop
  quantises the gathered weight, which FSDP2 then frees, if `fsdp_reshard_after_forward` says so.
- backward: FSDP2 gathers again, and dgrad quantises the weight as gathered then.
- gradients: wgrad returns the dtype of the gathered weight, and FSDP2 reduce-scatters it in
  `mixed_precision_reduce`, FP32 by default (`gradient_copies.py`).

With `fsdp_all_gather = true` each rank quantises its shard instead, and the gathers move FP8.
Gradients, and what the optimizer and checkpoints see, do not change. This uses FSDP2's own
extension: if the local tensor of a sharded parameter has the methods `fsdp_pre_all_gather` and
`fsdp_post_all_gather`, FSDP2 gathers what the first returns, and the second makes the unsharded
parameter from it. `gather_in_fp8` replaces the weights of FP8 layers by `ShardedWeight`s, which
have both:

    ShardedWeight      high precision, a shard: what the optimizer, clipping and checkpoints see
      | fsdp_pre_all_gather: quantises the shard (`shards.py`), unless that was done in this step
      v
    all-gather         one per FSDP2 unit: weights in FP8, other parameters as without titan_fp8
      | fsdp_post_all_gather
      v
    GatheredWeight     what the layer multiplies by (`gathered_weight.py`)

A ShardedWeight is an ordinary tensor that remembers how it is to be quantised. Its
`__torch_dispatch__` computes every op as on a plain tensor. The result keeps the class after the
ops by which FSDP2, DTensor and `Module.to_empty` make shards. In-place writes are recorded, because
version counters do not count those that DTensor makes. A shard is quantised at the first gather
after a write, so once a step, also with several micro-batches. Its FP8 copy then stays in memory:
one byte per element of the shard, two with a rowwise recipe.

Rowwise recipes quantise rows for fprop and columns for dgrad. Backward's gathers move both, as many
bytes as in bf16, because a forward that is recomputed in backward reads rows. Forward's gathers
move the rows alone, half of that, if FSDP2 frees the weight after forward (`ColumnsBuffer`).

The ranks that share a 128x128 block or a column agree on its scale by a collective. By default each
weight runs one at its gather. `requantise` (`requantise.py`) quantises all weights of a model
together, with one collective per process group; the adapters call it between a step of the
optimizer and the next forward.
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
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, is_bw
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._mode_utils import no_dispatch

from titan_fp8.checks import ConversionReport
from titan_fp8.gathered_weight import GatheredWeight
from titan_fp8.layouts import E4M3
from titan_fp8.ops import DTYPES
from titan_fp8.patches import SHARD_MEMORY
from titan_fp8.recipe import get_recipe
from titan_fp8.shard_memory import compare_memory_of
from titan_fp8.shards import Place, QuantisedShard, quantise

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


class _Memory:
    """State that belongs to the memory of a shard, and so is shared by all views of it.

    Attributes:
        shard: the FP8 copy; None before the first gather.
        gathered: what FSDP2 gathers of it, as the dtype `Place.carrier`.
        stale: True if the shard has been written to since it was quantised.
        values: the view that FSDP2 gathers; None before the first gather.
        columns: chooses the layouts of each gather; None: each moves all.
    """

    def __init__(self) -> None:
        self.shard: QuantisedShard | None = None
        self.gathered: tuple[Tensor, ...] = ()
        self.stale = True
        self.values: weakref.ref[ShardedWeight] | None = None
        self.columns: ColumnsBuffer | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Memory":
        return _Memory()  # The copy of a shard is quantised anew.


class ColumnsBuffer:
    """Hides the buffer for the columns of a rowwise weight from FSDP2 in gathers before forward.

    Autograd saves the weight in forward, and with it the buffers for rows and for columns. FSDP2
    gathers into the buffers in `FSDPParam.all_gather_outputs`, and later resizes them to no bytes.
    Forward reads rows only. So the columns' buffer may stay empty until backward's gather fills it.

    Only if FSDP2 frees the weight after forward, and so gathers it for backward. It does not if
    forward is recomputed in backward, or if a unit has several modules and only some of them run.
    """

    def __init__(self, unit: FSDPParamGroup, param: FSDPParam):
        # Weak, to avoid a cycle: FSDP2's objects hold the shard, and its memory holds this object.
        self._unit, self._param = weakref.ref(unit), weakref.ref(param)
        self._hidden: list[Tensor] = []

    def choose(self, layouts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The layouts to gather now. If they are rows alone, hides the columns' buffer."""
        unit, param = self._unit(), self._param()
        assert unit is not None and param is not None
        self.show()
        # FSDP2 makes the buffers at the first gather, which therefore moves both layouts.
        if len(layouts) != 2 or not param.all_gather_outputs:
            return layouts
        in_forward = unit._training_state == TrainingState.FORWARD and not is_bw()
        if in_forward and unit._reshard_after_forward and len(unit.modules) == 1:
            self._hidden = [param.all_gather_outputs.pop()]
            return layouts[:1]
        return layouts

    def show(self) -> None:
        """To be called after a gather."""
        param = self._param()
        if self._hidden and param is not None:
            param.all_gather_outputs += self._hidden
        self._hidden = []


class ShardedWeight(Tensor):
    """A weight, or FSDP2's shard of it, that is gathered in FP8.

    Attributes:
        recipe, emulate: how it is quantised.
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
        # Ops of c10d write, too, but their schemas do not say so.
        if func._schema.is_mutable or func.namespace == "c10d":
            for tensor in pytree.tree_leaves((args, kwargs)):
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
            place = _place(self, mesh, outer_size, mp_policy.param_dtype or self.dtype)
            reason = _why_high_precision(self.recipe, place)
            if reason is not None:
                _warn(reason)
                return (_padded(self.plain(), place),), None
            # Its scales are written in place, which later steps cannot do to inference tensors.
            with _on_default_stream(self.device), torch.inference_mode(False):
                memory.shard = QuantisedShard(self.recipe, self.emulate, place, self.device)
            memory.values = weakref.ref(self)
        if memory.stale:
            with _on_default_stream(self.device):
                quantise_together([self])
        layouts = memory.gathered
        if memory.columns is not None:
            layouts = memory.columns.choose(layouts)
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
            memory.columns.show()
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


# FSDP2 asks for the signature at each gather of each weight. Python would derive it each time,
# which takes longer than the method itself.
ShardedWeight.fsdp_pre_all_gather.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    ShardedWeight.fsdp_pre_all_gather
)


def _place(shard: Tensor, mesh: DeviceMesh, whole: torch.Size, dtype: torch.dtype) -> Place:
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
    return Place(tuple(whole), dim, first, tuple(padded), dtype, group)


def _why_high_precision(recipe: str, place: Place) -> str | None:
    """Why a weight at `place` is gathered in high precision; None if it is gathered in FP8."""
    if place.dtype not in DTYPES:
        return f"{place.dtype} weights are not quantised"
    if place.dim == len(place.whole) - 1:
        return "its last dimension is sharded"
    if place.group is None and not get_recipe(recipe).has_weight_blocks:
        return "one rank has all of it, and FSDP2 then handles one tensor per weight, not two"
    return None


@functools.cache
def _warn(reason: str) -> None:
    _log.warning(f"titan_fp8: a weight is gathered in high precision: {reason}")


def _padded(values: Tensor, place: Place) -> Tensor:
    """`values` as FSDP2 gathers it without an extension: cast, padded to the largest shard."""
    values = values.to(place.dtype)
    if values.shape == place.padded:
        return values
    padded = values.new_zeros(place.padded)
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


def quantise_together(weights: Sequence[ShardedWeight]) -> None:
    """Brings the FP8 copies of the weights up to date."""
    shards = []
    for weight in weights:
        memory = weight.memory
        assert memory.shard is not None
        shards.append((memory.shard, weight.plain()))
        memory.gathered, memory.stale = (), False  # The new copies may take the old ones' memory.
    quantise(shards)
    for weight, (shard, _) in zip(weights, shards, strict=True):
        copies = (q for q in (shard.q, shard.q_columns) if q is not None)
        weight.memory.gathered = tuple(q.view(shard.place.carrier) for q in copies)


def gather_in_fp8(model: nn.Module, kind: type[nn.Module]) -> ConversionReport:
    """Makes FSDP2 gather the weights of the model's FP8 layers in FP8, once it is applied.

    Args:
        model: before FSDP2, tensor or expert parallelism is applied, on any device.
        kind: the class of the layers: FP8Linear, or that of the experts. They have `recipe` and
            `emulate`, and use their parameters of two and three dimensions in FP8 products only.

    Returns:
        The report on every weight of these layers.

    Raises:
        RuntimeError: this version of FSDP2 cannot be patched.
    """
    SHARD_MEMORY.apply(compare_memory_of(ShardedWeight))
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, set()).add(module)
    report = ConversionReport()
    for fqn, layer in model.named_modules():
        if not isinstance(layer, kind):
            continue
        for name, param in list(layer.named_parameters(recurse=False)):
            row = f"{fqn}.{name}", " x ".join(map(str, param.shape))
            if param.dim() < 2:
                continue
            if len(owners[param]) > 1:
                report.left.append((*row, "another module reads it, too"))
                continue
            _wrap(layer, name=name)
            # Runs before the hook of FSDP2, which keeps the parameter that it finds.
            layer.register_load_state_dict_post_hook(functools.partial(_wrap, name=name))
            report.converted.append((*row, str(layer.recipe)))
    return report


def _wrap(layer: nn.Module, *_: Any, name: str) -> None:
    """Makes a weight of a layer a ShardedWeight, also if load_state_dict has assigned another."""
    param = getattr(layer, name)
    local = param._local_tensor if isinstance(param, DTensor) else param
    if isinstance(local, ShardedWeight):
        memory = local.memory
        replaced = memory.values is not None and memory.values() is not local
        if replaced and memory.shard is not None and not memory.shard.place.is_even:
            # FSDP2 moves the shards of some ranks to new memory, so all ranks begin anew.
            memory.shard = memory.values = memory.columns = None
            memory.stale = True
        return
    weight = ShardedWeight(local.detach(), str(layer.recipe), bool(layer.emulate))
    if isinstance(param, DTensor):
        param._local_tensor = weight
    else:
        setattr(layer, name, nn.Parameter(weight, requires_grad=param.requires_grad))
