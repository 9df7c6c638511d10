"""The permutation around the experts under expert parallelism, by gathers in both passes.

The all-to-all delivers a rank's tokens sorted by source rank. torchtitan's `_permute` sorts them by
expert and pads each expert's group to a multiple of the alignment; `_unpermute` inverts it. Both
scatter rows by `index_put`, the first in its backward, and both copy the whole tensor to append a
row that stands for padding. Here both are gathers in both passes (`titan_fp8/host/permute.py`).

torchtitan computes the indices by some twenty operations on short vectors, and again when it
recomputes: more CPU time than the experts take. The op `places_of_tokens` computes the same ones,
by one kernel on a GPU.
"""

import torch
from torch import Tensor
from torchtitan.models.moe import utils as moe_utils

from titan_fp8.host.permute import Permutation, sort_back, sort_by_expert


def permute(
    x: Tensor, num_tokens_per_expert: Tensor, ep_degree: int, num_local_experts: int
) -> tuple[torch.Size, Tensor, Permutation, Tensor]:
    """torchtitan's `_permute`: x (S, dim), sorted by source rank, to (R, dim), sorted by expert.

    Returns:
        The shape of x, the permuted rows, the permutation for `unpermute`, and the group sizes
        (num_local_experts,), padded to the alignment.
    """
    alignment = moe_utils.TOKEN_GROUP_ALIGN_SIZE_M
    return x.shape, *sort_by_expert(x, num_tokens_per_expert, ep_degree, alignment)


def unpermute(out: Tensor, input_shape: torch.Size, permutation: Permutation) -> Tensor:
    """torchtitan's `_unpermute`: rows (R, dim), sorted by expert, to `input_shape` (S, dim)."""
    return sort_back(out, permutation)
