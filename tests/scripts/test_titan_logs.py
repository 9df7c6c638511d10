"""titan_logs.py, called through compare_loss.py: every layout of a run on disk."""

import pytest
import titan_logs
from loss_runs import LOSS, SCRIPTS, compare, curve, dump, log_line, write_events, write_log


@pytest.fixture
def base(tmp_path):
    return dump(tmp_path, "bf16", curve(range(1, 101)))


def test_a_resumed_run_is_merged_by_step(tmp_path, base):
    fp8 = dump(tmp_path, "fp8", curve(range(1, 61), 3.0), time=1000.0)
    dump(tmp_path, "fp8", curve(range(51, 96), 0.1), date="20260101-0005", time=2000.0)
    # Resumed again within the minute, so in the same folder: ordered by time, not by name.
    write_events(fp8 / "tb" / "20260101-0005", curve(range(91, 101), 0.2), time=3000.0)
    assert compare(base, fp8)[1]["steps"][1] == "1-100"
    gap = compare(base, fp8, "--last", 10)[1]["gap of the means"][1]
    assert gap.startswith("+0.2000")
    gap = compare(base, fp8, "--last", 50)[1]["gap of the means"][1]
    assert 0.1 < float(gap.split()[0]) < 0.13


def test_the_later_write_wins_whatever_the_folders_name(tmp_path, base):
    fp8 = dump(tmp_path, "fp8", curve(range(1, 101), 0.1), date="20260101-0000", time=2000.0)
    dump(tmp_path, "fp8", curve(range(1, 101), 3.0), date="20260101-0005", time=1000.0)
    assert compare(base, fp8)[0] == 0


def test_a_nan_that_a_resume_overwrote_is_gone(tmp_path, base):
    fp8 = dump(tmp_path, "fp8", curve(range(1, 60), 0.1) | {60: float("nan")}, time=1000.0)
    dump(tmp_path, "fp8", curve(range(51, 101), 0.1), date="20260101-0005", time=2000.0)
    assert compare(base, fp8)[0] == 0


def test_two_runs_in_one_dated_folder_are_refused(tmp_path, base):
    shared = dump(tmp_path, "shared", curve(range(1, 101)), time=1000.0)
    dump(tmp_path, "shared", curve(range(1, 101), 0.1), time=1000.5)
    status, _, text = compare(base, shared)
    assert status == 2 and "at the same time" in text
    files = sorted(shared.rglob("*tfevents*"))
    assert all(file.name in text for file in files)
    assert sorted(compare(base, file)[0] for file in files) == [0, 1]


def test_a_folder_of_several_runs_is_refused(tmp_path, base):
    dump(tmp_path, "fp8", curve(range(1, 101), 0.1))
    status, _, text = compare(base, tmp_path)
    assert status == 2 and "several runs" in text and str(tmp_path / "fp8" / "tb") in text


def test_ranks_of_one_run(tmp_path, base):
    folder = tmp_path / "fp8" / "tb" / "20260101-0000"
    write_events(folder / "rank_0", dict.fromkeys(range(1, 101), -1.0), memory=40.0, time=1000.3)
    write_events(folder / "rank_1", dict.fromkeys(range(1, 101), -2.0), memory=20.0, time=1000.2)
    write_events(folder / "rank_2", curve(range(1, 101), 0.1), memory=30.0, time=1000.0)
    write_events(folder / "rank_3", curve(range(1, 101), 0.10001), memory=30.0, time=1000.1)
    memory = dump(tmp_path, "bf16_memory", curve(range(1, 101)), memory=80.0)
    status, rows, _ = compare(memory, tmp_path / "fp8")
    assert status == 0 and rows["gap of the means"][1].startswith("+0.1000")
    assert rows["peak memory ratio"][1] == "0.500"


def test_logs_of_many_ranks(tmp_path):
    text = "[rank0]:[titan] 2026-01-01 00:00:00,000 - root - INFO - Training starts at step 1\n"
    for step, loss in curve(range(1, 41), 0.1).items():
        text += log_line(step, -1.0, rank="[rank0]:") + log_line(step, loss, rank="[rank2]:")
        text += log_line(step, loss, rank="[rank3]:") + log_line(step, -1.0, rank="[rank1]:")
        if step == 20:
            text += "[rank2]:\033[33mvalidate step: 20  \033[32mloss:  4.4000  "
            text += "\033[38;2;54;234;195mmemory: 99.00GiB(99.00%)  \033[34mtps: 9\033[39m\n"
    (tmp_path / "fp8.log").write_text(text)
    base = dump(
        tmp_path, "bf16", curve(range(1, 41)), validation={20: 4.0}, tps=20246.0, memory=140.22
    )
    status, rows, text = compare(base, tmp_path / "fp8.log")
    assert status == 0 and "five decimals" in text
    assert rows["steps"][1] == "1-40"
    assert float(rows["gap of the means"][1].split()[0]) == pytest.approx(0.1, abs=1e-3)
    assert rows["validation loss"][1] == "4.40000 (+10.00000 % at step 20)"
    assert rows["tokens/s ratio"][1] == rows["peak memory ratio"][1] == "0.500"


@pytest.mark.parametrize("color", [True, False])
def test_log_against_log(tmp_path, color):
    a = write_log(tmp_path / "a.log", curve(range(1, 41)), color=color)
    losses = curve(range(1, 41), 0.1)
    b = write_log(tmp_path / "b.log", losses, color=color, memory="35.05GiB(39.40%)")
    status, rows, _ = compare(a, b)
    assert status == 0
    assert rows["tokens/s ratio"][1] == "1.000" and rows["peak memory ratio"][1] == "0.500"


def test_a_log_of_a_resumed_run(tmp_path, base):
    log = write_log(tmp_path / "fp8.log", curve(range(1, 90), 5.0))
    with log.open("a") as file:
        file.writelines(log_line(s, x) for s, x in curve(range(81, 101), 0.1).items())
    assert compare(base, log)[0] == 0


def test_a_log_cut_in_a_loss(tmp_path, base):
    whole = curve(range(1, 100), 0.1)
    log = write_log(tmp_path / "fp8.log", whole)
    cut = log_line(100, 7.00700)
    log.write_text(log.read_text() + cut[: cut.index("7.00700") + 3])
    assert compare(base, log)[1]["steps"][1] == "1-99"


def test_an_event_file_cut_short(tmp_path, base):
    fp8 = dump(tmp_path, "fp8", curve(range(1, 101), 0.1))
    (file,) = fp8.rglob("*tfevents*")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    status, rows, text = compare(base, fp8)
    assert status == 0 and "(baseline " in rows["final loss"][1]
    assert 40 < int(rows["steps"][1].split("-")[1]) < 60


@pytest.mark.parametrize("tags", [{}, {"tps": 0.0, "memory": 0.0}])
def test_no_speed_or_memory_to_compare(tmp_path, tags):
    a = dump(tmp_path, "bf16", curve(range(1, 31)), tps=100.0, memory=1.0)
    b = dump(tmp_path, "fp8", curve(range(1, 31), 0.1), **tags)
    for pair in ((a, b), (b, a)):
        _, rows, _ = compare(*pair)
        assert rows["tokens/s ratio"][1] == rows["peak memory ratio"][1] == "n/a"
        assert rows["validation loss"][1] == "n/a"


def test_no_speed_of_an_emulated_run(tmp_path, monkeypatch):
    steps = range(1, 31)
    a = dump(tmp_path, "bf16", curve(steps), tps=100.0, memory=1.0)
    b = dump(tmp_path, "fp8", curve(steps, 0.1), tps=100.0, memory=1.0)
    assert compare(a, b)[1]["tokens/s ratio"][1] == "1.000"
    dated = b / "tb" / "20260101-0000"
    monkeypatch.chdir(dated)
    undated = write_events(tmp_path / "undated", curve(steps, 0.1), tps=100.0)
    for folder in (b, undated):
        (folder / "train.log").write_text("[titan] - root - WARNING - titan_fp8: FP8 is emulated\n")
    for run in (b, b / "tb", dated, ".", next(dated.iterdir()), undated):
        assert compare(a, run)[1]["tokens/s ratio"][1] == "n/a"
        assert compare(run, a)[1]["tokens/s ratio"][1] == "n/a"  # an emulated baseline
    log = write_log(tmp_path / "fp8.log", curve(steps, 0.1))
    log.write_text('[titan] - root - INFO - {"emulate": false}\n' + log.read_text())
    assert compare(a, log)[1]["tokens/s ratio"][1] != "n/a"
    log.write_text("titan_fp8: FP8 is emulated\n" + log.read_text())
    assert compare(a, log)[1]["tokens/s ratio"][1] == "n/a"


def test_a_speed_without_a_log_has_a_note(tmp_path):
    steps = range(1, 31)
    a = dump(tmp_path, "bf16", curve(steps), tps=100.0)
    b = dump(tmp_path, "fp8", curve(steps, 0.1), tps=100.0)
    assert "note: no log found with bf16, fp8: if FP8 was emulated" in compare(a, b)[2]
    (a / "train.log").write_text("")
    assert "no log found with fp8:" in compare(a, b)[2]
    (b / "train.log").write_text("")
    assert "no log found" not in compare(a, b)[2]


def test_the_package_logs_what_marks_an_emulated_run():
    sources = (SCRIPTS.parent / "titan_fp8").rglob("*.py")
    assert any(titan_logs.EMULATED in source.read_text() for source in sources)


def test_no_speed_without_an_accelerator(tmp_path):
    """The speed of a bf16 run on a CPU is not compared either; memory is -1 byte there."""
    steps = range(1, 31)
    gpu = dump(tmp_path, "gpu", curve(steps), tps=100.0, memory=1.0)
    events = dump(tmp_path, "bf16", curve(steps), tps=100.0, memory=-1 / 2**30)
    log = write_log(tmp_path / "fp8.log", curve(steps, 0.1), memory="-0.00GiB(-0.00%)")
    for pair in ((events, log), (gpu, log), (events, gpu)):
        rows = compare(*pair)[1]
        assert rows["tokens/s ratio"][1] == rows["peak memory ratio"][1] == "n/a"


def test_every_way_to_name_a_run(tmp_path, base, monkeypatch):
    fp8 = dump(tmp_path, "fp8", curve(range(1, 101), 0.1))
    monkeypatch.chdir(tmp_path)
    dated = fp8 / "tb" / "20260101-0000"
    for run in ("fp8", "fp8/", "./fp8/tb/", dated, f"{dated}/", next(dated.iterdir())):
        assert compare("bf16/", run)[0] == 0


def test_inputs_that_cannot_be_compared(tmp_path, base):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.log").write_text("no steps here\n")
    (tmp_path / "events.out.tfevents.0").write_bytes(b"rubbish" * 9)
    dump(tmp_path, "no_loss", {}, tps={1: 10.0})
    dump(tmp_path, "stage", dict.fromkeys(range(1, 9), -1.0))
    dump(tmp_path, "later", curve(range(200, 210)))
    messages = {
        "missing": "no such file or folder",
        "empty": "no TensorBoard event file in",
        "text.log": "no line of torchtitan's",
        "events.out.tfevents.0": f"no {LOSS}",
        "no_loss": f"no {LOSS}",
        "stage": "no loss but the -1",
        "later": "no step in common: 200-209 and 1-100",
    }
    for name, message in messages.items():
        for order in ((base, tmp_path / name), (tmp_path / name, base)):
            if name == "later" and order[1] == base:
                message = "no step in common: 1-100 and 200-209"
            status, _, text = compare(*order)
            assert (status, text.count("\n")) == (2, 1), text
            assert message in text and name in text
