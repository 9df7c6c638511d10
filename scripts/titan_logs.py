"""Reads what a torchtitan run leaves behind: TensorBoard folders and logs of standard output.

A run is a dump folder, the TensorBoard folder in it, a dated folder or an event file in that, or a
log file. TensorBoard has FP32, a log five decimals and, between colour codes, a line per step from
every rank that prints. torchtitan dates its folders to the minute: a resumed run adds one, so a
folder's event files are merged by step, the later write winning, and two runs that were started in
the same minute share one, which is refused.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

TAGS = {
    "loss": "loss_metrics/global_avg_loss",
    "validation loss": "validation_metrics/loss",
    "grad_norm": "grad_norm",
    "tps": "throughput(tps)",
    "memory": "memory/max_reserved(GiB)",
}
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
NUMBER = r"(-?(?:\d+\.\d+|nan|inf))"
STEP_LINE = re.compile(
    rf"(validate )?step: *(\d+) +loss: *{NUMBER}(?=\s)(?: +grad_norm: *{NUMBER}(?=\s))?"
    rf"(?: +memory: *{NUMBER}GiB\S*)?(?: +tps: *([\d,]+)(?=\s))?"
)
DATED = re.compile(r"\d{8}-\d{4}")


class InputError(Exception):
    """There is nothing to compare; the message names what is wrong."""


class Scalar(NamedTuple):
    time: float
    step: int
    name: str
    value: float


@dataclass
class Run:
    """One run, merged. What a run does not have, or must not show, is 0."""

    label: str
    series: dict[str, dict[int, float]]  # a name of TAGS -> step -> value
    peak_memory: float
    has_speed: bool
    from_log: bool

    def non_finite(self) -> str | None:
        """The first NaN or Inf of the run, in words."""
        found = (
            (step, name, value)
            for name in ("loss", "validation loss", "grad_norm")
            for step, value in self.series.get(name, {}).items()
            if not math.isfinite(value)
        )
        first = min(found, default=None)
        return first and f"{first[1]} is {first[2]} at step {first[0]}"

    def tps(self) -> float:
        """Median tokens/s. The first fifth of the logged steps, at most ten, is warm-up."""
        values = [value for _, value in sorted(self.series.get("tps", {}).items())]
        warm = values[max(1, min(10, len(values) // 5)) :]
        return median(warm) if warm and self.has_speed else 0.0


def read_events(path: Path) -> list[Scalar]:
    """The scalars of one event file; one that a kill cut short is read up to the cut."""
    events = EventAccumulator(str(path), size_guidance={SCALARS: 0})
    present = events.Reload().Tags()[SCALARS]
    return [
        Scalar(event.wall_time, event.step, name, event.value)
        for name, tag in TAGS.items()
        if tag in present
        for event in events.Scalars(tag)
    ]


def read_log(text: str) -> Iterator[Scalar]:
    """The scalars of a log; place stands in for time, and a line cut short is left out."""
    for place, match in enumerate(STEP_LINE.finditer(COLOUR.sub("", text))):
        validate, step, loss, grad_norm, memory, tps = match.groups()
        tps = tps and tps.replace(",", "")
        values = {"loss": loss, "grad_norm": grad_norm, "memory": memory, "tps": tps}
        if validate:
            values = {"validation loss": loss}
        for name, value in values.items():
            if value is not None:
                yield Scalar(place, int(step), name, float(value))


def is_negative(value: float) -> bool:
    return math.isfinite(value) and math.copysign(1.0, value) < 0


def merge(scalars: Iterable[Scalar]) -> dict[str, dict[int, float]]:
    """Series by name and step, the later write winning."""
    series: dict[str, dict[int, float]] = {}
    for scalar in sorted(scalars, key=lambda s: s.time):
        # Pipeline stages without a loss log -1, times the ranks and microbatches it is summed over.
        if not (scalar.name.endswith("loss") and is_negative(scalar.value)):
            series.setdefault(scalar.name, {})[scalar.step] = scalar.value
    return series


def tb_folder(event_file: Path) -> Path | None:
    parents = event_file.resolve().parents
    return next((p.parent for p in parents if DATED.fullmatch(p.name)), None)


def refuse_mixture(path: Path, files: dict[Path, list[Scalar]]) -> None:
    """Several runs in one folder: merged, they would compare as a run that never was."""
    homes = sorted({str(home) for file in files if (home := tb_folder(file))})
    if len(homes) > 1:
        raise InputError(f"{path} holds several runs, name one: {', '.join(homes)}")
    for a, of_a in files.items():
        for b, of_b in files.items():
            if a == b or a.parent != b.parent or not of_a or not of_b:
                continue
            # A resume writes after the run it resumes, and ranks have a folder each.
            if min(of_a).time <= min(of_b).time < max(of_a).time:
                loss_a, loss_b = merge(of_a).get("loss", {}), merge(of_b).get("loss", {})
                if any(loss_a[step] != loss_b[step] for step in loss_a.keys() & loss_b.keys()):
                    raise InputError(f"two runs wrote at the same time, name one: {a}, {b}")


def read_folder(path: Path) -> tuple[list[Scalar], bool]:
    """The scalars of a folder (or event file), and whether a log kept with it says "emulated"."""
    found = [path] if path.is_file() else sorted(path.rglob("*tfevents*"))
    files = {file: read_events(file) for file in found if file.is_file()}
    if not files:
        raise InputError(f"no TensorBoard event file in {path} (a log file can be named instead)")
    refuse_mixture(path, files)
    dumps = {path} | {home.parent for file in files if (home := tb_folder(file))}
    logs = [log for dump in dumps for log in dump.glob("*.log") if log.is_file()]
    emulated = any("emulated" in log.read_text(errors="replace") for log in logs)
    return [scalar for scalars in files.values() for scalar in scalars], emulated


def read_run(path: Path, label: str, no_speed: bool) -> Run:
    if not path.exists():
        raise InputError(f"no such file or folder: {path}")
    from_log = path.is_file() and "tfevents" not in path.name
    if from_log:
        text = path.read_text(errors="replace")
        scalars, emulated = list(read_log(text)), "emulated" in text
        missing = "no line of torchtitan's with a step and its loss"
    else:
        scalars, emulated = read_folder(path)
        missing = f"no {TAGS['loss']} in its event files"
    series = merge(scalars)
    if "loss" not in series:
        if any(scalar.name == "loss" for scalar in scalars):
            missing = "no loss but the -1 of pipeline stages that have none"
        raise InputError(f"{path}: {missing}")
    memory = [scalar.value for scalar in scalars if scalar.name == "memory"]
    # Where there is no accelerator torchtitan logs -1 byte, in a log -0.00.
    has_speed = not (no_speed or emulated or any(map(is_negative, memory)))
    peak = 0.0 if no_speed else max(memory, default=0.0)
    return Run(label, series, peak, has_speed, from_log)
