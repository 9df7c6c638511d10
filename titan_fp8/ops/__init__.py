"""The ops as `torch.ops.titan_fp8.*`, for autograd, torch.compile and benchmarks.

Importing this package defines them. `registry.py` says how an op is defined; the other modules
define them: `quantize`, `gemm`, `swiglu`, `gathered`, `permute`. The backward of a product, which
depends on the recipe, is defined in `titan_fp8.gemms`.
"""

from titan_fp8.ops import gathered, gemm, permute, quantize, swiglu  # noqa: F401  (define the ops)
from titan_fp8.ops.registry import (
    DTYPES,
    NAMES,
    composite,
    direct,
    implementation,
    kernels_for,
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
    "overload_of",
    "replayable",
]
