"""Takes the same tokens from x and from its FP8 copies, along its rows and along its columns.

Samples and scales are copied, since compiled code reuses the memory of a tensor that it no longer
needs. Their statistics are computed for many at a time, since otherwise launching the operations
would take longer than running them; `PENDING_BYTES` bounds how many wait.
"""

import functools
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from titan_fp8.health.statistics import Stat, element_statistics, scale_statistics
from titan_fp8.layouts import BLOCK, E4M3, column_starts, group_bounds

PENDING_BYTES = 1 << 27


def _sampled_rows(count: int, phase: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Up to `count` indices among `size`, int64, ascending, and the blocks that they are in."""
    stride = max(1, size // count)
    rows = torch.arange(phase % stride, size, stride, device=device)[:count]
    return rows, rows // BLOCK


def _sampled_of_weight(
    sampled_rows: Any, experts: int, rows: int, first_row: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Of sampled rows of (experts, rows, ...): the expert, the row, that of the weight, its block.

    The weight may have rows before these, up to `first_row`.
    """
    sampled, _ = sampled_rows(experts * rows, device)
    row = sampled % rows
    return sampled // rows, row, row + first_row, (row + first_row) // BLOCK


class Sampler:
    """Takes samples of `rows` tokens, or rows of a weight, and computes their statistics.

    The samples are evenly spaced; `phase` shifts them. Each is known by its number, from 0 on.
    """

    def __init__(self, rows: int, phase: int = 0):
        # Many samples share indices, and each op that makes them is a launch.
        self._rows = functools.cache(functools.partial(_sampled_rows, rows, phase))
        self._rows_of_weight = functools.cache(functools.partial(_sampled_of_weight, self._rows))
        self._count = self._pending = 0
        self._elements: dict[Any, list[tuple[int, tuple[Tensor, ...]]]] = defaultdict(list)
        self._scales: list[Tensor] = []
        self._of_elements: dict[int, Tensor] = {}
        self._of_scales: list[Tensor] = []

    def sampled(self, x: Tensor) -> Tensor:
        """The sampled rows of x (M, K)."""
        return x[self._rows(len(x), x.device)[0]]

    # The samples of each layout

    def take_rows(self, x: Tensor, call: Any, q: Tensor, s: Tensor) -> int:
        """Samples a quantizer's `call` (`watch.py`): q (M, K), s (M, ⌈K/128⌉) or (M,).

        x are the sampled rows alone of what it has quantized.
        """
        tokens, _ = self._rows(len(q), q.device)
        s = s.view(len(q), -1)
        if (offs := getattr(call, "offs", None)) is not None:  # Rows past its end do not count.
            s = torch.where(torch.arange(len(q), device=q.device)[:, None] < offs[-1], s, 0)
        return self._add(x, q.view(torch.uint8)[tokens], s[tokens], s)

    def take_columns(self, x: Tensor, call: Any, q: Tensor, s: Tensor) -> int:
        """The same along its columns: q (K, Mt); s (K, Mt/128) or, rowwise, (K,) or (E, K)."""
        size, offs = len(call.first), call.offs
        tokens, blocks = self._rows(size, q.device)
        columns, group = tokens, None
        if offs is not None:
            starts, ends = group_bounds(offs, size)
            group = torch.searchsorted(ends, tokens, right=True).clamp(max=len(ends) - 1)
            columns = column_starts(starts, ends, call.aligned)[group] + tokens - starts[group]
            columns = columns.clamp(max=q.shape[1] - 1)  # of tokens past the last end
            blocks = columns // BLOCK
        sampled = s[:, blocks].mT if call.blockwise else s[group]
        if offs is not None:
            sampled = torch.where((tokens < ends[-1])[:, None], sampled, 0)
        return self._add(x, q.view(torch.uint8)[:, columns].mT, sampled, s)

    def take_weight(
        self,
        w: Tensor,
        q: Tensor,
        s: Tensor,
        first_row: int = 0,
        dtype: torch.dtype | None = None,
    ) -> int:
        """Samples rows of a quantized weight w (R, C) or (E, R, C), a transposed view or a shard.

        q has w's shape, that of a shard maybe more rows; s (..., ⌈R/128⌉, ⌈C/128⌉) or (..., R),
        where R are the rows of the whole weight, in which a shard begins at `first_row`. w was cast
        to `dtype` before it was quantized.
        """
        if w.dim() == 2:
            w, q, s = w[None], q[None], s[None]
        expert, row, whole_row, block = self._rows_of_weight(*w.shape[:2], first_row, w.device)
        sampled = s[expert, whole_row][:, None] if s.dim() == 2 else s[expert, block]
        x = w[expert, row].to(dtype or w.dtype)
        return self._add(x, q.view(torch.uint8)[expert, row], sampled, s)

    # Their statistics

    def _add(self, x: Tensor, q: Tensor, sampled: Tensor, s: Tensor) -> int:
        """Adds a sample: x (R, C), its bytes of e4m3 q and their scales, and all scales s."""
        tensors = x, q, sampled
        key = x.dtype, *(t.shape for t in tensors)
        self._elements[key].append((self._count, tensors))
        self._scales.append(s.clone(memory_format=torch.contiguous_format).flatten())
        self._pending += sum(t.numel() * t.element_size() for t in (*tensors, s))
        if self._pending > PENDING_BYTES:
            self._compute()
        self._count += 1
        return self._count - 1

    def _compute(self) -> None:
        """The statistics of all samples that wait."""
        for samples in self._elements.values():
            numbers, tensors = zip(*samples)
            x, q, s = map(torch.stack, zip(*tensors))
            self._of_elements |= zip(numbers, element_statistics(x, q.view(E4M3), s))
        self._elements.clear()
        if self._scales:
            counts, scales = [len(s) for s in self._scales], torch.cat(self._scales)
            self._scales.clear()  # Frees their memory.
            self._of_scales.append(scale_statistics(scales, counts))
        self._pending = 0

    def results(self) -> Tensor:
        """The statistics (samples, Stat), float64, on the CPU; waits for the device."""
        self._compute()
        if not self._count:
            return torch.zeros(0, len(Stat), dtype=torch.float64)
        elements = torch.stack([self._of_elements[number] for number in range(self._count)])
        return torch.cat([elements, torch.cat(self._of_scales)], 1).cpu()
