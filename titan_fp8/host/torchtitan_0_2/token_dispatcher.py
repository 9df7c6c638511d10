"""How the tokens of a MoE layer travel to their experts, in place of torchtitan's all-to-alls.

torchtitan exchanges tokens in hooks on the experts. `GatherMoE` gives the experts its tokens, and a
dispatcher in place of the counts, which the hooks call (`token_exchange.py`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Replicate
from torchtitan.models.moe import utils as moe_utils
from torchtitan.tools.logging import logger

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
        self, routing: tuple[Tensor, ...], scores: Tensor, before: bool, settings: ExchangeSettings
    ):
        self.routing, self.scores, self.before, self.settings = routing, scores, before, settings

    def dispatch(self, x: Tensor, experts: nn.Module, group: ProcessGroup) -> tuple[Tensor, Any]:
        """The arguments of the experts, for tokens x (T, dim); the hook before them calls it.

        `experts` are those of this rank, and `group` the ranks that have the others.
        """
        raise NotImplementedError

    def combine(self, y: Tensor) -> Tensor:
        """The tokens' outputs (T, dim), from what experts return; the hook after them calls it."""
        raise NotImplementedError

    def _scores_for(self, experts: nn.Module) -> Tensor:
        """The scores; ranks that have parts of the same experts sum their gradients."""
        weight = next(experts.parameters())
        assert isinstance(weight, DTensor)
        mesh = weight.device_mesh
        if not self.before or "etp" not in (mesh.mesh_dim_names or ()):
            return self.scores
        # torchtitan's hook does the same to the tokens.
        scores = DTensor.from_local(self.scores, mesh["etp"], (Replicate(),))
        return scores.to_local(grad_placements=(Partial(),))

    def _by_peers(
        self, group: ProcessGroup, x: Tensor, dtype: torch.dtype, alignment: int
    ) -> PeerExchange:
        (order, _, counts, slots), (factor, timeout_s, _) = self.routing, self.settings
        sizes = *x.shape, order.shape[1], len(counts), len(slots)
        return _peer_exchange(group, *sizes, factor, dtype, alignment, timeout_s)


class FP8Dispatcher(TokenDispatcher):
    """In FP8: the hooks let tokens pass; converted experts exchange them (`fp8_exchange.py`)."""

    def dispatch(
        self, x: Tensor, experts: nn.Module, group: ProcessGroup
    ) -> tuple[Tensor, Callable[..., Tensor]]:
        """The tokens, and `exchanged_swiglu` of this batch, for experts to call."""
        exchange: Exchange = AllToAllExchange(group)
        if x.is_cuda and x.dtype == torch.bfloat16 and reach_each_other(group):
            exchange = self._by_peers(group, x, E4M3, BLOCK)
        return x, functools.partial(
            exchanged_swiglu, scores=self._scores_for(experts), exchange=exchange,
            plan=exchange.plan(*self.routing), score_before_experts=self.before,
        )  # fmt: skip

    def combine(self, y: Tensor) -> Tensor:
        return y


class RowDispatcher(TokenDispatcher):
    """In high precision, by GPUs: rows for any experts of torchtitan (`row_exchange.py`)."""

    def dispatch(self, x: Tensor, experts: nn.Module, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        """Rows (C, dim), sorted by expert, and the sizes of their groups (local experts,)."""
        scores = self._scores_for(experts) if self.before else None
        self.exchange = self._by_peers(group, x, x.dtype, moe_utils.TOKEN_GROUP_ALIGN_SIZE_M)
        self.plan = self.exchange.plan(*self.routing)
        return SendRows.call(x, scores, self.exchange, self.plan), group_sizes(self.plan)

    def combine(self, y: Tensor) -> Tensor:
        return ReturnRows.call(y, None if self.before else self.scores, self.exchange, self.plan)


@functools.cache
def _peer_exchange(
    group: ProcessGroup, tokens: int, dim: int, top_k: int, experts: int, copies: int,
    factor: float, dtype: torch.dtype, alignment: int, timeout_s: float,
) -> PeerExchange:  # fmt: skip
    """One for all layers of the same sizes, which use it one after the other."""
    capacity = rows_for(tokens, top_k, experts, group.size(), factor, copies)
    exchange = PeerExchange(
        group, tokens=tokens, top_k=top_k, dim=dim, experts=experts, capacity=capacity,
        dtype=dtype, alignment=alignment, timeout_s=timeout_s,
        key="[quantize.grouped_mm.titan_fp8] exchange_capacity",
    )  # fmt: skip
    logger.info(
        f"titan_fp8: {group.size()} GPUs exchange tokens by writing to each other's memory, "
        f"{exchange.memory.nbytes / 2**20:.0f} MiB of each; experts have room for "
        f"{exchange.capacity} rows"
    )
    return exchange
