"""The verdict on a convergence experiment, from curves whose gaps and trends are known."""

import json
import shutil
from pathlib import Path

import converge_plot
import converge_verdict
import numpy as np
import pytest
from converge_arms import ARMS, Settings, write_settings
from converge_stats import read_held_out
from loss_runs import dump
from titan_logs import InputError

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

    `losses` replaces training losses by step.
    """
    shutil.rmtree(results / name, ignore_errors=True)
    gaps = dict(zip(EVALUATIONS, [gaps] * len(EVALUATIONS) if np.isscalar(gaps) else gaps))
    training = {step: 5 - step / 1000 + gaps[step] / 100 for step in steps}
    dump(results, name, training | (losses or {}))
    counts = [[100, 100, 100, 100], [100 + round(100 * load), 100 - round(100 * load), 100, 100]]
    with (results / name / "held_out.jsonl").open("w") as file:
        for step in steps:
            loss = (4 - step / 1000) * (1 + gaps[step] / 100)
            line = {"step": step, "loss": loss, "accuracy": 0.5 + accuracy / 100, "experts": counts}
            file.write(json.dumps(line) + "\n")


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """An experiment with the baseline alone; plots, which take long, are not drawn."""
    settings = Settings("tiny", STEPS, WARMUP, EVERY, tokens=512, config="", text="", flags=[])
    write_settings(tmp_path, settings)
    write_arm(tmp_path, "bf16", gaps=0.0)
    monkeypatch.setattr(converge_plot, "draw", lambda *_: None)
    return tmp_path


@pytest.fixture
def judge(results, capsys):
    def call() -> tuple[int, str]:
        status = converge_verdict.main([str(results)])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return call


def rising(by: float, start: float = 0.0) -> list[float]:
    """Gaps that are `start` in the first half and rise by `by` over the last."""
    flat = [start] * (len(EVALUATIONS) - len(LATE))
    return flat + list(np.linspace(start, start + by, len(LATE)))


def test_the_numbers_of_the_tables(results, judge):
    write_arm(results, "bf16_ulp", QUIET, load=0.02)
    write_arm(results, "blockwise", 0.2, accuracy=-0.1, load=0.05)
    status, text = judge()
    assert status == 0 and "ok    blockwise: cannot be told from bf16" in text
    markdown = (results / "verdict.md").read_text()
    assert "| 1200 | 2.80000 | 0.250 | +0.000 | +0.200 |" in markdown
    row = next(line for line in markdown.splitlines() if line.startswith("| blockwise"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:5] == [
        "blockwise",
        "bf16",
        "+0.200 of 0.250",
        "-0.100 of 0.250",
        "+0.050 of 0.100",
    ]
    assert cells[5:7] == ["+0.200 of 0.250", "-0.100 of 0.250"]
    assert cells[-1] == "equal"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"gaps": 0.26}, "held-out loss differs at 11 of 11"),
        ({"gaps": -0.26}, "held-out loss differs at 11 of 11"),
        (
            {"gaps": [0] * 8 + [0.3] + QUIET[9:]},
            "at 1 of 11 evaluations, first by +0.300 % at step 900",
        ),
        ({"accuracy": -0.3}, "accuracy differs at 11 of 11 evaluations, first by -0.300 points"),
        ({"load": 0.11}, "expert load differs at 11 of 11 evaluations, first by +0.110 shares"),
        ({"gaps": rising(0.2)}, "the held-out gap grows by 0.200 % over the last half, p = 0.00"),
        ({"gaps": [-gap for gap in rising(0.2)]}, "the held-out gap grows by 0.200 %"),
        ({"losses": {700: NAN}}, "loss is nan at step 700"),
        ({"gaps": [*QUIET[:-1], NAN]}, "held-out loss is nan at step 1200"),
    ],
)
def test_what_fails(results, judge, change, fault):
    write_arm(results, "bf16_ulp")
    write_arm(results, "blockwise", **change)
    status, text = judge()
    assert status == 1 and "FAIL  blockwise" in text and fault in text
    assert "ok    bf16_ulp: cannot be told from bf16" in text


@pytest.mark.parametrize(
    "change",
    [
        {"gaps": 0.24},
        {"accuracy": 0.24},
        {"load": 0.09},
        {"gaps": [5.0, *QUIET[1:]]},  # within the warm-up
        {"gaps": rising(0.02)},
        {"gaps": rising(-0.2, start=0.24)},  # towards bf16
        {"gaps": NOISY},
    ],
)
def test_what_passes(results, judge, change):
    write_arm(results, "bf16_ulp")
    write_arm(results, "blockwise", **change)
    assert judge()[0] == 0


@pytest.mark.parametrize("key", ["gaps", "accuracy", "load"])
def test_the_noise_of_bf16_is_allowed(results, judge, key):
    write_arm(results, "blockwise", **{key: 0.5})
    write_arm(results, "bf16_order", **{key: 0.3})
    status, text = judge()  # two bf16 arms do not show the noise
    assert status == 1 and "with fewer than 3 bf16 arms the tolerances alone decide" in text
    write_arm(results, "bf16_ulp", **{key: -0.3})
    assert judge()[0] == 0
    write_arm(results, "rowwise", **{key: 1.5})
    status, text = judge()
    assert status == 1 and "FAIL  rowwise" in text and "ok    blockwise" in text


def test_a_small_gap_that_stays_is_found_on_average(results, judge):
    """One of 0.5 % is within the noise at each evaluation, and beyond that of the average."""
    for name, sign in {"bf16_order": 1, "bf16_ulp": -1}.items():
        gaps = np.where(np.arange(len(EVALUATIONS)) % 2, 0.4 * sign, -0.4 * sign)
        write_arm(results, name, gaps, accuracy=0.01 * sign)
    write_arm(results, "blockwise", NOISY)
    write_arm(results, "rowwise", [0.5 + gap for gap in NOISY])
    status, text = judge()
    assert status == 1 and "ok    blockwise" in text and text.count("FAIL") == 1
    assert "rowwise: differs from bf16: held-out loss differs by +0.5" in text
    assert "on average over the last half (allowed: 0.250)" in text


def test_notes_leave_out_the_noise_of_another_order(results, judge):
    write_arm(results, "bf16_order", 3.0)
    write_arm(results, "blockwise", 1.0)
    write_arm(results, "rowwise", QUIET)
    write_arm(results, "bf16_ulp", QUIET[::-1])
    assert "with the same order" not in judge()[1]
    write_arm(results, "bf16_ulp_2", NOISY)
    status, text = judge()
    assert status == 0 and "ok    blockwise" in text
    note = "note  {}, by the noise of bf16 arms with the same order: {}"
    assert note.format("blockwise", "held-out loss differs at 11 of 11 evaluations") in text
    assert note.format("rowwise", "no difference") in text


def test_training_losses_on_the_same_batches_are_compared(results, judge):
    losses = {step: 5 - step / 1000 for step in EVALUATIONS}
    late = {step: 1.01 * loss for step, loss in losses.items() if step > STEPS / 2}
    write_arm(results, "bf16_order", 3.0)
    write_arm(results, "blockwise", QUIET, losses=losses | late)
    write_arm(results, "rowwise", QUIET, losses=losses)
    note = "- training loss over the last half against bf16's: blockwise +1.000 %, rowwise +0.000 %"
    judge()
    assert note in (results / "verdict.md").read_text().splitlines()


def test_a_drift_of_bf16_runs_is_allowed(results, judge):
    write_arm(results, "blockwise", rising(0.2))
    assert judge()[0] == 1
    write_arm(results, "bf16_order", rising(0.22))
    assert judge()[0] == 0


@pytest.mark.parametrize("name", ["bf16_ulp", "bf16_rounding"])
def test_a_bf16_arm_is_judged_without_itself(results, judge, name):
    write_arm(results, "bf16_order", 0.2)
    write_arm(results, name, 0.5)
    status, text = judge()
    assert status == 0 and f"note  {name}: held-out loss differs" in text
    assert "more bf16 arms are needed to know their noise" in text
    write_arm(results, "bf16_order_2", 0.4)
    status, text = judge()
    assert status == 0 and f"ok    {name}: cannot be told from bf16" in text


def test_the_control_must_fail(results, judge):
    write_arm(results, "blockwise")
    assert "nothing shows that the verdict sees a difference" in judge()[1]
    write_arm(results, "control", 2.0)
    status, text = judge()
    assert status == 0 and "ok    control: differs from bf16" in text
    write_arm(results, "control", 0.1)
    status, text = judge()
    assert status == 1 and "FAIL  control: cannot be told from bf16" in text


def test_random_errors_may_harm(results, judge):
    write_arm(results, "blockwise")
    write_arm(results, "bf16_order", 0.1)
    write_arm(results, "bf16_ulp", 0.1)
    write_arm(results, "bf16_ulp_2", 0.1)
    write_arm(results, "bf16_errors", 2.0)
    write_arm(results, "bf16_errors_ulp", 0.1)
    status, text = judge()
    assert status == 0 and "note  bf16_errors: differs from bf16: held-out loss differs" in text
    assert "ok    bf16_errors_ulp: cannot be told from bf16" in text
    same_order = "by the noise of bf16 arms with the same order"
    assert f"note  bf16_errors, {same_order}: held-out loss differs" in text
    assert f"note  bf16_errors_ulp, {same_order}: no difference" in text
    write_arm(results, "bf16_errors", 2.0, steps=EVALUATIONS[:-1])
    status, text = judge()
    assert status == 1 and "FAIL  bf16_errors: not judged: no evaluation" in text


def test_a_control_that_is_cut_short_proves_nothing(results, judge):
    write_arm(results, "blockwise")
    write_arm(results, "control", 2.0, steps=EVALUATIONS[:-1])
    status, text = judge()
    assert status == 1 and "not judged: no evaluation at step 1200" in text


@pytest.mark.parametrize("name", ["bf16_order", "bf16_ulp", "blockwise"])
def test_an_unfinished_arm_fails(results, judge, name):
    write_arm(results, "blockwise")
    write_arm(results, name, steps=EVALUATIONS[:-1])
    status, text = judge()
    assert status == 1 and "no evaluation at step 1200, of 1200 steps" in text


@pytest.mark.parametrize("name", ["bf16_order", "bf16_ulp"])
def test_a_nan_in_a_bf16_arm_fails(results, judge, name):
    write_arm(results, "blockwise")
    write_arm(results, name, [*QUIET[:-1], NAN])
    status, text = judge()
    assert status == 1 and f"FAIL  {name}: held-out loss is nan at step 1200" in text


def test_an_arm_that_equals_the_baseline_was_not_converted(results, judge):
    write_arm(results, "blockwise", 0.0)
    status, text = judge()
    assert status == 1 and "equal to bf16 at every step: nothing was changed" in text


def test_too_few_evaluations_for_the_trend_are_no_pass(results, judge):
    settings = Settings("tiny", 600, 60, 100, tokens=512, config="", text="", flags=[])
    write_settings(results, settings)
    for name, gaps in {"bf16": 0.0, "blockwise": QUIET}.items():
        write_arm(results, name, gaps, steps=EVALUATIONS[:6])
    status, text = judge()
    assert status == 1 and "fewer than 4 evaluations in the last half" in text


def test_a_resumed_arm_is_compared_with_its_twin(results, judge):
    write_arm(results, "blockwise", NOISY)
    write_arm(results, "blockwise_resumed", NOISY)
    status, text = judge()
    assert status == 0 and "has the losses of blockwise at every step" in text
    write_arm(results, "blockwise_resumed", [*NOISY[:6], *[gap + 0.4 for gap in NOISY[6:]]])
    status, text = judge()
    assert status == 1 and "FAIL  blockwise_resumed: differs from blockwise" in text


def test_a_resumed_arm_repeats_evaluations(results):
    file = results / "bf16/held_out.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    again = [line.replace('"loss": 3', '"loss": 33') for line in lines[4:6]]
    file.write_text("".join([*lines[:6], *again, *lines[6:], '{"step": 1300, "lo']))
    found = read_held_out(results / "bf16")
    assert list(found) == EVALUATIONS
    assert found[400].loss == 3.6 and found[500].loss == 33.5 and found[700].loss == 3.3


@pytest.mark.parametrize(
    "line",
    ["{", "{}", '{"step": 1, "loss": 2}', "[]"]
    + ['{"step": 1, "loss": null, "accuracy": 0, "experts": []}'],
)
def test_a_broken_line_is_an_error(results, judge, line):
    write_arm(results, "blockwise")
    file = results / "blockwise/held_out.jsonl"
    file.write_text(line + "\n" + file.read_text())
    with pytest.raises(InputError, match="line 1"):
        read_held_out(results / "blockwise")
    status, text = judge()
    assert status == 2 and "held_out.jsonl, line 1" in text


@pytest.mark.parametrize("text", ["{", "[]", "{}", "[1]", "\udcff", "every 0"])
def test_broken_settings_are_an_error(results, judge, text):
    write_arm(results, "blockwise")
    file = results / "experiment.json"
    if text == "every 0":
        text = file.read_text().replace(f'"every": {EVERY}', '"every": 0')
    file.write_bytes(text.encode(errors="surrogateescape"))
    status, shown = judge()
    assert status == 2 and f"{file}: " in shown


def test_an_arm_without_evaluations_fails(results, judge):
    write_arm(results, "rowwise")
    write_arm(results, "blockwise")
    (results / "blockwise/held_out.jsonl").unlink()
    status, text = judge()
    assert status == 1 and "FAIL  blockwise: no evaluation" in text and "ok    rowwise" in text


def test_an_unknown_arm_is_an_error(results, judge):
    write_arm(results, "blockwise")
    (results / "blockwise").rename(results / "blokwise")
    status, text = judge()
    assert status == 2 and f"{results / 'blokwise'} is no arm: allowed are bf16, " in text


def test_an_arm_with_other_experts_is_an_error(results, judge):
    write_arm(results, "blockwise")
    file = results / "blockwise/held_out.jsonl"
    file.write_text(file.read_text().replace("[100, 100, 100, 100], ", ""))
    status, text = judge()
    assert status == 2 and "has other experts than 'bf16'" in text


@pytest.mark.parametrize("missing", ["bf16/held_out.jsonl", "experiment.json", "bf16/tb"])
def test_missing_results_are_an_error(results, judge, missing):
    write_arm(results, "blockwise")
    (results / missing).rename(results / "moved")
    status, text = judge()
    assert status == 2 and "converge_verdict: error:" in text


def test_only_bf16_arms_leave_nothing_to_judge(results, judge):
    write_arm(results, "bf16_order")
    assert judge()[0] == 2


def test_text_that_was_read_twice_is_reported(results, judge):
    write_arm(results, "blockwise")
    (results / "blockwise/train.log").write_text("Dataset c4_test is being re-looped\n")
    assert "blockwise read some text more than once" in judge()[1]


def test_the_plots_are_drawn(results, monkeypatch):
    monkeypatch.undo()
    for name in ("bf16_order", "bf16_ulp", "blockwise", "control", "blockwise_resumed"):
        write_arm(results, name, 2.0 if ARMS[name].role == "control" else QUIET)
    assert converge_verdict.main([str(results)]) == 0
    assert (results / "verdict.png").read_bytes().startswith(b"\x89PNG")
