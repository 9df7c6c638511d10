"""What the arms of a convergence experiment wrote on held-out text, and the statistics on it."""

import json
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from compare_loss import percent
from titan_logs import InputError

NEIGHBOURS = 2
"""Evaluations on either side whose spread counts."""


@dataclass(frozen=True)
class Evaluation:
    """One line of held_out.jsonl.

    Attributes:
        loss: in nats per token.
        accuracy: share of the tokens that were the most probable ones.
        load: (layers, experts), the share of the routed tokens times the number of experts, so that
            1 is balanced; (0,) for a dense model.
    """

    loss: float
    accuracy: float
    load: np.ndarray


HeldOut = dict[int, Evaluation]
"""The evaluations of an arm by step."""


def read_held_out(folder: Path) -> HeldOut:
    """The evaluations of an arm; of a step that was repeated after a restart, the last one.

    A last line that was cut short is skipped.

    Raises:
        InputError: another line is broken.
    """
    file = folder / "held_out.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else [""]
    found: HeldOut = {}
    for number, line in enumerate(lines[:-1], 1):
        try:
            entry = json.loads(line)
            counts = np.array(entry["experts"], dtype=float)
            if counts.size:
                counts *= counts.shape[-1] / counts.sum(-1, keepdims=True)
            found[entry["step"]] = Evaluation(entry["loss"], entry["accuracy"], counts)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file}, line {number}: {error!r}") from None
    return found


class Differences:
    """How the evaluations of one arm differ from those of another at given steps.

    Attributes:
        loss: in % of the other's loss.
        accuracy: in percentage points.
        load: the largest difference of any expert of any layer, in balanced shares.
    """

    def __init__(self, ours: HeldOut, theirs: HeldOut, steps: np.ndarray):
        pairs = [(ours[step], theirs[step]) for step in steps]
        losses = np.array([(a.loss, b.loss) for a, b in pairs]).T
        self.loss = percent(losses[0], losses[1])
        self.accuracy = np.array([100 * (a.accuracy - b.accuracy) for a, b in pairs])
        self.load = np.array([np.abs(a.load - b.load).max(initial=0.0) for a, b in pairs])


def spread(pairs: list[np.ndarray], tolerance: float, count: int) -> np.ndarray:
    """At each of `count` evaluations the tolerance or, if that is larger, the spread of bf16.

    Args:
        pairs: the differences of two bf16 arms each. An evaluation counts for its NEIGHBOURS, too:
            single differences are often small by chance.
    """
    bars = np.full(count, tolerance)
    for differences in pairs:
        own = np.nan_to_num(np.abs(differences), posinf=0.0)
        padded = np.pad(own, NEIGHBOURS)
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * NEIGHBOURS + 1)
        bars = np.maximum(bars, windows.max(-1))
    return bars


def mann_kendall(values: np.ndarray) -> float:
    """The probability of so few falling pairs or fewer, if all orders were equally likely.

    This is the exact one-sided test for a rising trend of Mann (Econometrica 13, 1945) and Kendall
    (Rank Correlation Methods, 1948). Equal values count as falling.
    """
    falling = sum(b <= a for a, b in combinations(values.tolist(), 2))
    # Shares of the orders of n values by their falling pairs. They follow from those of n - 1: the
    # last value has n places, at which it adds 0 to n - 1 falling pairs.
    shares = np.ones(1)
    for n in range(2, len(values) + 1):
        shares = np.convolve(shares, np.full(n, 1 / n))
    return min(1.0, float(shares[: falling + 1].sum()))


def drift(steps: np.ndarray, values: np.ndarray) -> float:
    """How far `values` move from the first step to the last: their median slope times the span.

    The median of the slopes of all pairs is the estimate of Sen (JASA 63, 1968).
    """
    pairs = combinations(zip(steps.tolist(), values.tolist()), 2)
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs]
    return float(np.median(slopes)) * float(steps[-1] - steps[0]) if slopes else 0.0
