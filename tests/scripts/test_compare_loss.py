"""compare_loss.py: the numbers of its table, and who passes."""

import math
import os
import re

import pytest
from loss_runs import compare, curve, dump, write_log


@pytest.fixture
def base(tmp_path):
    return dump(tmp_path, "bf16", curve(range(1, 101)))


def test_the_numbers_of_the_table(tmp_path):
    steps = range(1, 101)
    slow_start = {step: 10.0 if step <= 10 else 1000.0 for step in steps}
    peak = {step: 20.0 if step == 50 else 10.0 for step in steps}
    a = dump(
        tmp_path, "bf16", curve(steps), tps=slow_start, memory=peak, validation={50: 5.0, 90: 4.0}
    )
    b = dump(
        tmp_path, "fp8", curve(steps, 0.2), tps=1250.0, memory=15.0, validation={50: 5.0, 90: 4.2}
    )
    out = tmp_path / "new folder" / "plot.png"
    status, rows, _ = compare(a, b, out=out)
    assert status == 0
    assert rows["final loss"] == ["7.00000", "7.01400"]
    assert rows["mean of last 20 steps"] == ["7.09500", "7.10919"]
    assert rows["gap of the means"][1].startswith("+0.2000")
    assert rows["largest smoothed gap"][1].startswith("+0.2000")
    assert rows["validation loss"] == ["4.00000", "4.20000 (+5.00000 % at step 90)"]
    assert rows["tokens/s ratio"][1] == "1.250"
    assert rows["peak memory ratio"][1] == "0.750"
    assert out.is_file()


@pytest.mark.parametrize(
    ("gap", "tolerance", "status"),
    [
        (0.0, 0.25, 1),
        (0.24, 0.25, 0),
        (-0.24, 0.25, 0),
        (0.26, 0.25, 1),
        (-0.26, 0.25, 1),
        (0.26, 0.3, 0),
    ]
    + [(0.25, 0.25, 0), (0.2501, 0.25, 1), (0.01, 0, 1)],
)
def test_the_gap_decides(tmp_path, base, gap, tolerance, status):
    other = dump(tmp_path, "fp8", curve(range(1, 101), gap))
    assert compare(base, other, "--tolerance", tolerance)[0] == status


def test_the_bar_is_met_within_the_precision_of_a_loss(tmp_path):
    """In FP32 4.01 is 4.01000023, and its gap to 4 is 0.2500057 %."""
    a = dump(tmp_path, "bf16", dict.fromkeys(range(1, 41), 4.0))
    for loss, status in ((4.01, 0), (3.99, 0), (4.01001, 1)):
        b = dump(tmp_path, f"fp8_{loss}", dict.fromkeys(range(1, 41), loss))
        assert compare(a, b)[0] == status


def test_speed_is_the_median_from_step_6_on(tmp_path):
    steps = range(1, 14)
    tps = dict(zip(steps, [1.0] * 5 + [100.0] * 4 + [200.0] * 4, strict=True))
    a = dump(tmp_path, "bf16", curve(steps), tps=150.0)
    b = dump(tmp_path, "fp8", curve(steps, 0.1), tps=tps)
    assert compare(a, b)[1]["tokens/s ratio"][1] == "1.000"


def test_only_the_last_steps_decide(tmp_path, base):
    late = curve(range(1, 81), 5.0) | curve(range(81, 101), 0.1)
    other = dump(tmp_path, "fp8", late)
    status, rows, _ = compare(base, other)
    assert (status, rows["gap of the means"][1][:7]) == (0, "+0.1000")
    assert rows["largest smoothed gap"][1].startswith("+5.0000")
    assert compare(base, other, "--last", 25)[0] == 1


def test_the_smoothed_gap_is_over_whole_windows(tmp_path, base):
    spike = curve(range(1, 101), 0.1) | curve([1], 10.0) | curve([60], -2.0)
    _, rows, _ = compare(base, dump(tmp_path, "fp8", spike), "--last", 10)
    # ten steps at +0.1 %, of which one is at +10 %; ten later windows hold the -2 %
    gap, step = re.match(r"([+-][\d.]+) % at step (\d+)", rows["largest smoothed gap"][1]).groups()
    assert float(gap) == pytest.approx(1.09, abs=0.01) and step == "10"


def test_equal_runs_fail(tmp_path, base):
    same = dump(tmp_path, "fp8", curve(range(1, 101)))
    status, _, text = compare(base, same)
    assert status == 1 and "nothing was converted" in text
    log = write_log(tmp_path / "same.log", curve(range(1, 101)))
    assert "nothing was converted" in compare(base, log)[2]  # equal but for the log's rounding
    status, _, text = compare(base, base)
    assert status == 1 and "bf16 (2)" in text


def test_one_differing_step_is_a_conversion(tmp_path, base):
    other = dump(tmp_path, "fp8", curve(range(1, 101)) | curve([3], 0.001))
    assert compare(base, other)[0] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["baseline", "run", "noise"])
def test_non_finite_losses_fail(tmp_path, base, bad, where):
    names = {"baseline": 0.0, "run": 0.1, "noise": 0.2}
    losses = {name: curve(range(1, 101), gap) for name, gap in names.items()}
    losses[where][17] = bad
    a, b, noise = (dump(tmp_path, name, losses[name]) for name in names)
    status, _, text = compare(a, b, "--noise", noise)
    assert status == 1 and re.search(rf"FAIL +{where}.*: loss is {bad} at step 17", text)


def test_other_non_finite_values_fail(tmp_path, base):
    nan = float("nan")
    for name, tags in {"a": {"grad_norm": {9: nan}}, "b": {"validation": {9: nan}}}.items():
        status, _, text = compare(base, dump(tmp_path, name, curve(range(1, 101), 0.1), **tags))
        assert status == 1 and "is nan at step 9" in text


def test_nan_in_a_log(tmp_path):
    a = write_log(tmp_path / "a.log", curve(range(1, 31)))
    b = write_log(tmp_path / "b.log", curve(range(1, 31), 0.1) | {30: float("nan")})
    status, _, text = compare(a, b)
    assert status == 1 and "loss is nan at step 30" in text


@pytest.mark.parametrize(("noise", "status", "bar"), [(-0.8, 0, 0.8), (0.1, 1, 0.25)])
def test_noise_widens_the_bar(tmp_path, base, noise, status, bar):
    fp8 = dump(tmp_path, "fp8", curve(range(1, 101), 0.5))
    second = dump(tmp_path, "fp32", curve(range(1, 101), noise))
    assert compare(base, fp8)[0] == 1
    result, _, text = compare(base, fp8, "--noise", second)
    assert result == status
    printed = re.search(r"allowed gap: (\S+) %.* tolerance (\S+) %, noise (\S+) %", text).groups()
    assert [*map(float, printed)] == pytest.approx([bar, 0.25, abs(noise)], rel=1e-3)


def test_noise_that_measures_nothing(tmp_path, base):
    fp8 = dump(tmp_path, "fp8", curve(range(1, 101), 0.1))
    status, _, text = compare(base, fp8, "--noise", base)
    assert status == 0 and "measures no noise" in text


def test_each_of_several_runs_is_judged(tmp_path, base):
    good = dump(tmp_path, "good", curve(range(1, 101), 0.1))
    bad = dump(tmp_path, "bad", curve(range(1, 101), 0.4))
    status, rows, text = compare(base, bad, good)
    assert status == 1 and "FAIL  bad" in text and re.search(r"ok +good", text)
    assert len(rows["final loss"]) == 3


def test_runs_of_different_length(tmp_path, base):
    short = dump(tmp_path, "fp8", curve(range(1, 51), 0.1))
    for pair in ((base, short), (short, base)):
        status, _, text = compare(*pair)
        assert status == 0 and "compared over the 50 in common, 1-50" in text
    assert compare(base, short)[1]["final loss"] == ["7.00000", "7.50750 (baseline 7.50000)"]


def test_runs_that_log_at_other_intervals(tmp_path, base):
    sparse = curve([1], 9.0) | curve(range(10, 101, 10), 0.1)
    status, rows, text = compare(base, dump(tmp_path, "fp8", sparse))
    assert status == 0 and "the 11 in common" in text
    # the last 20 training steps, of which 90 is not one and 100 is
    assert rows["mean of last 20 steps"][1] == "7.05705 (baseline 7.05000)"


def test_a_window_longer_than_the_run(tmp_path):
    a = dump(tmp_path, "bf16", curve(range(1, 6)))
    b = dump(tmp_path, "fp8", curve(range(1, 6), 0.1))
    status, rows, text = compare(a, b, "--last", 1000)
    assert status == 0 and "fewer than 1000 steps" in text
    assert rows["mean of last 1000 steps"][0] == "7.97000"


def test_a_single_step(tmp_path):
    a = dump(tmp_path, "bf16", {1: 8.0}, tps=100.0)
    b = dump(tmp_path, "fp8", {1: 8.008}, tps=100.0)
    status, rows, _ = compare(a, b)
    assert status == 0 and rows["tokens/s ratio"][1] == "n/a"  # all of it is warm-up


def test_labels_tell_runs_apart(tmp_path):
    runs = [dump(tmp_path, f"{x}/out", curve(range(1, 31), x)) for x in (0, 0.125, 0.25)]
    _, rows, text = compare(*runs, "--tolerance", 1)
    assert re.match(r" +0/out +0.125/out +0.25/out\n", text)


@pytest.mark.filterwarnings("error")
def test_a_run_that_cannot_be_plotted_well_is_judged(tmp_path, base):
    """One with a single loss, which is NaN, and with broken mathematics in its label."""
    run = dump(tmp_path, "$x_{$", {1: math.nan})
    status, _, text = compare(base, run, out=tmp_path / "plot.png")
    assert status == 1 and "FAIL  $x_{$: loss is nan at step 1" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--last", "0"], "--last"), (["--tolerance", "-1"], "--tolerance")]
    + [(["--tolerance", "nan"], "--tolerance"), (["--tolerance", "x"], "--tolerance")],
)
def test_options_are_checked(base, options, message):
    status, _, text = compare(base, base, *options)
    assert status == 2 and f"error: {'argument ' * ('x' in options)}{message}" in text
    assert compare(base)[0] == 2


def test_a_run_is_not_its_own_noise(base, tmp_path):
    other = dump(tmp_path, "fp8", curve(range(1, 101), 9))
    status, _, text = compare(base, other, "--noise", other)
    assert status == 2 and f"--noise = {other} is a RUN" in text


def test_a_plot_that_cannot_be_written(tmp_path, base):
    other = dump(tmp_path, "fp8", curve(range(1, 101), 0.1))
    status, _, text = compare(base, other, out=tmp_path)
    assert status == 2 and str(tmp_path) in text.splitlines()[-1]


def test_a_log_whose_name_is_not_utf_8_is_shown(tmp_path, base, monkeypatch):
    """CI's quickstart calls the command."""
    monkeypatch.chdir(tmp_path)
    dump(tmp_path, "fp8", curve(range(1, 101), 0.3))
    log = write_log(tmp_path / os.fsdecode(b"\xe9"), curve(range(1, 101), 0.1))
    status, _, text = compare("bf16", "fp8", log.name)
    assert status == 1 and "FAIL  fp8: the gap of +0.300" in text
    assert "ok    \\udce9\n" in text and "\033" not in text


def test_a_plot_and_event_files_whose_names_are_not_utf_8(tmp_path, base):
    """TensorBoard cannot read such event files."""
    other = dump(tmp_path, "fp8", curve(range(1, 101), 0.1))
    out = tmp_path / os.fsdecode(b"\xe8.png")
    assert compare(base, other, out=out)[0] == 0 and out.is_file()
    other = other.rename(tmp_path / os.fsdecode(b"\xe8"))
    status, _, text = compare(base, other)
    assert status == 2 and "TensorBoard reads only names in UTF-8" in text


def test_windows_of_any_length(tmp_path, base):
    other = dump(tmp_path, "fp8", curve(range(1, 101), 0.1))
    status, rows, text = compare(base, other, "--last", "9" * 20)
    assert status == 0 and rows["gap of the means"][1].startswith("+0.1000")
    assert f"fp8 has fewer than {'9' * 20} steps to compare" in text
