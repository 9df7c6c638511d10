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
from weakref import WeakSet

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


def experts_group(experts: nn.Module) -> ProcessGroup | None:
    """The ranks that share these experts; None without expert parallelism."""
    weight = next(experts.parameters())
    if not isinstance(weight, DTensor) or "ep" not in (weight.device_mesh.mesh_dim_names or ()):
        return None
    return weight.device_mesh["ep"].get_group()


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


_exchanges: dict[tuple[Any, ...], Exchange | CollectiveExchange] = {}


def exchange_of(
    experts: nn.Module, tokens: Tensor, top_k: int, num_experts: int, fp8: bool, factor: float
) -> Exchange | CollectiveExchange | None:
    """What exchanges `tokens` (T, dim); None if torchtitan's way is to be taken.

    The layers of a model share one, since they use it one after the other.
    """
    group = experts_group(experts)
    if group is None:
        return None
    alignment = token_group_alignment()
    by_peers = tokens.is_cuda and tokens.dtype == torch.bfloat16 and gpus_reach_each_other(group)
    if not (by_peers or fp8):
        return None
    (count, dim), local = tokens.shape, num_experts // group.size()
    shape = (count, dim) if by_peers else ()
    key = group, by_peers, top_k, num_experts, alignment, shape
    if key not in _exchanges:
        common = {"top_k": top_k, "experts": num_experts, "alignment": alignment}
        if by_peers:
            capacity = rows_for(count, top_k, num_experts, group.size(), factor, alignment)
            made = Exchange(group, tokens=count, dim=dim, capacity=capacity, **common)
            logger.info(
                f"titan_fp8: {group.size()} GPUs exchange tokens by writing to each other's "
                f"memory, {made.nbytes / 2**20:.0f} MiB each; a rank of {local} experts can get "
                f"{capacity} rows"
            )
            _exchanges[key] = made
        else:
            _exchanges[key] = CollectiveExchange(group, **common)
    return _exchanges[key]


def unless_exchanged(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ExpertParallel's `_token_dispatch` or `_token_combine`: what comes goes on as it is."""

    @functools.wraps(hook)
    def pass_or_exchange(self: Any, mod: nn.Module, value: Any, mesh: Any) -> Any:
        return value if mod in exchanging else hook(self, mod, value, mesh)

    return pass_or_exchange
