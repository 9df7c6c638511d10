"""Permutations of token rows around the experts, in high precision, on any CUDA GPU.

Each token has k slots, one for each of its experts; slot s belongs to token ⌊s/k⌋. An index of -1,
or one out of range, stands for a row of zeros. `reference.py` says what each op computes.
"""

from titan_fp8 import reference
from titan_fp8.ops.operands import Dim, M, R, T, fp32, high, int64, integers
from titan_fp8.ops.registry import primitive

K, TOP = Dim("K"), Dim("k")
PARTS = Dim("ranks · experts", size=lambda call: call["ranks"] * call["experts"])
_LENGTH, _TOKENS, _EXPERTS = (integers(Dim(name)) for name in ("length", "tokens", "experts"))

primitive(
    reference.gather_rows,
    high(R, K, as_first=True),
    kernels="any GPU",
    x=high(M, K),
    slots=integers(R),
    weight=fp32(M, TOP),
)
primitive(
    reference.combine_rows,
    high(T, K, as_first=True),
    kernels="any GPU",
    y=high(M, K),
    index=integers(T, TOP),
    weight=fp32(T, TOP),
)
primitive(
    reference.dot_rows,
    fp32(T, TOP),
    kernels="any GPU",
    a=high(T, K),
    b=high(M, K),
    index=integers(T, TOP),
)
primitive(reference.invert_index, int64(Dim("count")), kernels="none", index=int64(R))
primitive(
    reference.places_of_tokens,
    _LENGTH,
    _TOKENS,
    _EXPERTS,
    kernels="any GPU",
    counts=integers(PARTS),
)
