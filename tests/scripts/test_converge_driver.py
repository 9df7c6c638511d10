"""converge.py: its arguments, and how it runs, kills, resumes and refuses arms.

A shell script takes the place of train.sh (convergence_jobs.py).
"""

import json
import os
import re

import converge
import converge_jobs
import pytest
from converge_arms import read_settings
from convergence_jobs import calls, results


def test_arms_run_from_the_seed_and_are_not_run_again(root, run):
    status, text = run("--arms", "bf16,blockwise")
    assert status == 0 and "== blockwise is finished" in text
    assert calls(root) == ["seed", "bf16", "blockwise"]
    assert not (results(root) / "bf16/checkpoint").exists()
    command = (results(root) / "blockwise/train.log").read_text().splitlines()[0]
    seed = results(root) / "seed/checkpoint/step-0"
    for flags in (
        "--quantize.linear.titan_fp8.recipe blockwise",
        "--training.steps 100 --lr_scheduler.warmup_steps 10",
        f"--checkpoint.initial_load_path {seed}",
    ):
        assert flags in command
    settings = read_settings(results(root))
    assert (settings.steps, settings.warmup, settings.every, settings.tokens) == (100, 10, 20, 16)
    assert run("--arms", "bf16,blockwise,control")[0] == 0
    assert calls(root) == ["seed", "bf16", "blockwise", "control"]
    command = (results(root) / "control/train.log").read_text()
    assert "--model.converters quantize.linear.titan_fp8,converge.control" in command


def test_a_failed_arm_is_reported_and_the_others_run(root, run):
    status, text = run("--arms", "rowwise,bf16")
    assert status == 3 and "out of memory" in text and "converge: failed: rowwise" in text
    assert "== bf16 is finished" in text


def test_arms_run_side_by_side_on_their_own_gpus(root, run, monkeypatch):
    monkeypatch.setattr(converge, "devices", lambda: ("3", "5", "6"))
    monkeypatch.setenv("PAUSE", "0.05")
    assert run("--arms", "bf16,blockwise,control", "--", "--debug.seed", "1")[0] == 0
    assert calls(root)[0] == "seed 3"
    assert sorted(calls(root)[1:]) == ["bf16 3", "blockwise 5", "control 6"]


def test_a_resumed_arm_is_killed_once_in_the_middle(root, run):
    status, text = run("--arms", "bf16_resumed")
    assert status == 0 and "was killed at step" in text
    assert calls(root) == ["seed", "bf16_resumed", "bf16_resumed"]
    assert (results(root) / "bf16_resumed/killed").read_text() in ("step 60\n", "step 70\n")
    lines = (results(root) / "bf16_resumed/held_out.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in lines} == {20, 40, 60, 80, 100}
    log = (results(root) / "bf16_resumed/train.log").read_text()
    assert log.count("step: 10 ") == 1 and log.count("step: 100 ") == 1


launch = converge_jobs.launch


def test_the_time_limit_stops_all_processes_and_the_next_call_goes_on(root, run, monkeypatch):
    monkeypatch.setenv("PAUSE", "60")
    jobs = []
    monkeypatch.setattr(converge, "launch", lambda *args: jobs.append(launch(*args)) or jobs[-1])
    status, text = run("--arms", "bf16", "--minutes", "0.1")
    assert status == 3 and "the time is up" in text and len(jobs) == 2
    assert all(job.process.poll() is not None for job in jobs)
    monkeypatch.setenv("PAUSE", "0")
    assert run("--arms", "bf16")[0] == 0
    assert (results(root) / "bf16/train.log").read_text().count("step: 100 ") == 1


def test_no_arm_starts_after_the_time_limit(root, run):
    status, text = run("--arms", "bf16", "--minutes", "0")
    assert status == 3 and "the time is up" in text
    assert calls(root) == ["seed"] and not (results(root) / "bf16").exists()
    assert run("--arms", "bf16")[0] == 0
    assert run("--arms", "bf16", "--minutes", "0")[0] == 0  # it is finished


def test_unusable_checkpoints_are_dropped(root, run):
    args = converge.parse(["m", "--arms", "bf16"])
    experiment = converge.read_experiment(args)
    folder = experiment.folder("bf16")
    for step in (20, 40, 60, 80):
        (folder / f"checkpoint/step-{step}").mkdir(parents=True)
        if step != 80:  # cut short
            (folder / f"checkpoint/step-{step}/.metadata").touch()
    line = '{{"step": {}, "loss": 3.0, "accuracy": 0.5, "experts": []}}\n'
    (folder / "held_out.jsonl").write_text(line.format(20) + line.format(40))  # not at 60
    converge.drop_unusable_checkpoints(experiment, "bf16")
    assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == ["step-20", "step-40"]
    (folder / "held_out.jsonl").unlink()
    converge.drop_unusable_checkpoints(experiment, "bf16")
    assert not (folder / "checkpoint").exists()


def test_the_order_of_the_text_is_another_but_always_the_same(root, run):
    assert run("--arms", "bf16_order")[0] == 0
    original = (root / "text/text.jsonl").read_text().splitlines()
    reordered = (results(root) / "reordered_1/text.jsonl").read_text().splitlines()
    assert sorted(reordered) == sorted(original) and reordered != original
    assert run("--arms", "bf16_order", "--out", str(root / "again"))[0] == 0
    assert (root / "again/reordered_1/text.jsonl").read_text().splitlines() == reordered
    command = (root / "again/bf16_order/train.log").read_text()
    assert f"--training.dataset_path {root / 'again/reordered_1'}" in command


def test_rounding_arms_have_their_own_random_bits(root, run):
    arms = {"bf16": [], "bf16_order": [], "bf16_rounding": ["1"], "bf16_rounding_2": ["2"]}
    flags = ("--", "--training.dtype", "bfloat16")
    assert run("--arms", ",".join(arms), *flags)[0] == 0
    for name, seeds in arms.items():
        command = (results(root) / name / "train.log").read_text().splitlines()[0]
        assert re.findall(r"--optimizer.rounding_seed (\S+)", command) == seeds


def test_perturbed_arms_start_from_a_checkpoint_of_their_own(root, run):
    assert run("--arms", "bf16_ulp,bf16,bf16_ulp_2")[0] == 0
    assert calls(root) == ["seed", "seed_ulp_1", "seed_ulp_2", "bf16_ulp", "bf16", "bf16_ulp_2"]
    for arm, seed, number in (
        ("bf16", "seed", []),
        ("bf16_ulp", "seed_ulp_1", ["1"]),
        ("bf16_ulp_2", "seed_ulp_2", ["2"]),
    ):
        loads = f"--checkpoint.initial_load_path {results(root) / seed}/checkpoint/step-0"
        for folder in (arm, seed):
            command = (results(root) / folder / "train.log").read_text().splitlines()[0]
            assert (loads in command) == (folder == arm)
            assert re.findall(r"--optimizer.perturbation_seed (\S+)", command) == number


def test_without_checkpoints_the_weights_are_perturbed_in_the_arm(root, run):
    assert run("--arms", "bf16,bf16_ulp", "--no-checkpoints")[0] == 0
    assert calls(root) == ["bf16", "bf16_ulp"]
    assert "perturbation_seed" not in (results(root) / "bf16/train.log").read_text()
    assert "--optimizer.perturbation_seed 1" in (results(root) / "bf16_ulp/train.log").read_text()


def test_other_settings_need_another_folder(root, run):
    assert run("--arms", "bf16")[0] == 0
    for flags in (["--steps", "40"], ["--", "--optimizer.lr", "1"]):
        status, text = run("--arms", "bf16", *flags)
        assert status == 2 and "holds an experiment with other settings" in text
    assert run("--arms", "bf16", "--steps", "40", "--out", str(root / "short"))[0] == 0
    toml = root / "configs/m.toml"
    toml.write_text("# A comment is no setting.\n" + toml.read_text())
    assert run("--arms", "bf16")[0] == 0
    toml.write_text(toml.read_text().replace("seed = 7", "seed = 1"))
    assert run("--arms", "bf16")[0] == 2


def test_flags_count_for_the_driver(root, run):
    """As torchtitan reads them, also keys that the TOML does not have."""
    flags = ["--training.local_batch_size", "4", "--validation.freq=50"]
    flags += ["--parallelism.tensor_parallel_degree", "2"]  # reads the same text
    run("--arms", "bf16", "--", *flags, "--parallelism.data_parallel_replicate_degree", "2")
    settings = read_settings(results(root))
    assert (settings.tokens, settings.every) == (4 * 8 * 2, 50)
    with pytest.raises(SystemExit) as stopped:
        run("--arms", "bf16", "--", "--training.batch", "4")
    assert stopped.value.code == 2


def test_a_broken_evaluation_is_named(root, run):
    assert run("--arms", "bf16")[0] == 0
    (results(root) / "bf16/held_out.jsonl").write_text('{"step": 20}\n')
    status, text = run("--arms", "bf16")
    assert status == 2 and "bf16/held_out.jsonl, line 1" in text


def test_without_checkpoints_every_arm_starts_anew(root, run):
    assert run("--arms", "bf16", "--no-checkpoints")[0] == 0
    assert calls(root) == ["bf16"]
    command = (results(root) / "bf16/train.log").read_text()
    assert "--checkpoint.no_enable" in command and "initial_load_path" not in command


@pytest.mark.parametrize("flags", [[], ["--no-checkpoints"]])
@pytest.mark.parametrize("name", ["seed/notes", "bf16/notes", "notes", "lock"])
def test_files_of_others_are_kept(root, run, flags, name):
    file = results(root) / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    status, text = run("--arms", "bf16", *flags)
    refused = f"{results(root)} is not empty and holds no experiment"
    assert (status, refused in text) == ((0, False) if name == "lock" else (2, True))
    assert file.read_text() == "mine"


def test_folders_of_others_in_an_experiment_are_kept(root, run):
    assert run("--arms", "bf16", "--no-checkpoints")[0] == 0
    (results(root) / "blockwise").mkdir()
    (results(root) / "blockwise/notes").touch()
    status, text = run("--arms", "bf16,blockwise", "--no-checkpoints")
    assert status == 2 and f"{results(root) / 'blockwise'} is not of this experiment" in text
    assert (results(root) / "blockwise/notes").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "50"], "50 steps are no multiple of validation.freq = 20"),
        (["--", "--parallelism.data_parallel_shard_degree", "-1"], "must say every degree"),
        (
            ["--", "--parallelism.data_parallel_shard_degree", "-1"]
            + ["--parallelism.data_parallel_replicate_degree", "-1"],
            "must say every degree",
        ),
        (["--", "--training.dataset_path", "nowhere"], "no text in nowhere"),
        (["--", "--validation.freq", "0"], "100 steps are no multiple of validation.freq = 0"),
        (["--", "--validation.freq", "-20"], "100 steps are no multiple of validation.freq = -20"),
        (["--out", "configs/m.toml"], "--out"),
        (["--out", os.fsdecode(b"\xe9")], "TensorBoard reads only names in UTF-8"),
        (["--", "--checkpoint.no_enable"], "use --no-checkpoints"),
        (
            ["--", "--job.custom_config_module", "titan_fp8.plugin"]
            + ["--model.converters", "quantize.linear.titanfp8"],
            "there is no 'quantize.linear.titanfp8'",
        ),
        (["--arms", "bf16,bf16_rounding"], "bf16_rounding needs training.dtype = 'bfloat16'"),
        (
            ["--arms", "bf16,bf16_resumed", "--", "--checkpoint.interval", "60"],
            "checkpoint.interval = 60 must be at most 50",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(root, run, monkeypatch, flags, message):
    monkeypatch.chdir(root)
    status, text = run("--arms", "bf16", *flags)
    assert status == 2 and message in text
    assert not results(root).exists()


def test_two_calls_do_not_write_to_one_folder(root, run):
    experiment = converge.read_experiment(converge.parse(["m"]))
    with converge.opened(experiment):
        status, text = run("--arms", "bf16")
    assert status == 2 and f"another converge.sh is writing to {results(root)}" in text
    assert run("--arms", "bf16")[0] == 0


def test_a_reference_that_does_not_run_is_named(root, run):
    note = "== the verdict also needs the arm {}\n"
    assert note.format("bf16") in run("--arms", "blockwise")[1]
    text = run("--arms", "bf16,rowwise_with_gw_hp")[1]
    assert "the verdict also needs" not in text
    text = run("--arms", "blockwise_resumed")[1]
    assert "the verdict also needs" not in text  # both have run
    text = run("--arms", "bf16,blockwise_resumed", "--out", str(root / "other"))[1]
    assert note.format("blockwise") in text and note.format("bf16") not in text


def test_a_toml_without_checkpoints_is_refused(root, run):
    toml = root / "configs/m.toml"
    toml.write_text(toml.read_text().replace("enable = true", ""))
    status, text = run("--arms", "bf16")
    assert status == 2
    assert "checkpoint.enable = false: use --no-checkpoints, before --" in text
    assert run("--arms", "bf16", "--no-checkpoints")[0] == 0
    flags = ("--out", str(root / "with"), "--", "--checkpoint.enable")
    assert run("--arms", "bf16", *flags)[0] == 0


@pytest.mark.parametrize(
    ("line", "flags", "expected"),
    [
        ("", [], ""),
        ("deterministic = true\n", [], "1"),
        ("", ["--", "--debug.deterministic"], "1"),
        ("deterministic = true\n", ["--", "--debug.no_deterministic"], ""),
    ],
)
def test_the_toml_and_the_flags_make_the_compiler_deterministic(
    root, run, monkeypatch, line, flags, expected
):
    monkeypatch.delenv("TORCHINDUCTOR_DETERMINISTIC", raising=False)
    with (root / "configs/m.toml").open("a") as toml:
        toml.write(line)
    assert run("--arms", "bf16", *flags)[0] == 0
    for job in ("seed", "bf16"):
        log = (results(root) / job / "train.log").read_text()
        assert f"deterministic: {expected}\n" in log


def test_arms_need_a_seed(root, run):
    toml = root / "configs/m.toml"
    toml.write_text(toml.read_text().replace("seed = 7", ""))
    status, text = run("--arms", "bf16")
    assert status == 2 and "m.toml must set debug.seed" in text


def test_an_arm_needs_its_gpus(root, run, monkeypatch):
    monkeypatch.setattr(converge, "devices", lambda: ("0",))
    flags = ("--", "--parallelism.data_parallel_shard_degree", "2")
    status, text = run("--arms", "bf16", *flags)
    assert status == 2 and "an arm needs 2 GPUs, this machine has 1" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["n"], "invalid choice: 'n'"),
        (["m", "--arms", "bf16,fp4"], "no arm 'fp4': allowed are bf16, bf16_order"),
        (["m", "--arms", "bf16,blockwise,bf16"], "--arms names bf16 more than once"),
        (["m", "--steps", "9"], "--steps must be at least 10, not 9"),
        (
            ["m", "--no-checkpoints", "--arms", "bf16,bf16_resumed"],
            "--no-checkpoints: bf16_resumed needs checkpoints",
        ),
    ],
)
def test_bad_arguments_are_refused(root, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        converge.main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err
