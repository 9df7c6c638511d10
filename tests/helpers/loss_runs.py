"""Writes runs for the tests of compare_loss.py, as event files or logs, and calls it.

The gap of two runs is known in advance: the baseline's loss falls by 0.01 a step, and a run with a
gap has the same losses times 1 + gap.
"""

import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import compare_loss

LOSS = "loss_metrics/global_avg_loss"
TAGS = {
    "tps": "throughput(tps)",
    "memory": "memory/max_reserved(GiB)",
    "validation": "validation_metrics/loss",
    "grad_norm": "grad_norm",
}


def curve(steps, gap=0.0):
    """Losses by step, `gap` percent above those of the baseline."""
    return {step: (8.0 - 0.01 * step) * (1 + gap / 100) for step in steps}


def write_events(folder, losses, time=1e9, interval=1.0, **tags):
    """Writes one event file; `tags` maps tps, memory, ... to a number or to values by step."""
    writer = EventFileWriter(str(folder))
    series = {LOSS: losses} | {TAGS[name]: value for name, value in tags.items()}
    steps = sorted(set(losses).union(*(v for v in series.values() if isinstance(v, dict))))
    for i, step in enumerate(steps):
        for tag, value in series.items():
            value = value.get(step) if isinstance(value, dict) else value
            if value is not None:
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
                at = time + i * interval
                writer.add_event(Event(wall_time=at, step=step, summary=summary))
    writer.close()
    return folder


def dump(root, name, losses, date="20260101-0000", **tags):
    write_events(root / name / "tb" / date, losses, **tags)
    return root / name


def log_line(step, loss, memory="70.11GiB(78.80%)", tps="10,123", rank="", color=True):
    """The line that torchtitan logs at a step."""
    c = [f"\033[{n}m" for n in (31, 32, "38;2;180;60;0", "38;2;54;234;195", 34, 36, 35, 39)]
    red, green, orange, turquoise, blue, cyan, magenta, reset = c if color else [""] * 8
    return (
        f"{rank}[titan] 2026-01-01 00:00:01,234 - root - INFO - {red}step: {step:2}  "
        f"{green}loss: {loss:8.5f}  {orange}grad_norm:  1.2345  {turquoise}memory: {memory}  "
        f"{blue}tps: {tps}  {cyan}tflops: 1.23  {magenta}mfu: 0.12%{reset}\n"
    )


def write_log(path, losses, **kwargs):
    path.write_text("".join(log_line(step, loss, **kwargs) for step, loss in losses.items()))
    return path


def compare(*args, out=None):
    """Calls compare_loss.py; returns its exit status, its table by row and its whole output.

    It draws the plot, which takes longer than everything else, only if `out` is given.
    """
    draw = compare_loss.draw if out else lambda *_: None
    printed = io.StringIO()
    with (
        mock.patch.object(compare_loss, "draw", draw),
        redirect_stdout(printed),
        redirect_stderr(printed),
    ):
        try:
            status = compare_loss.main([*map(str, args), *(["--out", str(out)] if out else [])])
        except SystemExit as stop:
            status = stop.code
    rows = [re.split(r"  +", line) for line in printed.getvalue().splitlines()]
    return status, {row[0]: row[1:] for row in rows if len(row) > 1}, printed.getvalue()
