"""wgrad in bf16, for `rowwise_with_gw_hp`: PyTorch's own GEMMs around the layout of the groups."""

import torch
from torch import Tensor

from titan_fp8.reference import ROW_ALIGNMENT, column_starts, group_bounds, lay_out


def bf16_wgrad(
    g: Tensor,
    x: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """gᵀ x of bf16 g (M, N) and x (M, K): (N, K), with groups (E, N, K); see `reference.py`."""
    if offs is None:
        return torch.mm(g.t(), x, out_dtype=out_dtype)
    starts, ends = group_bounds(offs, x.shape[0])
    if not aligned:
        (g, _), (x, _) = (lay_out(t, offs, False, ROW_ALIGNMENT) for t in (g, x))
        firsts = column_starts(starts, ends, False, ROW_ALIGNMENT)
        ends = firsts + (ends - starts + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT
    dw = torch._grouped_mm(g.t(), x, offs=ends.int())
    # Nothing says what an empty group's product holds.
    return torch.where((offs.diff(prepend=offs.new_zeros(1)) > 0)[:, None, None], dw, 0).to(
        out_dtype
    )
