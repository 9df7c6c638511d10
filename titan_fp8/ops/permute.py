"""Permutations of token rows around the experts, in high precision, on any CUDA GPU.

Each token has k slots, one for each of its experts; slot s belongs to token ⌊s/k⌋. An index of -1,
or one out of range, stands for a row of zeros. `reference.py` says what each op computes.
"""

from typing import Any

import torch
from torch import Tensor

from titan_fp8 import reference
from titan_fp8.ops.operands import Accepted, Dim, M, R, T, fp32, high, integers
from titan_fp8.ops.quantize import new_scale
from titan_fp8.ops.registry import primitive

K, TOP = Dim("K"), Dim("k")
PARTS = Dim("ranks · experts", size=lambda sizes, *_: sizes["ranks"] * sizes["experts"])


def _places(c: Any) -> tuple[Tensor, ...]:
    sizes = c.length, c.tokens, c.experts
    return tuple([c.counts.new_empty(size, dtype=torch.int32) for size in sizes])


primitive(
    reference.gather_rows,
    lambda c: c.x.new_empty(c.slots.shape[0], c.x.shape[1]),
    kernel="any GPU",
    x=high(M, K),
    slots=integers(R),
    weight=fp32(M, TOP),
)
primitive(
    reference.combine_rows,
    lambda c: c.y.new_empty(c.index.shape[0], c.y.shape[1]),
    kernel="any GPU",
    y=high(M, K),
    index=integers(T, TOP),
    weight=fp32(T, TOP),
)
primitive(
    reference.dot_rows,
    lambda c: new_scale(c.a, *c.index.shape),
    kernel="any GPU",
    a=high(T, K),
    b=high(M, K),
    index=integers(T, TOP),
)
primitive(
    reference.invert_index,
    lambda c: c.index.new_empty(c.count),
    kernel="none",
    index=Accepted((torch.int64,), (R,)),
)
primitive(reference.places_of_tokens, _places, kernel="any GPU", counts=integers(PARTS))
