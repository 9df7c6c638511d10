"""Moves the rows of tokens to their experts and back by gathers, in forward and in backward.

Each token has k slots, one for each of its experts. torchtitan copies the tokens into slots sorted
by expert, and afterwards sums the slots of each token, by `index_put`, which has to sort its
indices to accumulate, or by `scatter_add`, with FP32 copies of all slots, one of which it saves.

`Expand` and `Combine` use three ops instead, each of which reads the row of every slot once:
`gather_rows`, `combine_rows` (the weighted sum of each token's slots) and `dot_rows` (the gradient
of the scores). They sum in FP32 and round once. `Permute` reorders the rows that expert parallelism
has exchanged; each has exactly one place, so both directions are gathers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from titan_fp8.functional.function import Function, no_double_backward
from titan_fp8.layouts import round_up
from titan_fp8.ops import call


def wait_for_collective(x: Tensor) -> Tensor:
    """The plain tensor of an AsyncCollectiveTensor; any other x as it is.

    An op would wait by itself, but dispatching the tensor subclass takes more CPU time than the op.
    """
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x


class Expand(Function):
    """Copies x (T, dim) into rows (R, dim): row r is the token of slots[r], times its score if any.

    Slot k · t + i is choice i of token t. slots (R,) and its inverse, rows (T, k), are integers; -1
    in `rows` stands for a slot without a row. scores: (T, k) FP32, or None.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, rows: Tensor, scores: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, *(() if scores is None else (x, scores)))
        return call("gather_rows", x, slots, scores, rows.shape[1])

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weighted = ctx.saved_tensors
        if not weighted:
            return call("combine_rows", g, rows), None, None, None
        x, scores = weighted
        return call("combine_rows", g, rows, scores), None, None, call("dot_rows", x, g, rows)


class Combine(Function):
    """Sums the rows of y (R, dim) of each token, times their scores if any: (T, dim).

    slots, rows and scores are those of `Expand`.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, slots: Tensor, rows: Tensor, scores: Tensor | None) -> Tensor:
        y = wait_for_collective(y)
        ctx.save_for_backward(slots, rows, *(() if scores is None else (y, scores)))
        return call("combine_rows", y, rows, scores)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        slots, rows, *weighted = ctx.saved_tensors
        y, scores = weighted or (None, None)
        dy = call("gather_rows", g, slots, scores, rows.shape[1])
        return dy, None, None, None if scores is None else call("dot_rows", g, y, rows)


class Permute(Function):
    """x[index] in forward, g[inverse] in backward; an index of -1, padding, makes zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return call("gather_rows", wait_for_collective(x), index)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return call("gather_rows", g, inverse), None, None


class Permutation(NamedTuple):
    """A permutation of S tokens that pads each expert's, to R rows, and its inverse."""

    tokens: Tensor
    """(R,) int32: the token at each place, -1 for padding."""
    places: Tensor
    """(S,) int32: the place of each token."""


def sort_by_expert(
    x: Tensor, counts: Tensor, ranks: int, alignment: int
) -> tuple[Tensor, Permutation, Tensor]:
    """Sorts the tokens x (S, dim), which come sorted by source rank, by local expert.

    Args:
        counts: (ranks · experts,) integers, the tokens from each rank for each expert, rank first.
        alignment: to whose multiples the tokens of each expert are padded.

    Returns:
        The rows (R, dim), the permutation for `sort_back`, and the padded group sizes (experts,),
        int32. R is the most that padding can lead to, as in torchtitan: the sum would need a sync.
    """
    permutation, sizes = permutation_by_expert(counts, ranks, x.shape[0], alignment)
    return Permute.call(x, *permutation), permutation, sizes


def permutation_by_expert(
    counts: Tensor, ranks: int, tokens: int, alignment: int
) -> tuple[Permutation, Tensor]:
    """The permutation of `sort_by_expert` for so many tokens, and the padded group sizes."""
    experts = counts.shape[0] // ranks
    length = round_up(tokens + experts * alignment, alignment)
    *indices, sizes = call("places_of_tokens", counts, experts, ranks, tokens, length, alignment)
    return Permutation(*indices), sizes


def sort_back(y: Tensor, permutation: Permutation) -> Tensor:
    """The inverse of `sort_by_expert`: rows y (R, dim) to tokens (S, dim)."""
    return Permute.call(y, permutation.places, permutation.tokens)


def rows_of_slots(slots: Tensor, scores: Tensor) -> Tensor:
    """`rows` (T, k) for `Expand` and `Combine`, from `slots` (R,) and the scores (T, k)."""
    return call("invert_index", slots, scores.numel()).view_as(scores)


def slots_by_expert(chosen: Tensor, experts: int) -> Tensor:
    """The slots of all tokens, sorted by expert; those of one expert keep their order.

    Args:
        chosen: (T, k) integers, the expert of each slot, below `experts`.

    Returns:
        The slots (T · k,) int64.
    """
    # A GPU sorts 8 bits in each pass over the keys, and a pass takes several launches.
    fits = (dtype for dtype in (torch.uint8, torch.int16) if experts <= torch.iinfo(dtype).max + 1)
    return chosen.flatten().to(next(fits, chosen.dtype)).argsort(stable=True)
