"""wgrad in bf16, for `rowwise_with_gw_hp`: PyTorch's own GEMMs.

torch._grouped_mm does not define the product of an empty group, so a kernel writes its zeros.
"""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.launch import kernel
from titan_fp8.layouts import cdiv, group_bounds

WARPS = 4
CHUNK = 16 * 32 * WARPS
"""int32 words that a program writes at a time: four 16-byte stores per thread."""
LAYOUT = gl.BlockedLayout([4], [32], [WARPS], [0])
PROGRAMS = 64
"""Programs per matrix. Those of groups with rows return without an access to the matrix."""


@kernel()
def zero_empty_groups_kernel(
    dw, starts, ends, words4, programs, CHUNK: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Zeroes the matrices of dw (E, 4 words4), in int32, whose groups have no rows."""
    group = gl.program_id(1)
    words = words4 * 4  # The compiler sees that stores of 16 bytes are aligned.
    empty = gl.load(starts + group) == gl.load(ends + group)
    end = gl.where(empty, words, 0)
    matrix = dw + group.to(gl.int64) * words
    zeros = gl.full([CHUNK], 0, gl.int32, LAYOUT)
    for first in range(gl.program_id(0) * CHUNK, end, programs * CHUNK):
        i = first + gl.arange(0, CHUNK, LAYOUT)
        gl.store(matrix + i, zeros, mask=i < end)


def bf16_wgrad(
    g: Tensor,
    x: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """gᵀ x of bf16 g (M, N) and x (M, K): (N, K), with groups (E, N, K); see `reference.py`.

    The tensor cores accumulate bf16 products in FP32: only FP8 has fast and slow accumulation.
    Groups may start at any row, so `aligned` makes no difference.
    """
    if offs is None:
        return torch.mm(g.t(), x, out_dtype=out_dtype)
    if not x.shape[0]:
        return x.new_zeros(len(offs), g.shape[1], x.shape[1], dtype=out_dtype)
    starts, ends = group_bounds(offs, x.shape[0])
    dw = torch._grouped_mm(_on_16_bytes(g).t(), _on_16_bytes(x), offs=ends.int())
    words = g.shape[1] * x.shape[1] // 2
    programs = min(cdiv(words, CHUNK), PROGRAMS)
    zero_empty_groups_kernel[programs, len(offs)](
        (dw, torch.int32), starts, ends, words // 4, programs, CHUNK, LAYOUT, num_warps=WARPS
    )
    return dw.to(out_dtype)


def _on_16_bytes(x: Tensor) -> Tensor:
    """x, contiguous; copied if its address is no multiple of 16, which torch._grouped_mm needs."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
