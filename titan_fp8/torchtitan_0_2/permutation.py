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

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torchtitan.distributed import expert_parallel
from torchtitan.models.moe import utils as moe_utils

from titan_fp8.functional import differentiable_once
from titan_fp8.ops import run_kernel

_gather_rows = torch.ops.titan_fp8.gather_rows.default
_library = torch.library.Library("titan_fp8_plugin", "DEF")


def _one_op(fake: Callable) -> Callable:
    """Makes the decorated function an op of its name; `fake` makes its empty result."""

    def register(function: Callable) -> Callable:
        name = function.__name__
        _library.define(name + torch.library.infer_schema(function, mutates_args=()))
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"titan_fp8_plugin::{name}", fake, lib=_library)
        return getattr(torch.ops.titan_fp8_plugin, name).default

    return register


def _fake_places(counts, experts, ranks, tokens, length, alignment):
    index = counts.new_empty(length, dtype=torch.int32)
    return index, index.new_empty(tokens), index.new_empty(experts)


@_one_op(fake=lambda index, count: index.new_empty(count))
def invert(index: Tensor, count: int) -> Tensor:
    """Where in `index`, int64, each number below `count` stands, -1 for one that does not."""
    places = torch.arange(len(index), device=index.device)
    return index.new_full((count,), -1).scatter_(0, index, places)


@_one_op(fake=_fake_places)
def places_of_tokens(
    counts: Tensor, experts: int, ranks: int, tokens: int, length: int, alignment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A `Permutation` of `tokens` tokens to `length` places, and the aligned group sizes."""
    if counts.is_cuda:
        rest = experts, ranks, tokens, length, alignment
        return run_kernel("places_of_tokens", counts.contiguous(), rest)
    index, sizes, _ = moe_utils.generate_permute_indices(counts, experts, ranks, length, alignment)
    # Padding, -1, goes behind the tokens.
    places = invert(index.long() % (tokens + 1), tokens + 1)[:-1]
    return index, places.to(index.dtype), sizes


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
        return _gather_rows(arrived(x), index)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor):
        (inverse,) = ctx.saved_tensors
        return _gather_rows(g, inverse), None, None


def permute(
    x: Tensor, num_tokens_per_expert: Tensor, ep_degree: int, num_local_experts: int
) -> tuple[torch.Size, Tensor, Permutation, Tensor]:
    """torchtitan's `_permute`: x (S, dim), sorted by source rank, as (R, dim), sorted by expert.

    Returns x's shape, the rows, the permutation, for `unpermute`, and the aligned group sizes.
    """
    alignment = moe_utils.TOKEN_GROUP_ALIGN_SIZE_M
    longest = moe_utils._round_up(x.shape[0] + num_local_experts * alignment, alignment)
    *permutation, sizes = places_of_tokens(
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
