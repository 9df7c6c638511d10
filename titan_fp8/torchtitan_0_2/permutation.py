"""The permutation around the experts as gathers, in both directions and in both passes.

Expert parallelism brings a rank its tokens sorted by the rank they come from. torchtitan's
`_permute` sorts them by expert and pads each expert's to a multiple of the alignment, and
`_unpermute` takes them back. It writes rows where an index says, by `index_put`, in `_unpermute`
and in the backward of `_permute`, and copies the tensor to add a row that stands for the padding.

But every token has one place, so each direction is also a gather: by the token of each place, -1
for padding, or by the place of each token. Forward takes the one, backward the other, and padding
is zero in either.

The indices, and with them the routing, are those of torchtitan's own function. It makes them of a
score of operations on short vectors, each of which would pass by the policy of activation
checkpointing, forward and recomputed: more work for the host than the experts are. They are two ops
instead, and those of `places_of_tokens`, on a GPU one kernel, are kept, not made again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torchtitan.distributed import expert_parallel
from torchtitan.models.moe import utils as moe_utils

import titan_fp8.ops  # noqa: F401  (defines torch.ops.titan_fp8)
from titan_fp8.functional import differentiable_once

_ops = torch.ops.titan_fp8


def arrived(x: Tensor) -> Tensor:
    """x itself, once its collective is through.

    Ops wait by themselves, but the dispatch of the tensor's class costs the CPU more than the op.
    """
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x


class Permutation(NamedTuple):
    """Which token stands where, and where each token stands."""

    tokens: Tensor
    """(R,) int32: the token at each place, -1 for padding."""
    places: Tensor
    """(S,) int32: the place of each token."""


class _Gather(torch.autograd.Function):
    """Rows of x by `index`, those of the gradient by its inverse; -1 gives zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _ops.gather_rows(arrived(x), index)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor):
        (inverse,) = ctx.saved_tensors
        return _ops.gather_rows(g, inverse), None, None


def permute(
    x: Tensor, num_tokens_per_expert: Tensor, ep_degree: int, num_local_experts: int
) -> tuple[torch.Size, Tensor, Permutation, Tensor]:
    """torchtitan's `_permute`: x (S, dim), sorted by source rank, as (R, dim), sorted by expert.

    Returns x's shape, the rows, the permutation, for `unpermute`, and the aligned group sizes.
    """
    alignment = moe_utils.TOKEN_GROUP_ALIGN_SIZE_M
    longest = moe_utils._round_up(x.shape[0] + num_local_experts * alignment, alignment)
    *permutation, sizes = _ops.places_of_tokens(
        num_tokens_per_expert, num_local_experts, ep_degree, x.shape[0], longest, alignment
    )
    permutation = Permutation(*permutation)
    return x.shape, _Gather.apply(x, *permutation), permutation, sizes


def unpermute(out: Tensor, input_shape: torch.Size, permutation: Permutation) -> Tensor:
    """torchtitan's `_unpermute`: rows (R, dim), by expert, back as `input_shape` (S, dim)."""
    return _Gather.apply(out, permutation.places, permutation.tokens)


def permute_by_gathers() -> None:
    """Replaces torchtitan's permutation under expert parallelism; idempotent."""
    expert_parallel._permute, expert_parallel._unpermute = permute, unpermute
