"""The verdict on a convergence experiment, from curves whose gaps and trends are known."""

import json
import shutil

import numpy as np
import pytest
from converge_arms import Settings, write_settings
from convergence_runs import EVALUATIONS, LATE, NAN, NOISY, QUIET, STEPS, write_arm
from loss_runs import dump


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


@pytest.mark.parametrize("step", [1, 8])
def test_a_control_is_not_detected_by_nan(results, judge, step):
    """Neither in warm-up nor after it; what differs elsewhere counts."""
    gaps = [NAN if at == step - 1 else 0.1 for at in range(len(EVALUATIONS))]
    write_arm(results, "control", gaps)
    status, text = judge()
    assert status == 1 and "FAIL  control: differs from bf16 only where it is not finite" in text
    write_arm(results, "control", [*gaps[:-1], 2.0])
    status, text = judge()
    assert status == 0 and "ok    control: differs from bf16: held-out loss" in text


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
@pytest.mark.parametrize("key", ["held-out loss", "accuracy"])
def test_a_nan_in_a_bf16_arm_fails(results, judge, name, key):
    write_arm(results, "blockwise")
    nan = [*[0.0] * 11, NAN]
    write_arm(results, name, **({"accuracy": nan} if key == "accuracy" else {"gaps": nan}))
    status, text = judge()
    assert status == 1 and f"FAIL  {name}: {key} is nan at step 1200" in text


@pytest.mark.parametrize("broken", [{"gaps": [0.3] * 11 + [NAN]}, {"steps": EVALUATIONS[:2]}])
def test_a_broken_bf16_arm_does_not_count_for_the_noise(results, judge, broken):
    """The others are judged as if it were not there, at all of their evaluations."""
    write_arm(results, "blockwise", 0.5)
    write_arm(results, "bf16_ulp", 0.3)
    write_arm(results, "bf16_ulp_2", -0.3)
    assert judge()[0] == 0
    write_arm(results, "bf16_order", **broken)
    status, text = judge()
    assert status == 1 and text.count("FAIL") == text.count("FAIL  bf16_order") > 0
    assert "ok    blockwise: cannot be told from bf16" in text


def test_tolerances_decide_if_too_few_bf16_arms_are_whole(results, judge):
    write_arm(results, "blockwise", 0.2)
    write_arm(results, "bf16_ulp", 0.3)
    write_arm(results, "bf16_ulp_2", [0.3] * 11 + [NAN])
    write_arm(results, "bf16_order", 0.3)
    note = "with fewer than 3 bf16 arms the tolerances alone decide"
    text = judge()[1]
    assert note not in text and "with the same order" not in text
    write_arm(results, "bf16_order", [0.3] * 11 + [NAN])
    assert note in judge()[1]


@pytest.mark.parametrize("count", [0, 1, 8])
def test_an_arm_that_ends_early_leaves_the_others_judged(results, judge, count):
    write_arm(results, "bf16_order", 3.0)
    write_arm(results, "bf16_ulp")
    write_arm(results, "bf16_ulp_2")
    write_arm(results, "rowwise")
    write_arm(results, "blockwise", steps=EVALUATIONS[:count] or EVALUATIONS[:1])
    if not count:
        (results / "blockwise/held_out.jsonl").unlink()
    status, text = judge()
    assert status == 1 and "FAIL  blockwise: " in text
    assert "ok    rowwise: cannot be told from bf16" in text
    assert "note  rowwise, by the noise of bf16 arms with the same order: no difference" in text
    assert "note  blockwise" not in text and "blockwise +" not in text


@pytest.mark.parametrize("name", ["bf16_order", "blockwise_ulp", "rowwise"])
def test_an_arm_that_equals_another_one_was_not_changed(results, judge, name):
    """Also if the other one is not the baseline, or if only the training losses are the same."""
    write_arm(results, "bf16_ulp", 0.1)
    write_arm(results, "blockwise", 0.1)
    source = {"bf16_order": "bf16", "blockwise_ulp": "bf16_ulp", "rowwise": "blockwise"}[name]
    shutil.copytree(results / source, results / name)
    equal = f"equal to {source} at every step: nothing was changed"
    status, text = judge()
    assert status == 1 and f"FAIL  {name}: " in text and equal in text
    write_arm(results, name, 0.1)
    shutil.copy(results / source / "held_out.jsonl", results / name)
    assert equal in judge()[1]
    write_arm(results, name, 0.1)
    shutil.rmtree(results / name / "tb")
    shutil.copytree(results / source / "tb", results / name / "tb")
    assert equal in judge()[1]


@pytest.mark.parametrize("name", ["bf16", "blockwise"])
def test_training_losses_that_end_early_fail(results, judge, name):
    write_arm(results, "blockwise")
    write_arm(results, "rowwise")
    shutil.rmtree(results / name / "tb")
    losses = {step: 5 - step / 1000 for step in EVALUATIONS[:4]}
    dump(results, name, losses)
    status, text = judge()
    fault = "its training losses end at step 400, of 1200 steps"
    assert status == 1 and f"FAIL  {name}: " in text and fault in text


def test_the_baseline_that_ends_early_is_named(results, judge):
    write_arm(results, "blockwise")
    write_arm(results, "bf16", 0.0, steps=EVALUATIONS[:1])
    status, text = judge()
    assert status == 1 and "FAIL  bf16: no evaluation at step 200, of 1200 steps" in text
    assert "blockwise: not judged: bf16: no evaluation at step 200" in text


def test_an_arm_that_equals_the_baseline_was_not_converted(results, judge):
    shutil.copytree(results / "bf16", results / "blockwise")
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
    assert status == 1 and "blockwise_resumed: not judged: was never killed" in text
    (results / "blockwise_resumed/killed").touch()
    status, text = judge()
    assert status == 0 and "has the losses of blockwise at every step" in text
    write_arm(results, "blockwise_resumed", [*NOISY[:6], *[gap + 0.4 for gap in NOISY[6:]]])
    (results / "blockwise_resumed/killed").touch()
    status, text = judge()
    assert status == 1 and "FAIL  blockwise_resumed: differs from blockwise" in text


def test_text_that_was_read_twice_is_reported(results, judge):
    write_arm(results, "blockwise")
    (results / "blockwise/train.log").write_text("Dataset c4_test is being re-looped\n")
    assert "blockwise read some text more than once" in judge()[1]


@pytest.mark.parametrize("whole, count", [("blockwise_resumed", 1), ("bf16_ulp", 8)])
def test_arms_that_end_early_leave_a_plot(results, judge, monkeypatch, whole, count):
    """At step 100 in warm-up, or after it; the others are shown."""
    monkeypatch.undo()
    for name in ("bf16_order", "blockwise", "rowwise", "control"):
        write_arm(results, name, steps=EVALUATIONS[:count])
    write_arm(results, whole)
    if whole == "blockwise_resumed":
        write_arm(results, "blockwise")
        (results / "blockwise_resumed/killed").touch()
    status, text = judge()
    assert status == 1 and f"ok    {whole}: " in text
    assert (results / "verdict.png").exists()


@pytest.mark.parametrize("name", ["bf16", "blockwise"])
def test_a_reference_with_nan_is_named(results, judge, name):
    write_arm(results, "blockwise")
    write_arm(results, "control", 2.0)
    write_arm(results, "blockwise_resumed")
    (results / "blockwise_resumed/killed").touch()
    write_arm(results, name, [0.0] * 11 + [NAN])
    status, text = judge()
    reason = f"not judged: {name}: held-out loss is nan at step 1200"
    judged_by_it = ["blockwise", "control"] if name == "bf16" else ["blockwise_resumed"]
    assert status == 1 and all(f"FAIL  {arm}: {reason}" in text for arm in judged_by_it)


def test_only_broken_arms_are_named(results, judge):
    write_arm(results, "bf16_ulp", steps=EVALUATIONS[:8])
    status, text = judge()
    assert status == 1 and "FAIL  bf16_ulp: no evaluation at step 900, of 1200 steps" in text
    (results / "rowwise").mkdir()
    write_arm(results, "bf16_ulp")
    status, text = judge()
    assert status == 1 and "FAIL  rowwise: no evaluation" in text


def test_an_unconverted_arm_is_found_without_the_first_evaluation(results, judge):
    shutil.copytree(results / "bf16", results / "rowwise")
    file = results / "bf16/held_out.jsonl"
    first = json.dumps({"step": 1, "loss": 9.0, "accuracy": 0.0, "experts": [[1] * 4] * 2})
    file.write_text(first + "\n" + file.read_text())
    status, text = judge()
    assert status == 1 and "FAIL  rowwise: not judged: equal to bf16 at every step" in text
