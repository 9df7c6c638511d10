"""Reads the metrics of a torchtitan run, from TensorBoard event files or from its log.

A run is named by its dump folder, by the TensorBoard folder in it, by a dated folder or an event
file in that, or by a log file. Event files hold FP32 values. A log holds five decimals, color
codes, and a line per step from each rank that prints.

torchtitan names its TensorBoard folders by date and minute. A resumed run adds a folder, so the
event files of a run are merged by step, and the value written last wins. Two runs started in the
same minute write to the same folder; that is an error.

Speed is not reported for a run that emulated FP8. There are two signs of one:
- its log, or a *.log file in its dump folder, contains EMULATED, which titan_fp8 logs once a run;
- its peak memory is negative: without an accelerator torchtitan logs -1 byte.
"""

import itertools
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
EMULATED = "FP8 is emulated"
SPEED_FROM_STEP = 6
"""The steps before it compile and warm up."""
COLOR = re.compile(r"\x1b\[[0-9;]*m")
NUMBER = r"(-?(?:\d+\.\d+|nan|inf))"
STEP_LINE = re.compile(
    rf"(validate )?step: *(\d+) +loss: *{NUMBER}(?=\s)(?: +grad_norm: *{NUMBER}(?=\s))?"
    rf"(?: +memory: *{NUMBER}GiB\S*)?(?: +tps: *([\d,]+)(?=\s))?"
)
DATED = re.compile(r"\d{8}-\d{4}")


class InputError(Exception):
    """The input cannot be read or compared; the message says why."""


class Scalar(NamedTuple):
    time: float
    step: int
    name: str
    value: float


@dataclass
class Run:
    """The metrics of one run."""

    label: str
    series: dict[str, dict[int, float]]  # a key of TAGS, or a tag -> step -> value
    peak_memory: float  # GiB; 0 if it is unknown
    has_speed: bool  # False for a run that emulated FP8 or had no accelerator
    has_log: bool
    from_log: bool

    def non_finite(self) -> str | None:
        """Describes the first NaN or Inf of the run, if there is one."""
        found = (
            (step, name, value)
            for name in ("loss", "validation loss", "grad_norm")
            for step, value in self.series.get(name, {}).items()
            if not math.isfinite(value)
        )
        first = min(found, default=None)
        return first and f"{first[1]} is {first[2]} at step {first[0]}"

    def tps(self) -> float:
        """Median tokens/s of each rank from SPEED_FROM_STEP on; 0 if unknown."""
        values = [v for step, v in self.series.get("tps", {}).items() if step >= SPEED_FROM_STEP]
        return median(values) if values and self.has_speed else 0.0


def read_events(path: Path) -> list[Scalar]:
    """The scalars of one event file; a truncated file is read up to its last whole record.

    Those of TAGS have its names, others the names of their tags.

    Raises:
        InputError: the path is not UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise InputError(f"{path}: TensorBoard reads only names in UTF-8: rename it") from None
    events = EventAccumulator(str(path), size_guidance={SCALARS: 0})
    names = {tag: name for name, tag in TAGS.items()}
    return [
        Scalar(event.wall_time, event.step, names.get(tag, tag), event.value)
        for tag in events.Reload().Tags()[SCALARS]
        for event in events.Scalars(tag)
    ]


def read_log(text: str) -> Iterator[Scalar]:
    """The scalars of a log, with the position as time; a truncated last line is skipped."""
    for place, match in enumerate(STEP_LINE.finditer(COLOR.sub("", text))):
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
    """Series by name and step; the value written last wins."""
    series: dict[str, dict[int, float]] = {}
    for scalar in sorted(scalars, key=lambda s: s.time):
        # Pipeline stages that compute no loss log -1, or a sum of -1 over ranks and microbatches.
        if not (scalar.name.endswith("loss") and is_negative(scalar.value)):
            series.setdefault(scalar.name, {})[scalar.step] = scalar.value
    return series


def tb_folder(event_file: Path) -> Path | None:
    parents = event_file.resolve().parents
    return next((p.parent for p in parents if DATED.fullmatch(p.name)), None)


def refuse_mixture(path: Path, files: dict[Path, list[Scalar]]) -> None:
    """Raises InputError if the event files belong to more than one run."""
    homes = sorted({str(home) for file in files if (home := tb_folder(file))})
    if len(homes) > 1:
        raise InputError(f"{path} holds several runs, name one: {', '.join(homes)}")
    for (a, of_a), (b, of_b) in itertools.permutations(files.items(), 2):
        if a.parent != b.parent or not of_a or not of_b:
            continue
        # A resumed run writes only after the first has ended, and each rank has a folder.
        if min(of_a).time <= min(of_b).time < max(of_a).time:
            loss_a, loss_b = merge(of_a).get("loss", {}), merge(of_b).get("loss", {})
            if any(loss_a[step] != loss_b[step] for step in loss_a.keys() & loss_b.keys()):
                raise InputError(f"two runs wrote at the same time, name one: {a}, {b}")


def read_folder(path: Path) -> tuple[list[Scalar], list[str]]:
    """The scalars of a folder or event file, and the logs in the dump folder of its run.

    Raises:
        InputError: there is no event file, or there are those of several runs.
    """
    if not path.exists():
        raise InputError(f"no such file or folder: {path}")
    is_event_file = path.is_file() and "tfevents" in path.name
    found = [path] if is_event_file else sorted(path.rglob("*tfevents*"))
    files = {file: read_events(file) for file in found if file.is_file()}
    if not files:
        raise InputError(f"no TensorBoard event file in {path}: set [metrics] enable_tensorboard")
    refuse_mixture(path, files)
    dumps = {path} | {home.parent for file in files if (home := tb_folder(file))}
    logs = [log for dump in dumps for log in dump.glob("*.log") if log.is_file()]
    texts = [log.read_text(errors="replace") for log in logs]
    return [scalar for scalars in files.values() for scalar in scalars], texts


def read_run(path: Path, label: str) -> Run:
    """Reads a run.

    Raises:
        InputError: there is no run at `path`, more than one, or one without losses.
    """
    from_log = path.is_file() and "tfevents" not in path.name
    if from_log:
        logs = [path.read_text(errors="replace")]
        scalars = list(read_log(logs[0]))
        missing = "no line of torchtitan's with a step and its loss"
    else:
        scalars, logs = read_folder(path)
        missing = f"no {TAGS['loss']} in its event files"
    series = merge(scalars)
    if "loss" not in series:
        if any(scalar.name == "loss" for scalar in scalars):
            missing = "no loss but the -1 of pipeline stages that compute none"
        raise InputError(f"{path}: {missing}")
    memory = [scalar.value for scalar in scalars if scalar.name == "memory"]
    emulated = any(EMULATED in log for log in logs) or any(map(is_negative, memory))
    return Run(label, series, max([0.0, *memory]), not emulated, bool(logs), from_log)
