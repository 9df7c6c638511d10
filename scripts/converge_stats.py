"""What the arms of a convergence experiment wrote on held-out text, and the statistics on it."""

import json
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
from compare_loss import percent
from titan_logs import InputError

LEVEL = 0.05
"""The probability that an arm which varies like bf16 exceeds what it may."""
NEIGHBORS = 2
"""Evaluations on either side whose differences count."""


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


HELD_OUT = "held_out.jsonl"
HeldOut = dict[int, Evaluation]
"""The evaluations of an arm by step."""


def read_held_out(folder: Path) -> HeldOut:
    """The evaluations of an arm; of a step that was repeated after a restart, the last one.

    A last line that was cut short is skipped.

    Raises:
        InputError: another line is broken.
    """
    file = folder / HELD_OUT
    lines = file.read_bytes().split(b"\n") if file.exists() else [b""]
    found: HeldOut = {}
    for number, line in enumerate(lines[:-1], 1):
        try:
            entry = json.loads(line)
            counts = np.array(entry["experts"], dtype=float)
            if counts.ndim != 2 and entry["experts"] != []:
                raise ValueError(f"experts must be a list for each layer, not {entry['experts']!r}")
            if counts.size:
                counts *= counts.shape[-1] / counts.sum(-1, keepdims=True)
            loss, accuracy = float(entry["loss"]), float(entry["accuracy"])
            found[int(entry["step"])] = Evaluation(loss, accuracy, counts)
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


def noise(pairs: list[np.ndarray]) -> np.ndarray:
    """The standard deviation of the difference of two bf16 arms at each evaluation.

    Args:
        pairs: the differences of any two bf16 arms. Those of NEIGHBORS count, too, because with
            few arms a single evaluation says little.
    """
    return np.sqrt(average_neighbors(np.square(pairs).mean(0)))


def average_neighbors(values: np.ndarray) -> np.ndarray:
    """Each value of the last dimension averaged with its NEIGHBORS on either side."""
    margins = [(0, 0)] * (values.ndim - 1) + [(NEIGHBORS, NEIGHBORS)]
    padded = np.pad(values, margins, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * NEIGHBORS + 1, axis=-1)
    return np.nanmean(windows, -1)


@cache
def noise_factor(arms: int, count: int, level: float) -> float:
    """How many times `noise` an arm whose runs vary like bf16's may differ from a bf16 arm.

    With a probability of `level` it differs by more at one or more of `count` evaluations, if the
    deviations of all arms are normal and independent. Simulated, because `noise` is itself
    uncertain, and contains the arm that is compared with.

    Args:
        arms: the number of bf16 arms.
    """
    draws = np.random.default_rng(0).standard_normal((20_000, arms + 1, count))
    bf16, other = draws[:, :arms], draws[:, arms]
    deviation = np.sqrt(average_neighbors(2 * bf16.var(1, ddof=1)))
    ratios = np.abs(other - bf16[:, 0]) / deviation
    return float(np.quantile(ratios.max(-1), 1 - level))


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


@dataclass
class Measure:
    """How far an arm is from its reference in one quantity, at each judged step, and may be.

    Attributes:
        quantity: its attribute of `Differences`.
    """

    name: str
    quantity: str
    unit: str
    values: np.ndarray
    bars: np.ndarray

    def __str__(self) -> str:
        return f"{self.name}, {self.unit}"

    def worst(self) -> int:
        """Where the difference is largest in relation to what is allowed."""
        return int(np.argmax(np.abs(self.values) / self.bars))

    def exceeds(self) -> np.ndarray:
        """Where it differs by more than is allowed; where a value is missing it does not."""
        return np.isfinite(self.values) & (np.abs(self.values) > self.bars)

    def fault(self, steps: np.ndarray) -> str | None:
        over = np.flatnonzero(~(np.abs(self.values) <= self.bars))
        if not over.size:
            return None
        first, at = over[0], f"{over.size} of {len(steps)} evaluations"
        return (
            f"{self.name} differs at {at}, first by {self.values[first]:+.3f} {self.unit} at step "
            f"{steps[first]} (allowed: {self.bars[first]:.3f})"
        )


@dataclass
class Average:
    """How far an arm is from its reference on average over the last half, and may be."""

    name: str
    unit: str
    value: float
    allowed: float

    def __str__(self) -> str:
        return f"average of {self.name}, {self.unit}"

    def exceeds(self) -> bool:
        return bool(np.isfinite(self.value) and abs(self.value) > self.allowed)

    def fault(self) -> str | None:
        if abs(self.value) <= self.allowed:
            return None
        return (
            f"{self.name} differs by {self.value:+.3f} {self.unit} on average over the last half "
            f"(allowed: {self.allowed:.3f})"
        )


@dataclass
class Trend:
    """The trend of the held-out gap over the last half of the steps.

    Attributes:
        p: of the trend test; None if there are too few evaluations or values are missing.
        drift: by how much the gap moves away from zero, in % of the loss.
        allowed: by how much it may.
    """

    p: float | None
    drift: float
    allowed: float

    def fault(self) -> str | None:
        if self.p is None or self.p > LEVEL or self.drift <= self.allowed:
            return None
        return (
            f"the held-out gap grows by {self.drift:.3f} % over the last half, p = {self.p:.2g} "
            f"(allowed: {self.allowed:.3f})"
        )
