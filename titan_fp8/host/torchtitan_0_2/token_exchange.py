"""What expert parallelism does before and after the experts: tokens between ranks, and their order.

These replace torchtitan's hooks on the experts. Rows travel by all-to-alls that take less CPU time
(`host/all_to_all.py`), or as a `TokenDispatcher` does it. torchtitan's attribute `permuted_indices`
carries what the hook before the experts has for the hook after them: a permutation, or the
dispatcher.

What arrives is sorted by source rank. torchtitan's `_permute` sorts it by expert and pads each
group; `_unpermute` inverts it. Both scatter rows by `index_put`, copy the whole tensor to append a
row for padding, and compute the indices by some twenty operations on short vectors, again when they
recompute. Gathers do both here (`host/permute.py`).
"""

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import expert_parallel
from torchtitan.models.moe import utils as moe_utils

from titan_fp8.host.all_to_all import ExchangeRows, exchange_counts
from titan_fp8.host.permute import sort_back, sort_by_expert
from titan_fp8.host.torchtitan_0_2.token_dispatcher import TokenDispatcher


def token_dispatch(
    self: expert_parallel.ExpertParallel,
    mod: Any,
    inputs: tuple[Tensor, Tensor | TokenDispatcher],
    device_mesh: DeviceMesh,
) -> tuple[Tensor, Any]:
    """ExpertParallel._token_dispatch: sends each row to the rank of its expert.

    Args:
        inputs: rows (S, dim), sorted by expert, and the rows for each expert (experts,) integers;
            or tokens (T, dim) and their dispatcher.

    Returns:
        The rows of the local experts, padded, and the padded sizes of the groups; or what
        `TokenDispatcher.dispatch` returns.
    """
    (rows, counts), group, ranks = inputs, device_mesh.get_group(), device_mesh.shape[0]
    if isinstance(counts, TokenDispatcher):
        self.permuted_indices = counts
        return counts.dispatch(rows, mod, group)
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
    if isinstance(permutation, TokenDispatcher):
        return permutation.combine(rows)
    rows, group = sort_back(rows, permutation), device_mesh.get_group()
    return ExchangeRows.apply(rows, self.input_splits, self.output_splits, group.group_name)
