"""torchtitan's expert parallelism with the exchange of docs/exchange.md in place of all-to-alls.

torchtitan exchanges tokens in hooks on the experts. A GatherMoE that exchanges by itself adds its
experts to `exchanging`, and the hooks then leave what passes through them alone. In bf16 the layer
dispatches before it calls its experts, and combines after it. With FP8 on the wire the experts do
it all: they get the tokens, and an `Exchanged` in place of the counts.
"""

import functools
import socket
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torchtitan.tools.logging import logger

from titan_fp8.exchange import CollectiveExchange, Exchange, exchanged_swiglu, rows_for
from titan_fp8.torchtitan_0_2.permutation import token_group_alignment

exchanging: WeakSet[nn.Module] = WeakSet()
"""The experts whose tokens do not pass through torchtitan's exchange."""


class Exchanged:
    """What experts need to exchange their tokens; FSDP2 would cast the tensors of a dataclass.

    Attributes:
        exchange, plan: of the tokens' copies.
        scores: (T, k) FP32.
        before: the scores weight the copies of the tokens, not the outputs.
    """

    def __init__(self, exchange: Any, plan: Any, scores: Tensor, before: bool):
        self.exchange, self.plan, self.scores, self.before = exchange, plan, scores, before

    def run(
        self, tokens: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, recipe: str, emulate: bool
    ) -> Tensor:
        """The experts' outputs, combined: (T, dim)."""
        return exchanged_swiglu(
            tokens, self.scores, w1, w2, w3, self.exchange, self.plan,
            recipe=recipe, emulate=emulate, score_before_experts=self.before,
        )  # fmt: skip


_groups: WeakKeyDictionary[nn.Module, ProcessGroup | None] = WeakKeyDictionary()


def experts_group(experts: nn.Module) -> ProcessGroup | None:
    """The ranks that share these experts; None without expert parallelism."""
    if experts not in _groups:
        weight: Any = next(experts.parameters())
        shared = isinstance(weight, DTensor) and "ep" in (weight.device_mesh.mesh_dim_names or ())
        _groups[experts] = weight.device_mesh["ep"].get_group() if shared else None
    return _groups[experts]


@functools.cache
def gpus_reach_each_other(group: ProcessGroup) -> bool:
    """Whether each rank's GPU can write to the memory of the others; a collective at first."""
    mine = socket.gethostname(), torch.cuda.current_device()
    all_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(all_ranks, mine, group=group)
    here, device = mine
    reachable = all(
        host == here and (other == device or torch.cuda.can_device_access_peer(device, other))
        for host, other in all_ranks
    )
    answers: list[Any] = [None] * group.size()
    dist.all_gather_object(answers, reachable, group=group)
    return all(answers)


def _by_peers(group: ProcessGroup, tokens: Tensor) -> bool:
    return tokens.is_cuda and tokens.dtype == torch.bfloat16 and gpus_reach_each_other(group)


def can_exchange(experts: nn.Module, tokens: Tensor, fp8: bool) -> bool:
    """Whether `exchange_of` is to exchange these tokens, and not torchtitan."""
    group = experts_group(experts)
    return group is not None and (fp8 or _by_peers(group, tokens))


_exchanges: dict[tuple[Any, ...], Exchange | CollectiveExchange] = {}


def exchange_of(
    experts: nn.Module, tokens: Tensor, top_k: int, num_experts: int, copies: int, factor: float
) -> Exchange | CollectiveExchange:
    """What exchanges `tokens` (T, dim), of which this rank sends so many copies.

    The layers of a model share one, since they use it one after the other.
    """
    group = experts_group(experts)
    assert group is not None
    ranks, alignment, (count, dim) = group.size(), token_group_alignment(), tokens.shape
    by_peers = _by_peers(group, tokens)
    key = group, by_peers, top_k, num_experts, alignment, (count, dim, copies) if by_peers else ()
    if key not in _exchanges and not by_peers:
        _exchanges[key] = CollectiveExchange(
            group, top_k=top_k, experts=num_experts, alignment=alignment
        )
    elif key not in _exchanges:
        capacity = rows_for(count, top_k, num_experts, ranks, factor, alignment, copies)
        made = Exchange(
            group, tokens=count, top_k=top_k, dim=dim, experts=num_experts, capacity=capacity,
            alignment=alignment,
        )  # fmt: skip
        _exchanges[key] = made
        logger.info(
            f"titan_fp8: {ranks} GPUs exchange tokens by writing to each other's memory, "
            f"{made.nbytes / 2**20:.0f} MiB of each; experts have room for {made.capacity} rows"
        )
    return _exchanges[key]


def combine_unless_exchanged(combine: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps ExpertParallel._token_combine, which leaves what experts have exchanged as it is."""

    @functools.wraps(combine)
    def combined(self: Any, mod: nn.Module, routed_output: Tensor, device_mesh: Any) -> Tensor:
        if mod in exchanging:
            return routed_output
        return combine(self, mod, routed_output, device_mesh)

    return combined
