"""Judges one arm of a convergence experiment against another; converge_verdict.py has the rules."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from converge_arms import ARMS, Arm, Settings
from converge_stats import (
    LEVEL,
    Average,
    Differences,
    HeldOut,
    Measure,
    Trend,
    drift,
    mann_kendall,
    noise,
    noise_factor,
)
from titan_logs import Run

TOLERANCE = 0.25  # % of the loss, DeepSeek-V3's bound; points of accuracy
LOAD_TOLERANCE = 0.1  # balanced shares
LOAD_FACTOR = 2.0  # times the noise; the largest of many differences varies little
FEWEST_ARMS = 3  # of bf16, to know their noise
FEWEST_EVALUATIONS = 4  # with three the test could not reject, 1 / 3! > LEVEL


@dataclass
class ArmRun:
    """What an arm wrote.

    Attributes:
        killed: it was killed on purpose, as arms that are resumed must be.
        equal_to: another arm that has the same held-out losses or the same training losses.
    """

    name: str
    run: Run
    held_out: HeldOut
    killed: bool = False
    equal_to: str | None = None

    @property
    def arm(self) -> Arm:
        return ARMS[self.name]

    def has_losses_of(self, other: "ArmRun") -> tuple[bool, bool]:
        """Whether its held-out losses are those of the other arm, and its training losses.

        That is, at all steps in common but the first, at which arms may be equal.
        """
        both = (self, other)
        held_out = [{step: found.loss for step, found in each.held_out.items()} for each in both]
        return is_same(*held_out), is_same(*(each.run.series["loss"] for each in both))

    def logged_all(self, settings: Settings) -> bool:
        """Whether its training losses go on until the last step, but for one logging interval."""
        steps = sorted(self.run.series["loss"])
        interval = max(np.diff(steps), default=1)
        return bool(settings.steps - steps[-1] < interval)

    def non_finite(self) -> str | None:
        for step, found in sorted(self.held_out.items()):
            if not np.isfinite(found.loss):
                return f"held-out loss is {found.loss} at step {step}"
            if not np.isfinite(found.accuracy):
                return f"accuracy is {found.accuracy} at step {step}"
            if not np.isfinite(found.load).all():
                return f"a layer's experts got no tokens at step {step}"
        return self.run.non_finite()

    def incomplete(self, settings: Settings) -> Iterator[str]:
        expected = range(settings.every, settings.steps + 1, settings.every)
        missed = [step for step in expected if step not in self.held_out]
        if missed:
            yield f"no evaluation at step {missed[0]}, of {settings.steps} steps"
        if not self.logged_all(settings):
            last = max(self.run.series["loss"])
            yield f"its training losses end at step {last}, of {settings.steps} steps"

    def unusable(self, settings: Settings) -> Iterator[str]:
        """What keeps the arm from being judged, whatever it is compared with."""
        yield from self.incomplete(settings)
        if self.equal_to:
            yield f"equal to {self.equal_to} at every step: nothing was changed"
        if self.arm.role == "resumed" and not self.killed:
            yield "was never killed, so nothing was resumed"

    def faults(self, settings: Settings) -> Iterator[str]:
        """What keeps other arms from being judged by this one."""
        yield from self.unusable(settings)
        if fault := self.non_finite():
            yield fault


def is_same(ours: dict[int, float], theirs: dict[int, float]) -> bool:
    common = [step for step in ours.keys() & theirs.keys() if step > 1]
    return bool(common) and all(ours[step] == theirs[step] for step in common)


@dataclass
class Judgment:
    """What is found about an arm.

    Attributes:
        steps: evaluations after warm-up that the arm and its reference have in common. If there
            are none, there are no measures and averages.
        for_noise: the bf16 arms whose noise decided.
        faults: what tells it from its reference.
        unjudged: what keeps it from being judged.
    """

    run: ArmRun
    reference: ArmRun
    steps: np.ndarray
    for_noise: list[ArmRun] = field(default_factory=list)
    measures: list[Measure] = field(default_factory=list)
    averages: list[Average] = field(default_factory=list)
    trend: Trend = field(default_factory=lambda: Trend(None, 0.0, 0.0))
    faults: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)

    def may_differ(self) -> bool:
        return self.run.arm.role in ("bf16", "errors")

    def is_control(self) -> bool:
        return self.run.arm.role == "control"

    def detected(self) -> bool:
        """Whether a difference was found. NaN shows only that something broke."""
        evaluations = any(each.exceeds().any() for each in self.measures)
        averages = any(each.exceeds() for each in self.averages)
        return evaluations or averages or bool(self.trend.fault())

    def knows_noise(self) -> bool:
        return len(self.for_noise) >= FEWEST_ARMS

    def passes(self) -> bool:
        if self.unjudged:
            return False
        if self.may_differ():
            return True
        return self.detected() if self.is_control() else not self.faults

    def mark(self) -> str:
        if not self.passes():
            return "FAIL"
        return "note" if self.may_differ() and self.faults else "ok  "

    def finding(self) -> str:
        if self.unjudged:
            return "not judged: " + "; ".join(self.unjudged)
        found = "; ".join(self.faults)
        if found and self.run.arm.role == "bf16":
            return f"{found}: more bf16 arms are needed to know their noise"
        if found and self.is_control() and not self.detected():
            return f"differs from {self.reference.name} only where it is not finite: {found}"
        if found:
            return f"differs from {self.reference.name}: {found}"
        if all(self.run.has_losses_of(self.reference)):
            return f"has the losses of {self.reference.name} at every step"
        return f"cannot be told from {self.reference.name}"


def trend_of(steps: np.ndarray, gap: np.ndarray, bf16_gaps: list[np.ndarray], half: float) -> Trend:
    """The trend of `gap` at the steps after `half`."""
    late = steps > half
    steps, gap = steps[late], gap[late]
    of_bf16 = [abs(drift(steps, other[late])) for other in bf16_gaps]
    bar = max([TOLERANCE / 10, *of_bf16])
    if len(steps) < FEWEST_EVALUATIONS or not np.isfinite(gap).all():
        return Trend(None, 0.0, bar)
    away = gap if gap.mean() >= 0 else -gap
    return Trend(mann_kendall(away), drift(steps, away), bar)


def allowed(
    pairs: list[np.ndarray], arms: int, tolerance: float, key: str, count: int
) -> np.ndarray:
    """How far an arm may differ at each of `count` evaluations, from `pairs` of bf16 arms."""
    if arms < FEWEST_ARMS:
        return np.full(count, tolerance)
    factor = LOAD_FACTOR if key == "load" else noise_factor(arms, count, LEVEL)
    return np.maximum(tolerance, factor * noise(pairs))


def arms_for_noise(bf16: list[ArmRun], steps: np.ndarray) -> list[ArmRun]:
    """The bf16 arms that have these evaluations, are finite, and repeat no other arm."""
    return [
        each
        for each in bf16
        if each.held_out.keys() >= set(steps.tolist()) and not (each.non_finite() or each.equal_to)
    ]


def judge(run: ArmRun, reference: ArmRun, bf16: list[ArmRun], settings: Settings) -> Judgment:
    """Compares an arm with its reference, by the noise of `bf16`."""
    common = run.held_out.keys() & reference.held_out.keys()
    steps = np.array(sorted(step for step in common if step > settings.warmup), dtype=int)
    result = Judgment(run, reference, steps, arms_for_noise(bf16, steps))
    result.unjudged += run.unusable(settings)
    result.unjudged += [f"{reference.name}: {fault}" for fault in reference.faults(settings)]
    if not steps.size:
        result.unjudged.append(f"no evaluation after warm-up in common with {reference.name}")
        return result
    measure(result, settings)
    faults = [each.fault(steps) for each in result.measures]
    faults += [*(each.fault() for each in result.averages), result.trend.fault(), run.non_finite()]
    result.faults = [each for each in faults if each]
    if result.trend.p is None and not result.faults:
        result.unjudged.append(f"fewer than {FEWEST_EVALUATIONS} evaluations in the last half")
    return result


def measure(result: Judgment, settings: Settings) -> None:
    """Fills in the differences of the arm from its reference, and what is allowed."""
    run, steps, bf16 = result.run, result.steps, result.for_noise
    pairs = [Differences(a.held_out, b.held_out, steps) for a, b in combinations(bf16, 2)]
    ours = Differences(run.held_out, result.reference.held_out, steps)
    quantities = [("held-out loss", "%", "loss", TOLERANCE)]
    quantities += [("accuracy", "points", "accuracy", TOLERANCE)]
    if next(iter(run.held_out.values())).load.size:
        quantities += [("expert load", "shares", "load", LOAD_TOLERANCE)]
    late = steps > settings.steps / 2
    for name, unit, key, tolerance in quantities:
        values, of_bf16 = getattr(ours, key), [getattr(pair, key) for pair in pairs]
        bars = allowed(of_bf16, len(bf16), tolerance, key, len(steps))
        result.measures.append(Measure(name, key, unit, values, bars))
        if key != "load" and late.any():
            means = [each[late].mean(keepdims=True) for each in of_bf16]
            bar = allowed(means, len(bf16), tolerance, key, 1)[0]
            result.averages.append(Average(name, unit, values[late].mean(), bar))
    bf16_gaps = [pair.loss for pair in pairs]
    result.trend = trend_of(steps, ours.loss, bf16_gaps, settings.steps / 2)
