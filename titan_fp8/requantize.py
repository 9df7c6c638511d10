"""What happens to FP8 shards between a step of the optimizer and the next forward.

All FP8 shards of a model (`fsdp.py`) are quantized together. The first call for a model also tells
FSDP2 what it need not gather:

- Embeddings in backward. Their gradient depends on the tokens alone.
- The columns of rowwise weights in forward, if the weight is freed after forward.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from titan_fp8.columns_buffer import ColumnsBuffer
from titan_fp8.recipe import get_recipe
from titan_fp8.sharded_weight import ShardedWeight, quantize_weights


def requantize(models: Iterable[nn.Module]) -> None:
    """Quantizes all shards of the models that have been written to since they were quantized.

    Call it on every rank between a step of the optimizer and the next forward. It runs one
    collective per process group that shares weights. Without this call, each gather runs one for
    its own weight, and FSDP2 also gathers embeddings in backward and columns in forward.
    """
    models = list(models)
    for model in models:
        _plan_gathers(model)
    requantize_stale(models)


def requantize_stale(models: Iterable[nn.Module]) -> None:
    """Quantizes shards like `requantize`, and leaves FSDP2's gathers as they are."""
    weights = []
    for param in (param for model in models for param in model.parameters()):
        local = param._local_tensor if isinstance(param, DTensor) else param
        if not isinstance(local, ShardedWeight) or local.memory.values is None:
            continue
        values = local.memory.values()
        if local.memory.stale and values is not None:
            weights.append(values)
    if weights:
        quantize_weights(weights)


def requantize_in_forward(models: Iterable[nn.Module]) -> None:
    """Like `requantize`, at the beginning of each model's next forward.

    torchtitan's trainer counts the tokens of a batch over all ranks and blocks on the count. A
    process group runs its collectives in order, so right after the optimizer those of `requantize`
    would delay the count until the optimizer has ended (`torchtitan_0_2/input_stream.py`).

    Not for pipeline schedules of several stages per rank, which gather before forward.
    """
    for model in models:
        _plan_gathers(model)
        _quantize_in_next_forward(model)


def _quantize_in_next_forward(model: nn.Module) -> None:
    def once(model: nn.Module, _: Any) -> None:
        handle.remove()
        requantize_stale([model])

    # Must run before FSDP2's hook, in which the streams of the gathers wait for this one.
    handle = model.register_forward_pre_hook(once, prepend=True)


_planned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _plan_gathers(model: nn.Module) -> None:
    """Tells FSDP2 what it need not gather, once per model."""
    if model in _planned:
        return
    _planned.add(model)
    # The modules of a unit have one state.
    modules_of: defaultdict[FSDPState, list[FSDPModule]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            modules_of[module._get_fsdp_state()].append(module)
    for state, modules in modules_of.items():
        # An embedding that is tied to the output layer shares its unit, which backward needs.
        if len(modules) == 1 and isinstance(modules[0], nn.Embedding):
            modules[0].set_unshard_in_backward(False)
        for unit in _units(state):
            _hide_columns(unit)


def _units(state: FSDPState) -> list[FSDPParamGroup]:
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.13
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _hide_columns(unit: FSDPParamGroup) -> None:
    for param in unit.fsdp_params:
        shard = param._sharded_local_tensor
        if isinstance(shard, ShardedWeight) and not get_recipe(shard.recipe).has_weight_blocks:
            shard.memory.columns = ColumnsBuffer(unit, param)
