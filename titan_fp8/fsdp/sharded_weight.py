"""What FSDP2 gathers of a weight in FP8.

A shard is an ordinary tensor in high precision, and a write to it cannot be noticed: compiled code,
a kernel of another library or a pointer writes to memory, not through PyTorch. So the FP8 copy of a
shard is trusted only where its values cannot have changed:

- Every gather, of forward and of backward, quantizes the values that it finds, as without titan_fp8
  it would cast them. This is right whatever happens to shards, but slow.
- Whoever calls `requantize` after each change of a model's weights, as the adapters do after each
  step of the optimizer, is believed. The next gather in training mode quantizes all shards of the
  model together. From then on the scales hold for gathers in training mode, until the next call.
- A gather in eval or inference mode quantizes in any case, since other weights may have been put in
  place for it, such as averages. The next gather in training mode then quantizes, too, and so does
  the first one after `load_state_dict` or `Module._apply`.

A copy is released once it is gathered, before activations need the memory. With scales that hold, a
later gather casts the shard again, alone.

Quantizing is a collective. All ranks make the same calls, in the same modes, so they agree on when
to quantize. No rank's values and no rank's writes decide about that.

FSDP2 gathers what two methods of a local tensor say, if it has them. `shown_to_fsdp2` shows it a
ShardGather, which has them, in its place. What users see, save and copy is the tensor.
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.utils._python_dispatch import _disable_current_modes

from titan_fp8.fsdp.shards import QuantizedShard, ShardSpec, cast_shard, quantize_shards
from titan_fp8.functional.weights import GatheredWeight
from titan_fp8.layouts import E4M3
from titan_fp8.ops import DTYPES
from titan_fp8.patches import log_once

_home: torch.cuda.Stream | None = None
"""Where the model runs; None is the default stream."""


def runs_on(stream: torch.cuda.Stream | None) -> None:
    """Says on which stream the models of this process run from now on; None: the default one."""
    global _home
    _home = stream


class ShardGather:
    """FSDP2's extension for one parameter: gathers it in FP8.

    Attributes:
        param: FSDP2's object for the parameter.
        recipe, emulate: how the parameter is quantized.
        shard: the FP8 copy of this rank's shard; None before the first gather.
        together: the ShardGathers of the model, if `requantize` has been called; else None.
        fresh: whether a gather in training mode may rely on the scales.
    """

    def __init__(self, param: FSDPParam):
        layer: Any = param._module_info.module
        self.param, self.recipe, self.emulate = param, str(layer.recipe), bool(layer.emulate)
        self.shard: QuantizedShard | None = None
        self.together: list[ShardGather] | None = None
        self.fresh = False

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # A copy of the layer is marked, and not sharded by FSDP2.

    def size(self) -> torch.Size:
        """The shape of the shard, for which FSDP2 asks."""
        return self.param.sharded_size

    @property
    def values(self) -> Tensor:
        """The shard in high precision, in the memory that FSDP2 would gather."""
        dim = self.param.fsdp_placement.dim
        padded = self.param._sharded_param_data.view(self.param.padded_sharded_param_size)
        return padded.narrow(dim, 0, self.size()[dim])

    @property
    def spec(self) -> ShardSpec:
        """Where the shard lies in the weight."""
        param, mesh = self.param, self.param.mesh_info
        whole, padded = tuple(param._orig_size), tuple(param.padded_sharded_param_size)
        dim, rank, group = param.fsdp_placement.dim, 0, None
        if isinstance(mesh, FSDPMeshInfo) and mesh.shard_mesh_size > 1:
            rank, group = mesh.shard_mesh_rank, mesh.shard_process_group
        first = min(rank * padded[dim], whole[dim])
        dtype = param.mp_policy.param_dtype or param.sharded_param.dtype
        return ShardSpec(whole, dim, first, padded, dtype, group)

    @property
    def why_high_precision(self) -> str | None:
        """None if the weight is gathered in FP8."""
        spec = self.spec
        if self.param.offload_to_cpu:
            return (
                "its shards are on the CPU (training.enable_cpu_offload). Gathers move twice the "
                "bytes, and each use quantizes the whole weight"
            )
        for dtype in (spec.dtype, self.param.sharded_param.dtype):
            if dtype not in DTYPES:
                return f"{dtype} weights are not quantized"
        if spec.dim == len(spec.whole) - 1:
            return "its last dimension is sharded"
        return None

    def layouts(self, shard: QuantizedShard) -> tuple[Tensor, ...]:
        """What FSDP2 gathers: the FP8 copy of the shard, as the dtype `ShardSpec.carrier`."""
        if shard.q is None:
            # A checkpoint with experts in it sees what FSDP2 does for them, and on torch 2.13 the
            # recomputation may call no op that forward, where the copy was there, has not called.
            modes = torch._C._len_torch_dispatch_stack()
            with _disable_current_modes() if modes else contextlib.nullcontext():
                cast_shard(shard, self.values)
        assert shard.q is not None
        return (shard.q.view(shard.spec.carrier),)

    @property
    def is_due(self) -> bool:
        """Whether to quantize the shard together with others. A weight in use keeps its scales."""
        is_sharded = self.param.sharded_state == ShardedState.SHARDED
        return self.shard is not None and not self.fresh and is_sharded

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], None]:
        """FSDP2's extension: the tensors to gather, and no metadata for `fsdp_post_all_gather`.

        Raises:
            RuntimeError: the layer's recipe has changed since FSDP2 has sharded it.
        """
        layer: Any = module
        if (layer.recipe, layer.emulate) != (self.recipe, self.emulate):
            raise RuntimeError(
                f"{layer.fqn}: recipe is {layer.recipe!r}, emulate {layer.emulate}, and FSDP2 "
                f"gathers its weights for {self.recipe!r}, emulate {self.emulate}: both must stay "
                "as they were when FSDP2 was applied"
            )
        if self.shard is None:
            device = self.param.device
            # Its scales are written in place, which later steps cannot do to inference tensors.
            with _on_home_stream(device), torch.inference_mode(False):
                self.shard = QuantizedShard(self.recipe, self.emulate, self.spec, device)
        if not module.training or torch.is_inference_mode_enabled():
            quantize([self])
            self.fresh = False
        elif not self.fresh:
            quantize([each for each in self.together or [] if each.is_due] or [self])
        return self.layouts(self.shard), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """FSDP2's extension: makes the unsharded parameter, or updates `out`, that of last time.

        FSDP2 frees and refills the memory of `all_gather_outputs` in place, and the scales are
        updated in place, so `out` is already new.
        """
        assert self.shard is not None
        # The current stream waits for the gather, so it may write to the memory.
        self.shard.release()
        if out is not None:
            return None
        shape = self.param._orig_size
        # The gathered rows may end in padding.
        q = all_gather_outputs[0].flatten().view(E4M3)[: shape.numel()].view(shape)
        return GatheredWeight(q, self.shard.s, self.shard.s_t, param_dtype), ()


# FSDP2 asks for the signature at each gather of each weight. Python would derive it each time,
# which takes longer than the method itself.
ShardGather.fsdp_pre_all_gather.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    ShardGather.fsdp_pre_all_gather
)


def mark(layer: nn.Module, name: str) -> None:
    """Has FSDP2 gather a parameter of the layer in FP8, if it will shard it."""
    layer.__dict__.setdefault("fp8_gathers", {})[name] = None


def marks(module: nn.Module) -> dict[str, ShardGather | None]:
    """The marked parameters of a module itself; None: not sharded yet."""
    return module.__dict__.get("fp8_gathers", {})


def gathers_of(module: nn.Module) -> dict[str, ShardGather]:
    """The parameters of a module itself that FSDP2 gathers in FP8: name -> ShardGather."""
    return {name: gather for name, gather in marks(module).items() if gather is not None}


def _gather_of(param: FSDPParam) -> ShardGather | None:
    """None if the parameter is gathered in high precision."""
    name, gathers = param._module_info.param_name, marks(param._module_info.module)
    if name not in gathers:
        return None
    gather = gathers[name] = gathers[name] or ShardGather(param)
    # Until the first gather the model may still get another dtype.
    if gather.shard is None and (reason := gather.why_high_precision):
        log_once(logging.WARNING, f"titan_fp8: a weight is gathered in high precision: {reason}")
        del gathers[name]
        return None
    return gather


def shown_to_fsdp2(local_tensor: property) -> property:
    """Makes the property of FSDPParam in which FSDP2 looks for its extension."""

    def sharded_local_tensor(self: FSDPParam) -> Tensor | ShardGather:
        return _gather_of(self) or local_tensor.__get__(self)

    return property(sharded_local_tensor)


def with_new_values(reset: Callable) -> Callable:
    """Wraps the method of FSDPParam that FSDP2 calls when a shard may be another one."""

    @functools.wraps(reset)
    def reset_sharded_param(self: FSDPParam) -> None:
        reset(self)
        if gather := _gather_of(self):
            gather.fresh = False

    return reset_sharded_param


@contextlib.contextmanager
def _on_home_stream(device: torch.device) -> Iterator[None]:
    """Shards that are quantized together live on, so no stream of FSDP2 may own their memory."""
    if device.type != "cuda":
        yield
        return
    current, home = torch.cuda.current_stream(device), _home or torch.cuda.default_stream(device)
    home.wait_stream(current)
    with torch.cuda.stream(home):
        yield
    current.wait_stream(home)


def quantize(gathers: Sequence[ShardGather]) -> None:
    """Quantizes shards, each of which has been gathered before."""
    shards = []
    for gather in gathers:
        assert gather.shard is not None
        gather.fresh = False  # If this fails midway, the scales are none to rely on.
        shards.append((gather.shard, gather.values))
    # Autograd may have saved the scales in forward, as it saves the memory that FSDP2 refills.
    scales = tuple(scale for shard, _ in shards for scale in (shard.table, shard.s, shard.s_t))
    with (
        _on_home_stream(gathers[0].param.device),
        torch.autograd._unsafe_preserve_version_counter(scales),
    ):
        quantize_shards(shards)
    for gather in gathers:
        gather.fresh = gather.together is not None


@contextlib.contextmanager
def quantized(models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the FP8 copies of the shards are those of their values now; for all ranks to enter.

    The next gather quantizes again, because the values may change before it.
    """
    modules = (module for model in models for module in model.modules())
    due = [gather for each in modules for gather in gathers_of(each).values() if gather.is_due]
    if due:
        quantize(due)
    try:
        yield
    finally:
        for gather in due:
            gather.fresh = False
