"""Permutations of token rows around the experts, in high precision, on any CUDA GPU.

Each token has k slots, one for each of its experts; slot s belongs to token ⌊s/k⌋. An index of -1,
or one out of range, stands for a row of zeros.
"""

import torch
from torch import Tensor

from titan_fp8.ops.operands import Accepted, Dim, M, R, T, fp32, high, integers
from titan_fp8.ops.quantize import new_scale
from titan_fp8.ops.registry import primitive

K, TOP = Dim("K"), Dim("k")
PARTS = Dim("ranks · experts", size=lambda sizes, *_: sizes["ranks"] * sizes["experts"])


@primitive(kernel="any GPU", x=high(M, K), slots=integers(R), weight=fp32(M, TOP))
def gather_rows(x: Tensor, slots: Tensor, weight: Tensor | None = None, k: int = 1) -> Tensor:
    """Row ⌊slots[r] / k⌋ of x (M, K) for each r, times its slot's weight: (R, K) in x's dtype.

    slots (R,) integers; weight (M, k) FP32 or None.
    """
    return x.new_empty(slots.shape[0], x.shape[1])


@primitive(kernel="any GPU", y=high(M, K), index=integers(T, TOP), weight=fp32(T, TOP))
def combine_rows(y: Tensor, index: Tensor, weight: Tensor | None = None) -> Tensor:
    """The sum over i of row index[t, i] of y (M, K), times weight[t, i]: (T, K) in y's dtype.

    index (T, k) integers; weight (T, k) FP32 or None. Summed in FP32, rounded once.
    """
    return y.new_empty(index.shape[0], y.shape[1])


@primitive(kernel="any GPU", a=high(T, K), b=high(M, K), index=integers(T, TOP))
def dot_rows(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    """The dot product of row t of a (T, K) and row index[t, i] of b (M, K): (T, k) FP32."""
    return new_scale(a, index.shape)


@primitive(kernel="none", index=Accepted((torch.int64,), (R,)))
def invert_index(index: Tensor, count: int) -> Tensor:
    """The position in `index` of each number below `count`, -1 if missing: (count,).

    index (R,) int64, in which no number occurs twice.
    """
    return index.new_empty(count)


@primitive(kernel="any GPU", counts=integers(PARTS))
def places_of_tokens(
    counts: Tensor, experts: int, ranks: int, tokens: int, length: int, alignment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The permutation that sorts tokens by expert and pads each expert's to `alignment`.

    counts (ranks · experts,) integers: the tokens from each rank for each expert, rank first, in
    the order of the tokens; `tokens` is their sum, `length` at least that of the padded sizes.
    Returns, all int32, the token at each place (length,), -1 for padding; the place of each token
    (tokens,); the padded size of each expert (experts,).
    """
    token_of_place = counts.new_empty(length, dtype=torch.int32)
    return token_of_place, token_of_place.new_empty(tokens), token_of_place.new_empty(experts)
