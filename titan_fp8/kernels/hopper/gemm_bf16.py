"""wgrad in bf16, for `rowwise_with_gw_hp`: PyTorch's own GEMMs."""

import torch
from torch import Tensor

from titan_fp8.layouts import group_bounds


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
    # torch._grouped_mm does not define the product of an empty group.
    return torch.where((ends > starts)[:, None, None], dw, 0).to(out_dtype)


def _on_16_bytes(x: Tensor) -> Tensor:
    """x, contiguous; copied if its address is no multiple of 16, which torch._grouped_mm needs."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
