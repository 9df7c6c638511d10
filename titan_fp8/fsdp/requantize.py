"""Tells FSDP2's gathers in FP8 that the optimizer has made a step.

The first call for a model also tells FSDP2 not to gather embeddings in backward: their gradient
depends on the tokens alone.
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from titan_fp8.fsdp.sharded_weight import ShardGather, gathers_of, quantize


def requantize(models: Iterable[nn.Module]) -> None:
    """Has the shards of each model quantized once, together, until the next call.

    Call it on every rank after each step of the optimizer, once you have begun to. It only takes
    notes: the next gather in training mode quantizes, with one collective per process group that
    shares weights. Until the next call, gathers in training mode reuse the result. So after that
    first gather weights must not change, except by `load_state_dict` or `Module._apply` on every
    rank. In eval and inference mode they may, because there each gather quantizes.

    Without these calls every gather quantizes, with a collective of its own, and FSDP2 also gathers
    embeddings in backward.
    """
    for model in models:
        _leave_out_embeddings(model)
        together = _gathers_in(model)
        for gather in together:
            gather.together, gather.fresh = together, False


@contextlib.contextmanager
def quantized(models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the FP8 copies of the shards are those of their values now; for all ranks to enter.

    The next gather quantizes again, because the values may change before it.
    """
    due = [gather for model in models for gather in _gathers_in(model) if gather.is_due]
    if due:
        quantize(due)
    try:
        yield
    finally:
        for gather in due:
            gather.fresh = False


def _gathers_in(model: nn.Module) -> list[ShardGather]:
    return [gather for module in model.modules() for gather in gathers_of(module).values()]


_seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _leave_out_embeddings(model: nn.Module) -> None:
    """Tells FSDP2 once per model not to gather embeddings in backward."""
    if model in _seen:
        return
    _seen.add(model)
    # The modules of a unit have one state.
    modules_of: defaultdict[FSDPState, list[FSDPModule]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            modules_of[module._get_fsdp_state()].append(module)
    for modules in modules_of.values():
        # An embedding that is tied to the output layer shares its unit, which backward needs. A
        # subclass, or another parameter, may be read in backward.
        unit: Any = modules[0]
        is_embedding = type(unit).__bases__ == (FSDPModule, nn.Embedding)
        if len(modules) == 1 and is_embedding and len([*unit.parameters()]) == 1:
            unit.set_unshard_in_backward(False)
