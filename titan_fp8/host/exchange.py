"""How tokens travel in FP8 to the ranks of their experts and back: what every `Exchange` offers.

docs/exchange.md explains it. `PeerExchange` (`peer_exchange.py`) writes to the memory of the other
GPUs of a host. `AllToAllExchange` (`all_to_all.py`) runs on any devices and hosts. Outside of this
protocol PeerExchange also moves tokens and rows in high precision.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor


class Arrived(NamedTuple):
    """Tokens in FP8 that have come to this rank, and which of them its experts get."""

    q: Tensor  # (R, K) FP8
    s: Tensor  # (R, ⌈K/128⌉)
    slots: Tensor  # (C,) int32: row c of the experts is row ⌊slots[c] / k⌋; negative for padding
    weight: Tensor  # (C,) FP32: the scores of the experts' rows
    k: int


@dataclass(eq=False)
class Plan:
    """Where the copies of a batch's tokens go, and what arrives."""

    rows: Tensor  # (T, k) integers: the row of each copy in what returns, -1 for none
    ends: Tensor  # (local experts,) int32: of the padded groups that arrive


PlanT = TypeVar("PlanT", bound=Plan)


class Exchange(Protocol[PlanT]):
    """A rank's part of the exchange within a group.

    The calls for a batch are `plan`, `arrive`, `deliver`, and for its backward `arrive`, `deliver`
    with its plan. Other batches may come before the backward. All ranks make the same calls, on one
    stream each. Kernels that read what they return are launched before the next call.
    """

    def plan(self, order: Tensor, chosen: Tensor, counts: Tensor, slots: Tensor) -> PlanT:
        """Exchanges the counts of a batch, and computes where its copies go.

        Args:
            order: (T, k) integers: where each copy is among those of this rank, sorted by expert;
                -1 for a copy that another rank sends.
            chosen: (T, k) integers: the expert of each copy.
            counts: (experts,) integers: this rank's copies for each expert.
            slots: (R,) integers, the inverse of `order`.
        """

    def arrive(self, q: Tensor, s: Tensor, scores: Tensor, plan: PlanT) -> Arrived:
        """What comes to this rank's experts of all ranks' tokens.

        Args:
            q, s: (T, dim) and (T, ⌈dim/128⌉), as quantize_1x128 returns them.
            scores: (T, k) FP32, which become the weights of rows.
        """

    def deliver(
        self, y: Tensor, plan: PlanT, scores: Tensor | None, dscores: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the experts' rows to the owners of the tokens, those of a rank as one sum.

        Args:
            y: (C, dim), of the rows that have arrived last.
            scores: (T, k) FP32, with which they have arrived, as factors; None for sums without.
            dscores: (C,) FP32, which return as they are; or None.

        Returns:
            The sums, each in the row of its first copy; dscores (T, k), 0 if not sent, or None.
        """
