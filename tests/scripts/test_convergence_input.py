"""What the verdict on a convergence experiment reads, and refuses to read."""

import pytest
from converge_stats import read_held_out
from convergence_runs import EVALUATIONS, EVERY, WARMUP, write_arm
from titan_logs import InputError


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
    [
        "{",
        "{}",
        '{"step": 1, "loss": 2}',
        "[]",
        '{"step": 1, "loss": 2, "accuracy": 0, "experts": 5}',
        '{"step": 1, "loss": null, "accuracy": 0, "experts": []}',
    ],
)
def test_a_broken_line_is_an_error(results, judge, line):
    write_arm(results, "blockwise")
    file = results / "blockwise/held_out.jsonl"
    file.write_text(line + "\n" + file.read_text())
    with pytest.raises(InputError, match="line 1"):
        read_held_out(results / "blockwise")
    status, text = judge()
    assert status == 2 and "held_out.jsonl, line 1" in text


@pytest.mark.parametrize("text", ["{", "[]", "{}", "[1]", "\udcff", "every 0", "warmup"])
def test_broken_settings_are_an_error(results, judge, text):
    write_arm(results, "blockwise")
    file = results / "experiment.json"
    if text == "every 0":
        text = file.read_text().replace(f'"every": {EVERY}', '"every": 0')
    if text == "warmup":
        text = file.read_text().replace(f'"warmup": {WARMUP}', '"warmup": "120"')
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
