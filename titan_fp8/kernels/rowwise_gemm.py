"""The rowwise GEMMs: PyTorch's own, CUTLASS underneath, and what they leave to their caller.

`torch._scaled_mm` takes any dense product. `torch._scaled_grouped_mm` wants group ends within the
tensor. Groups of rows may end anywhere, for a row begins at a multiple of 16 bytes whatever its
number; groups of the transposed copies' columns begin at multiples of 128, as the quantisers lay
them out. What no group owns it does not write, and nothing says what it writes for an empty one: a
kernel that writes those alone zeroes the rows of no group and the dW of empty groups. No step waits
for the device.

fprop and dgrad accumulate in the tensor cores alone (`use_fast_accum`), in some 14 bits, which is
what makes rowwise fast. wgrad adds up all tokens of a batch and steers every later step, so there
the partial sums are promoted to FP32 on the way.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8.reference import BLOCK, group_bounds, round_up


def rowwise_mm(
    a_MK: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """fprop and dgrad: a (M, K) by b (N, K), or each group's rows by its own b of (E, N, K).

    A scale a row: sa (M,), sb (N,) or (E, N). Returns (M, N); rows of no group are zero. Groups may
    start at any row, so `aligned` is of no consequence here.
    """
    m, n = a_MK.shape[0], b.shape[-2]
    if m == 0:
        return a_MK.new_empty(m, n, dtype=out_dtype)
    if offs is None:
        return _scaled_mm(a_MK, sa, b, sb, out_dtype, fast=True)
    _, ends = group_bounds(offs, m)
    y = _scaled_grouped_mm(a_MK, sa, b, sb, ends, fast=True)
    _zero_behind[(triton.cdiv(m * n, 4096),)](y, ends, m * n, n, len(ends), BLOCK=4096)
    return y.to(out_dtype)


def rowwise_wgrad(
    a_NM: Tensor,
    sa: Tensor,
    b_KM: Tensor,
    sb: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """wgrad: the transposed copies a (N, Mt) by b (K, Mt), over all tokens or those of each group.

    A scale a row, or a row and group: sa (N,) or (E, N), sb (K,) or (E, K). Returns (N, K), or
    (E, N, K) with zeros for empty groups.
    """
    (n, width), k = a_NM.shape, b_KM.shape[0]
    if width == 0:
        lead = () if offs is None else (offs.shape[0],)
        return a_NM.new_zeros(*lead, n, k, dtype=out_dtype)
    if offs is None:
        return _scaled_mm(a_NM, sa, b_KM, sb, out_dtype, fast=False)
    starts, ends = group_bounds(offs, width)
    sizes = round_up(ends - starts, BLOCK)
    ends_laid = sizes.cumsum(0).clamp(max=width)
    dw = _scaled_grouped_mm(a_NM, sa.reshape(-1), b_KM, sb.reshape(-1), ends_laid, fast=False)
    grid = (triton.cdiv(n * k, 4096), len(ends))
    _zero_empty[grid](dw, ends_laid, n * k, BLOCK=4096)
    return dw.to(out_dtype)


def _scaled_mm(
    a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    scales = {"scale_a": sa[:, None], "scale_b": sb[None, :]}
    y = torch._scaled_mm(a, b.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return y.to(out_dtype)


def _scaled_grouped_mm(
    a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, ends: Tensor, fast: bool
) -> Tensor:
    return torch._scaled_grouped_mm(
        a, b.mT, sa, sb, offs=ends.int(), out_dtype=torch.bfloat16, use_fast_accum=fast
    )


@triton.jit
def _zero_behind(y_ptr, ends_ptr, size, N, E, BLOCK: tl.constexpr):
    """Zeroes the rows of y (M, N) behind the last group's end."""
    begin = tl.load(ends_ptr + E - 1) * N
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if first + BLOCK > begin:
        at = first + tl.arange(0, BLOCK)
        tl.store(
            y_ptr + at, tl.zeros([BLOCK], y_ptr.dtype.element_ty), mask=(at >= begin) & (at < size)
        )


@triton.jit
def _zero_empty(dw_ptr, ends_ptr, size, BLOCK: tl.constexpr):
    """Zeroes the dW of groups without tokens."""
    group = tl.program_id(1)
    begin = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    if tl.load(ends_ptr + group) == begin:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        base = dw_ptr + group.to(tl.int64) * size
        tl.store(base + at, tl.zeros([BLOCK], dw_ptr.dtype.element_ty), mask=at < size)
