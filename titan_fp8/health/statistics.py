"""What quantizing an operand did to its values, and how far its scales spread.

Shares and errors are of elements: those that became zero, those at the largest value of e4m3, and
the squared error of q · s. Scales are counted and compared as blocks. Every statistic is a sum, a
maximum or a minimum, so those of several operands, micro-batches and ranks can be combined.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from titan_fp8.layouts import BLOCK
from titan_fp8.reference import AMAX_MIN, E4M3_MAX

EMPTY_SCALE = 2 * AMAX_MIN / E4M3_MAX
"""Blocks of zeros have at most this scale: that of AMAX_MIN, rounded up to a power of two."""


class Stat(IntEnum):
    """The columns of a table of statistics."""

    NONZERO = 0
    """Elements that are not zero, in blocks whose scale is finite; the next two are of these."""
    UNDERFLOW = 1
    """Elements that became zero."""
    AT_MAX = 2
    """Elements that became 448 or -448."""
    ERROR = 3
    """The sum of the squares of q · s - x."""
    SQUARES = 4
    """The sum of the squares of x."""
    BLOCKS = 5
    NON_FINITE = 6
    """Blocks whose scale is NaN or Inf, because one of their elements is."""
    LOG2_MAX = 7
    """log2 of the largest finite scale; -inf if every block is empty. Combined by maximum."""
    LOG2_MIN = 8
    """-log2 of the smallest scale of a block that is not all zero. Combined by maximum."""


SUMS = slice(Stat.NONZERO, Stat.LOG2_MAX)
MAXIMA = slice(Stat.LOG2_MAX, Stat.LOG2_MIN + 1)


def element_statistics(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    """The statistics NONZERO to SQUARES of n operands of one shape.

    Args:
        x: (n, R, C), what was quantized, bfloat16 or float32.
        q: (n, R, C), float8_e4m3fn.
        s: the scales of q, float32. The shape says what each is for: (n, R, 1) for a row,
            (n, R, ⌈C/128⌉) for each 128 elements of a row, (n, 1, C) for a column, (n, R, C) for
            one element. Elements whose scale is not finite, or is zero, count nowhere.

    Returns:
        (n, 5) float64.
    """
    s = s.nan_to_num(0, 0, 0)  # as no scale of a block can be
    # Squares of gradients may be too small for FP32, those of multiples of a scale are not.
    unit = s.amax((1, 2), keepdim=True)
    zero = s.new_zeros(())  # for each number that `where` is given PyTorch would launch a kernel
    inverse = torch.where(unit > 0, 1 / unit, zero)
    s = s * inverse
    if s.shape[-1] not in (1, x.shape[-1]):
        s = s.repeat_interleave(BLOCK, -1)[..., : x.shape[-1]]
    finite = s > 0
    x = torch.where(finite, x, zero)
    q = torch.where(finite, q.float(), zero)
    nonzero = x != 0
    x = x * inverse
    counts = nonzero, nonzero & (q == 0), q.abs() == E4M3_MAX
    squares = torch.addcmul(-x, q, s).square(), x.square()
    columns = (
        *(each.sum((1, 2), dtype=torch.float64) for each in counts),
        *(each.sum((1, 2)) * unit.flatten().double() ** 2 for each in squares),
    )
    return torch.stack(columns, 1)


def scale_statistics(s: Tensor, counts: Sequence[int]) -> Tensor:
    """The statistics BLOCKS to LOG2_MIN of the scales of n operands.

    Args:
        s: float32, all scales of one operand after those of the other. A zero is no scale: it
            marks a block that belongs to no token.
        counts: how many each of the n operands has, at least 1.

    Returns:
        (n, 4) float32.
    """
    lengths = torch.tensor(counts)
    if s.is_cuda:
        lengths = lengths.pin_memory().to(s.device, non_blocking=True)

    def reduced(values: Tensor, by: str) -> Tensor:
        # It is "unsafe" not to wait for the device to check the lengths.
        return torch.segment_reduce(values.float(), by, lengths=lengths, unsafe=True)

    used = (s > EMPTY_SCALE) & (s < torch.inf)
    columns = (
        reduced(s != 0, "sum"),
        reduced(~s.isfinite(), "sum"),
        reduced(torch.where(used, s, 0), "max").log2(),
        -reduced(torch.where(used, s, torch.inf), "min").log2(),
    )
    return torch.stack(columns, 1)
