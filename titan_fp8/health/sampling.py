"""Takes the same tokens from x and from its FP8 copies, along its rows and along its columns.

Samples and scales are copied, since compiled code reuses the memory of a tensor that it no longer
needs. Their statistics are computed for many of one shape at a time, since otherwise launching the
operations would take longer than running them; `PENDING_BYTES` bounds how many wait.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_fp8.health.statistics import element_statistics, scale_statistics
from titan_fp8.layouts import BLOCK, E4M3, column_starts, group_bounds

PENDING_BYTES = 1 << 27


@dataclass
class Sample:
    """A sample of the operand that is at `address`; its results are in row `position`."""

    address: int
    position: int


class Sampler:
    """Takes samples of `rows` tokens, or rows of a weight, and computes their statistics.

    The samples are evenly spaced; `phase` shifts them.
    """

    def __init__(self, rows: int, phase: int = 0):
        self.rows, self.phase = rows, phase
        self.count = 0
        self._indices: dict[Hashable, tuple[Tensor, ...]] = {}
        self._elements: dict[Any, list[tuple[int, tuple[Tensor, ...]]]] = defaultdict(list)
        self._scales: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        self._pending = 0
        self._positions: tuple[list[int], list[int]] = ([], [])
        self._results: tuple[list[Tensor], list[Tensor]] = ([], [])

    def _cached(self, key: Hashable, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Indices that many samples share: each op that makes them is a launch."""
        if key not in self._indices:
            self._indices[key] = make()
        return self._indices[key]

    def sampled_rows(self, size: int, device: torch.device) -> Tensor:
        """The indices of the sampled ones among `size` tokens or rows; int64, ascending."""
        return self._sampled_rows_and_blocks(size, device)[0]

    def _sampled_rows_and_blocks(self, size: int, device: torch.device) -> tuple[Tensor, ...]:
        """The indices of the sampled rows, and of the blocks of 128 rows that they are in."""

        def make() -> tuple[Tensor, ...]:
            stride = max(1, size // self.rows)
            first = self.phase % stride
            rows = torch.arange(first, size, stride, device=device)[: self.rows]
            return rows, rows // BLOCK

        return self._cached((size, device), make)

    def sampled_rows_of_experts(
        self, experts: int, rows: int, device: torch.device
    ) -> tuple[Tensor, ...]:
        """The sampled rows of (experts, rows, ...): the indices of their experts, and in these."""

        def make() -> tuple[Tensor, ...]:
            sampled = self.sampled_rows(experts * rows, device)
            return sampled // rows, sampled % rows

        return self._cached((experts, rows, device), make)

    # The samples of each layout

    def take_rows(self, x: Tensor, q: Tensor, s: Tensor, offs: Tensor | None = None) -> Sample:
        """Samples x (M, K) quantized along its rows: q (M, K), s (M, ⌈K/128⌉) or (M,).

        Args:
            x: the sampled rows alone.
            offs: rows past its last end count nowhere.
        """
        tokens = self.sampled_rows(len(q), q.device)
        s = s.view(len(q), -1)
        sampled = s[tokens]
        if offs is not None:
            inside = torch.arange(len(q), device=q.device) < offs[-1]
            s = torch.where(inside[:, None], s, 0)
            sampled = torch.where(inside[tokens, None], sampled, torch.nan)
        return self.add(q, x, q.view(torch.uint8)[tokens], sampled, s)

    def take_columns(
        self,
        x: Tensor,
        size: int,
        q: Tensor,
        s: Tensor,
        offs: Tensor | None,
        aligned: bool,
        blockwise: bool,
    ) -> Sample:
        """Samples x (M, K) quantized along its columns.

        q (K, Mt); s (K, Mt/128) or, rowwise, (K,) or (E, K).

        Args:
            x: the sampled rows alone.
            size: M.
        """
        columns, blocks = self._sampled_rows_and_blocks(size, q.device)
        group = inside = None
        if offs is not None:
            tokens = columns
            starts, ends = group_bounds(offs, size)
            inside = (tokens < ends[-1])[:, None]
            group = torch.searchsorted(ends, tokens, right=True).clamp(max=len(ends) - 1)
            firsts = column_starts(starts, ends, aligned)
            columns = torch.where(inside[:, 0], firsts[group] + tokens - starts[group], 0)
            blocks = columns // BLOCK
        if blockwise:
            sampled = s[:, blocks].mT
        elif group is None:
            sampled = s[None]
        else:
            sampled = s[group]
        if inside is not None:
            sampled = torch.where(inside, sampled, torch.nan)
        return self.add(q, x, q.view(torch.uint8)[:, columns].mT, sampled, s)

    def take_weight(self, w: Tensor, q: Tensor, s: Tensor) -> Sample:
        """Samples rows of a quantized weight w (R, C) or (E, R, C), which may be a transposed view.

        q has w's shape and is contiguous; s (..., ⌈R/128⌉, ⌈C/128⌉) or (..., R).
        """
        by_row = s.shape == w.shape[:-1]
        if w.dim() == 2:
            rows, blocks = self._sampled_rows_and_blocks(len(w), w.device)
            sampled = s[rows][:, None] if by_row else s[blocks]
            return self.add(q, w[rows], q.view(torch.uint8)[rows], sampled, s)
        expert, row = self.sampled_rows_of_experts(w.shape[0], w.shape[1], w.device)
        sampled = s[expert, row][:, None] if by_row else s[expert, row // BLOCK]
        return self.add(q, w[expert, row], q.view(torch.uint8)[expert, row], sampled, s)

    # Their statistics

    def add(self, operand: Tensor, x: Tensor, q: Tensor, sampled: Tensor, s: Tensor) -> Sample:
        """Adds a sample of an operand that is in memory at `operand`.

        Args:
            x: (R, C), what was quantized.
            q: (R, C), the bytes of e4m3.
            sampled: the scales of q, as `element_statistics` takes them.
            s: all scales of the operand.
        """
        sample = Sample(operand.data_ptr(), self.count)
        tensors = x, q, sampled
        key = *(t.shape for t in tensors), x.dtype
        self._elements[key].append((self.count, tensors))
        s = s.clone(memory_format=torch.contiguous_format).flatten()
        self._scales[s.numel()].append((self.count, s))
        self.count += 1
        self._pending += sum(t.numel() * t.element_size() for t in (*tensors, s))
        if self._pending > PENDING_BYTES:
            self._compute()
        return sample

    def _compute(self) -> None:
        """The statistics of all samples that wait."""
        for samples in self._elements.values():
            positions, tensors = zip(*samples)
            x, q, s = map(torch.stack, zip(*tensors))
            self._keep(0, positions, element_statistics(x, q.view(E4M3), s))
        for scales in self._of_like_size():
            positions, tensors = zip(*scales)
            self._keep(1, positions, scale_statistics(tensors))
        self._elements.clear()
        self._scales.clear()
        self._pending = 0

    def _of_like_size(self) -> list[list[tuple[int, Tensor]]]:
        """The scales that wait; those of a size that only one sample has go with similar ones."""
        groups = [scales for scales in self._scales.values() if len(scales) > 1]
        similar: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        for size, scales in self._scales.items():
            if len(scales) == 1:
                similar[size.bit_length()] += scales
        return groups + list(similar.values())

    def _keep(self, kind: int, positions: Sequence[int], results: Tensor) -> None:
        self._positions[kind].extend(positions)
        self._results[kind].append(results)

    def results(self) -> tuple[Tensor, Tensor]:
        """What the functions of `statistics.py` return, a row for each sample, in order."""
        self._compute()
        if not self.count:
            return torch.zeros(0, 6), torch.zeros(0, 4)
        elements, scales = (
            torch.cat(results)[torch.tensor(positions).argsort().to(results[0].device)]
            for positions, results in zip(self._positions, self._results)
        )
        return elements, scales
