"""Tells FSDP2's gathers in FP8 (`fsdp.py`) that the optimizer has made a step.

All shards of a model are then quantized together, at the next gather. The first call for a model
also tells FSDP2 what it need not gather:

- Embeddings in backward. Their gradient depends on the tokens alone.
- The columns of rowwise weights in forward, if the weight is freed after forward.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from titan_fp8.columns_buffer import ColumnsBuffer
from titan_fp8.recipe import get_recipe
from titan_fp8.sharded_weight import ShardGather, gathers_of, quantize


def requantize(models: Iterable[nn.Module]) -> None:
    """Has the shards of each model quantized once, together, until the next call.

    Call it on every rank after each step of the optimizer, once you have begun to. It only takes
    notes: the next gather in training mode quantizes, with one collective per process group that
    shares weights. Until the next call, gathers in training mode reuse the result. So after that
    first gather weights must not change, except by `load_state_dict` or `Module._apply` on every
    rank. In eval and inference mode they may, because there each gather quantizes.

    Without these calls every gather quantizes, with a collective of its own, and FSDP2 also gathers
    embeddings in backward and columns in forward.
    """
    for model in models:
        _plan_gathers(model)
        together = _gathers_in(model)
        for gather in together:
            gather.together, gather.fresh = together, False


def quantize_now(models: Iterable[nn.Module]) -> None:
    """Quantizes what the next gather in training mode would quantize; for all ranks to call."""
    due = [gather for model in models for gather in _gathers_in(model) if gather.is_due]
    if due:
        quantize(due)


def _gathers_in(model: nn.Module) -> list[ShardGather]:
    return [gather for module in model.modules() for gather in gathers_of(module).values()]


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
        gather = param._sharded_local_tensor
        if isinstance(gather, ShardGather) and not get_recipe(gather.recipe).has_weight_blocks:
            gather.columns = ColumnsBuffer(unit, param)
