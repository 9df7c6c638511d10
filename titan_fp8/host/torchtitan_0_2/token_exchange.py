"""The all-to-alls of expert parallelism, and the permutation around the experts, in less CPU time.

PyTorch's functional collectives do in Python what torchtitan's dispatch does not need: they resolve
the process group, check the sizes, and pass through two autograd functions. These functions call
the same ops, so activation checkpointing sees and saves what it did before. torchtitan copies the
sums of sent and of received rows to the CPU one after the other; here they are copied together.

What arrives is sorted by source rank. torchtitan's `_permute` sorts it by expert and pads each
group; `_unpermute` inverts it. Both scatter rows by `index_put`, copy the whole tensor to append a
row for padding, and compute the indices by some twenty operations on short vectors, again when they
recompute. Gathers do both here (`titan_fp8/host/permute.py`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import expert_parallel
from torchtitan.models.moe import utils as moe_utils

from titan_fp8.functional.function import no_double_backward
from titan_fp8.host.permute import Permutation, sort_back, sort_by_expert

_c10d = torch.ops._c10d_functional


def all_to_all(x: Tensor, received: list[int], sent: list[int], group_name: str) -> Tensor:
    """Starts to send rows of x (S, ...) to each rank; `wait_for` returns those received.

    There is no gradient. In an op-level checkpoint forward saves what it has received.
    """
    with torch._C._AutoDispatchBelowAutograd():
        return _c10d.all_to_all_single.default(x, received, sent, group_name)


def wait_for(x: Tensor) -> Tensor:
    """What a collective returns, once it is there."""
    with torch._C._AutoDispatchBelowAutograd():
        return _c10d.wait_tensor.default(x)


def exchange_counts(counts: Tensor, group: ProcessGroup) -> tuple[Tensor, list[list[int]]]:
    """Exchanges the rows for each expert (experts,) between the ranks.

    Returns:
        How many rows come from each rank for each local expert (experts,), rank first; and how many
        this rank sends to, and receives from, each rank. Under op-level checkpointing a
        recomputation gets what forward has saved.
    """
    with torch.no_grad():
        parts = [len(counts) // group.size()] * group.size()
        received = wait_for(all_to_all(counts, parts, parts, group.group_name))
        splits = torch.stack((counts, received)).view(2, group.size(), -1).sum(-1).to("cpu")
    return received, splits.tolist()


class ExchangeRows(torch.autograd.Function):
    """Sends rows of x (S, dim) to each rank; returns those received, as AsyncCollectiveTensor.

    Gradients flow through ops on the result. Its `wait()` returns a tensor without gradients, which
    suits the forward of an autograd function, as in `host/permute.py`. Backward sends the gradient
    of each row back to where it came from.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, received: list[int], sent: list[int], group_name: str
    ) -> Tensor:
        ctx.arguments = sent, received, group_name
        return AsyncCollectiveTensor(all_to_all(x, received, sent, group_name))

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return wait_for(all_to_all(g.contiguous(), *ctx.arguments)), None, None, None


def token_dispatch(
    self: expert_parallel.ExpertParallel,
    mod: Any,
    inputs: tuple[Tensor, Tensor],
    device_mesh: DeviceMesh,
) -> tuple[Tensor, Tensor]:
    """ExpertParallel._token_dispatch: sends each row to the rank of its expert.

    Args:
        inputs: rows (S, dim), sorted by expert, and the rows for each expert (experts,) integers.

    Returns:
        The rows of the local experts, padded, and the padded sizes of the groups; or what
        `Exchanged.dispatch` returns.
    """
    rows, counts = inputs
    if not isinstance(counts, Tensor):  # an `Exchanged` of peer_exchange.py
        self.permuted_indices = counts
        return counts.dispatch(rows, mod, device_mesh)
    group, ranks = device_mesh.get_group(), device_mesh.shape[0]
    received, (self.input_splits, self.output_splits) = exchange_counts(counts, group)
    splits = self.output_splits, self.input_splits
    rows = ExchangeRows.apply(rows, *splits, group.group_name)
    alignment = moe_utils.TOKEN_GROUP_ALIGN_SIZE_M
    rows, self.permuted_indices, sizes = sort_by_expert(rows, received, ranks, alignment)
    return rows, sizes


def token_combine(
    self: expert_parallel.ExpertParallel, mod: Any, rows: Tensor, device_mesh: DeviceMesh
) -> Tensor:
    """ExpertParallel._token_combine: sends each expert's rows back to where they came from."""
    permutation, self.permuted_indices = self.permuted_indices, None
    if not isinstance(permutation, Permutation):
        return permutation.combine(rows)
    rows, group = sort_back(rows, permutation), device_mesh.get_group()
    return ExchangeRows.apply(rows, self.input_splits, self.output_splits, group.group_name)
