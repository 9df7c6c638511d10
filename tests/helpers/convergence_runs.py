"""Writes the results of a convergence experiment whose gaps and trends are known."""

import json
import shutil
from pathlib import Path

import numpy as np
from converge_arms import ARMS
from loss_runs import dump

STEPS, EVERY, WARMUP = 1200, 100, 120
EVALUATIONS = list(range(EVERY, STEPS + 1, EVERY))
LATE = [step for step in EVALUATIONS if step > STEPS / 2]
NAN = float("nan")
# Held-out gaps without a trend, in %: of the size of rounding, and ten times that.
QUIET = [0.01, -0.02, 0.02, 0.0, -0.01, 0.01, 0.02, -0.02, 0.01, -0.01, 0.02, 0.0]
NOISY = [10 * gap for gap in QUIET]


def write_arm(
    results: Path, name: str, gaps=QUIET, accuracy=0.0, load=0.0, steps=EVALUATIONS, losses=None
) -> None:
    """An arm with these held-out gaps (%), accuracy gap (points) and load of expert 0 of layer 1.

    `losses` replaces training losses by step. With the same gaps, arms differ in the last digits,
    but a resumed arm has the losses of the arm that it repeats.
    """
    shutil.rmtree(results / name, ignore_errors=True)
    gaps, accuracy = (np.broadcast_to(each, len(EVALUATIONS)) for each in (gaps, accuracy))
    accuracy = dict(zip(EVALUATIONS, accuracy))
    number = list(ARMS).index(ARMS[name].twin or name)
    gaps = dict(zip(EVALUATIONS, gaps + 1e-5 * number))
    training = {step: 5 - step / 1000 + gaps[step] / 100 + 1e-6 * number for step in steps}
    dump(results, name, training | (losses or {}))
    counts = [[100, 100, 100, 100], [100 + round(100 * load), 100 - round(100 * load), 100, 100]]
    with (results / name / "held_out.jsonl").open("w") as file:
        for step in steps:
            loss = (4 - step / 1000) * (1 + gaps[step] / 100)
            line = {
                "step": step,
                "loss": loss,
                "accuracy": 0.5 + accuracy[step] / 100,
                "experts": counts,
            }
            file.write(json.dumps(line) + "\n")
