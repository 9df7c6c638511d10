"""The ops as `torch.ops.titan_fp8.*`, for autograd, torch.compile and benchmarks.

Importing this package registers them. `registry.py` says how an op is defined. `quantize`, `gemm`,
`swiglu`, `gathered` and `permute` define the ops; only `product_backward`, which depends on the
recipe, is defined in `titan_fp8.gemms`.
"""

from titan_fp8.ops import gathered, gemm, permute, quantize, sequence, swiglu  # noqa: F401  (define the ops)
from titan_fp8.ops.operands import DTYPES
from titan_fp8.ops.registry import (
    NAMES,
    composite,
    direct,
    implementation,
    kernels_for,
    observe,
    overload_of,
    replayable,
)

__all__ = [
    "DTYPES",
    "NAMES",
    "composite",
    "direct",
    "implementation",
    "kernels_for",
    "observe",
    "overload_of",
    "replayable",
]
