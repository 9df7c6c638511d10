"""The ops as `torch.ops.titan_fp8.*`, for autograd, torch.compile and benchmarks.

Importing this package registers them. `registry.py` says how an op is defined; `quantize`, `gemm`,
and `permute` define them.
"""

from titan_fp8.ops import gemm, permute, quantize, sequence  # they define the ops
from titan_fp8.ops.operands import DTYPES
from titan_fp8.ops.registry import (
    OPS,
    call,
    implementation,
    is_observed,
    kernels_for,
    observe,
    run,
)
