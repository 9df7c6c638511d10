"""How the tokens of a MoE layer travel to their experts, in place of torchtitan's all-to-alls.

torchtitan exchanges tokens in hooks on the experts. `GatherMoE` gives the experts its tokens, and a
`TokenDispatcher` in place of the counts, which the hooks call (`token_exchange.py`). In FP8 it lets
both pass, and the experts exchange the tokens (`host/fp8_exchange.py`). In high precision it does,
without waiting for the CPU, for steps that are captured as a CUDA graph (`host/row_exchange.py`).
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torchtitan.models.moe import utils as moe_utils
from torchtitan.tools.logging import logger

from titan_fp8.functional.weights import Weight
from titan_fp8.host.all_to_all import AllToAllExchange
from titan_fp8.host.exchange import Exchange
from titan_fp8.host.fp8_exchange import exchanged_swiglu
from titan_fp8.host.peer_exchange import PeerExchange, reach_each_other, rows_for
from titan_fp8.host.row_exchange import ReturnRows, SendRows, group_sizes
from titan_fp8.layouts import BLOCK, E4M3


class ExchangeSettings(NamedTuple):
    """How the MoE layers of a job exchange tokens."""

    capacity: float  # the rows that a rank can get, relative to balanced routing
    timeout_s: float  # as in `PeerExchange`
    in_fp8: bool  # the experts exchange the tokens, in FP8; otherwise the hooks do


class TokenDispatcher:
    """Takes the tokens of a batch from a MoE layer to their experts, and back.

    No dataclass and no tuple: FSDP2 would cast the tensors of these.

    Args:
        routing: order, chosen, counts and slots, as in `Exchange.plan`.
        scores: (T, k) FP32.
        before: the scores weight the copies of the tokens, not the outputs.
    """

    def __init__(
        self,
        routing: tuple[Tensor, Tensor, Tensor, Tensor],
        scores: Tensor,
        before: bool,
        settings: ExchangeSettings,
    ):
        self.routing, self.scores, self.before, self.settings = routing, scores, before, settings
        self.group: ProcessGroup | None = None

    def dispatch(
        self, x: Tensor, experts: nn.Module, mesh: DeviceMesh
    ) -> "tuple[Tensor, Tensor | TokenDispatcher]":
        """The arguments of the experts, for tokens x (T, dim); the hook before them calls it.

        In FP8 they are the tokens and this; otherwise rows (C, dim) and the sizes of their groups.
        """
        self.group = mesh.get_group()
        weight = next(experts.parameters())
        assert isinstance(weight, DTensor)
        whole = weight.device_mesh
        if self.before and "etp" in (whole.mesh_dim_names or ()):
            # Each rank has a part of what the experts compute, and of the gradients. The hook does
            # the same to the tokens.
            scores = DTensor.from_local(self.scores, whole["etp"], (Replicate(),))
            self.scores = scores.to_local(grad_placements=(Partial(),))
        if self.settings.in_fp8:
            return x, self
        alignment = moe_utils.TOKEN_GROUP_ALIGN_SIZE_M
        self.exchange = self._by_peers(self.group, x, x.dtype, alignment)
        self.plan = self.exchange.plan(*self.routing)
        scores_before = self.scores if self.before else None
        rows = SendRows.call(x, scores_before, self.exchange, self.plan)
        return rows, group_sizes(self.plan)

    def combine(self, y: Tensor) -> Tensor:
        """The tokens' outputs (T, dim), from what experts return; the hook after them calls it."""
        if self.settings.in_fp8:
            return y
        return ReturnRows.call(y, None if self.before else self.scores, self.exchange, self.plan)

    def run(
        self, x: Tensor, w1: Weight, w2: Weight, w3: Weight, recipe: str, emulate: bool
    ) -> Tensor:
        """The experts' outputs for tokens x, combined: (T, dim). Converted experts call it."""
        assert self.group is not None, "only the hooks of expert parallelism say which ranks"
        exchange: Exchange = AllToAllExchange(self.group)
        if x.is_cuda and x.dtype == torch.bfloat16 and reach_each_other(self.group):
            exchange = self._by_peers(self.group, x, E4M3, BLOCK)
        plan = exchange.plan(*self.routing)
        return exchanged_swiglu(
            x, self.scores, w1, w2, w3, exchange, plan,
            recipe=recipe, emulate=emulate, score_before_experts=self.before,
        )  # fmt: skip

    def _by_peers(
        self, group: ProcessGroup, x: Tensor, dtype: torch.dtype, alignment: int
    ) -> PeerExchange:
        (order, _, counts, slots), (factor, timeout_s, _) = self.routing, self.settings
        (tokens, dim), top_k, experts = x.shape, order.shape[1], len(counts)
        capacity = rows_for(tokens, top_k, experts, group.size(), factor, len(slots))
        return _peer_exchange(
            group, tokens=tokens, top_k=top_k, dim=dim, experts=experts, capacity=capacity,
            dtype=dtype, alignment=alignment, timeout_s=timeout_s,
        )  # fmt: skip


@functools.cache
def _peer_exchange(group: ProcessGroup, **options: Any) -> PeerExchange:
    """One for all layers of the same sizes, which use it one after the other."""
    key = "[quantize.grouped_mm.titan_fp8] exchange_capacity"
    exchange = PeerExchange(group, **options, key=key)
    logger.info(
        f"titan_fp8: {group.size()} GPUs exchange tokens by writing to each other's memory, "
        f"{exchange.memory.nbytes / 2**20:.0f} MiB of each; experts have room for "
        f"{exchange.capacity} rows"
    )
    return exchange
