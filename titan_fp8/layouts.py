"""Layouts of FP8 operands: transposed copies, groups of tokens, and scales in memory.

Every GEMM is NT: both operands have the contracted dimension last and contiguous, which is the only
form that Hopper's FP8 tensor cores take. Activations and gradients (M tokens by K channels) are
contracted along both dimensions, so they have two layouts:

    rows         q (M, K), as the tensor itself; scales along K
    columns _t   q (K, Mt), transposed; scales along the tokens

In the transposed copy each group of tokens (the tokens of one expert) starts at a multiple of 128,
so no block mixes tokens of two experts. Columns without a token are zero. If the caller knows that
every group ends at a multiple of 128 (`aligned=True`), or if there are no groups (`offs=None`),
token m is in column m and Mt is M rounded up to 128 (for rowwise scales without groups: to 16).
Otherwise Mt = ⌊(M + 127 E) / 128⌋ · 128, which fits any E groups and does not depend on their
sizes.

1x128 scales are (rows, blocks) with stride 1 along the rows; in memory the number of rows is padded
to a multiple of 4, because TMA needs strides of 16 bytes (cuBLAS uses the same layout). 128x128
scales are (..., row blocks, column blocks) with stride 1 along the columns, padded to a multiple of
4 in the same way.

`offs` (E,) int32 holds the end of each group in tokens, non-decreasing; an end beyond M counts as
M. Tokens past the last end belong to no group: their outputs are zero, and no output depends on
their values.
"""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
BLOCK = 128
"""Elements that share a scale along a dimension; the token alignment of groups."""
ROW_ALIGNMENT = 16
"""Token alignment of the rowwise recipe without groups: 16 bytes of FP8."""


def cdiv(a: int, b: int) -> int:
    return (a + b - 1) // b


def round_up(a: int, b: int) -> int:
    return cdiv(a, b) * b


def power_of_two(n: int) -> int:
    """The least power of two that is not below n > 0. Triton's function takes 2 us."""
    return 1 << (n - 1).bit_length()


def transposed_width(m: int, offs: Tensor | None, aligned: bool, alignment: int) -> int:
    """Mt, the token columns of a transposed copy of M tokens (see the top of this file).

    `alignment` is that of a copy without groups: BLOCK or ROW_ALIGNMENT.
    """
    if offs is None:
        return round_up(m, alignment)
    return round_up(m, BLOCK) if aligned else (m + (BLOCK - 1) * offs.shape[0]) // BLOCK * BLOCK


def group_bounds(offs: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """First row and end row (E,) of each group, within [0, m] whatever `offs` holds."""
    ends = offs.long().clamp(0, m).cummax(0).values
    return torch.cat([ends.new_zeros(1), ends[:-1]]), ends


def column_starts(starts: Tensor, ends: Tensor, aligned: bool) -> Tensor:
    """First column (E,) of each group in a transposed copy."""
    if aligned:
        return starts
    widths = (ends - starts + BLOCK - 1) // BLOCK * BLOCK
    return widths.cumsum(0) - widths


def pad_groups(
    x_MK: Tensor, offs: Tensor | None, aligned: bool, alignment: int
) -> tuple[Tensor, Tensor | None]:
    """The tokens x (M, K), padded like the columns of a transposed copy, but not yet transposed.

    Returns:
        The padded tokens (Mt, K), zero where there is no token; and the group (Mt,) of each row, E
        where there is no token. The second is None without groups.
    """
    m = x_MK.shape[0]
    width = transposed_width(m, offs, aligned, alignment)
    if offs is None:
        return torch.nn.functional.pad(x_MK, (0, 0, 0, width - m)), None
    starts, ends = group_bounds(offs, m)
    firsts = column_starts(starts, ends, aligned)
    column = torch.arange(width, device=x_MK.device)
    group = torch.searchsorted(firsts, column, right=True) - 1
    token = starts[group] + column - firsts[group]
    filled = token < ends[group]
    if m == 0:
        return x_MK.new_zeros(width, x_MK.shape[1]), torch.full_like(group, offs.shape[0])
    padded = torch.where(filled[:, None], x_MK[token.clamp(max=m - 1)], 0)
    return padded, torch.where(filled, group, offs.shape[0])


def pad_blocks(x: Tensor, *dims: int) -> Tensor:
    """`x`, padded with zeros at the end of each of `dims` (negative) to a multiple of 128."""
    padding = [0] * (2 * x.dim())
    for dim in dims:
        padding[2 * (-1 - dim) + 1] = -x.shape[dim] % BLOCK
    return torch.nn.functional.pad(x, padding)


def to_layout_1x128(s: Tensor) -> Tensor:
    """A copy of scales (rows, blocks) in the layout of 1x128 scales."""
    return to_layout_128x128(s.t()).t()


def to_layout_128x128(s: Tensor) -> Tensor:
    """A copy of scales (..., row blocks, column blocks) in the layout of 128x128 scales."""
    storage = s.new_zeros(*s.shape[:-1], round_up(s.shape[-1], 4))
    storage[..., : s.shape[-1]] = s
    return storage[..., : s.shape[-1]]


def zero_padding(q_KM: Tensor, m: int, offs: Tensor | None, group: Tensor | None) -> Tensor:
    """q (K, Mt) with zeros in the columns without a token, even where their scale is NaN.

    `group` is from `pad_groups`.
    """
    if offs is None or group is None:
        is_padding = torch.arange(q_KM.shape[1], device=q_KM.device).ge(m)
    else:
        is_padding = group.eq(offs.shape[0])
    # As bytes, because few ops support FP8.
    return q_KM.view(torch.uint8).masked_fill(is_padding, 0).view(E4M3)


def column_slices(q_KM: Tensor, offs: Tensor | None, aligned: bool) -> list[slice]:
    """The columns of each group in a transposed copy.

    M is not known here, so group ends are clamped to the width of the copy instead. That makes no
    difference: the columns that a group may get by it hold no token.
    """
    width = q_KM.shape[1]
    if offs is None:
        return [slice(0, width)]
    starts, ends = group_bounds(offs, width)
    firsts = column_starts(starts, ends, aligned)
    sizes = (ends - starts).tolist()
    return [
        slice(first, min(first + round_up(size, BLOCK), width))
        for first, size in zip(firsts.tolist(), sizes, strict=True)
    ]
