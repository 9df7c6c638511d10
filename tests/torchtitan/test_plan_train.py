"""The trainings of `python -m titan_fp8.plan --train` and of scripts/bench/plans.py."""

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from titan_fp8.plan import command, train
from titan_fp8.recipe import BF16

ROOT = Path(__file__).parents[2]
P = "--parallelism."
pytestmark = pytest.mark.usefixtures("fresh_torchtitan")


def config_of(name, *flags):
    return command.parse(str(ROOT / "configs" / f"{name}.toml"), flags)


def test_compute_is_counted_once_and_without_collectives():
    def event(begin, us, name="gemm", cat="kernel"):
        return {"cat": cat, "name": name, "ts": begin, "dur": us}

    events = [
        event(30, 10),
        event(0, 10),
        event(2, 3),  # inside the one before
        event(8, 4),  # overlaps with it
        event(0, 100, "ncclDevKernel_SendRecv"),
        event(50, 5, "multimem_all_reduce_kernel"),
        event(60, 5, cat="gpu_memcpy"),
        event(70, 5, cat="cpu_op"),
    ]
    assert train.busy_us(train.compute_kernels(events)) == 12 + 10
    assert train.busy_us([]) == 0


def finished(folder, *lines, kernels_us=None):
    """The folder of a job that logged these (step, loss, GiB, tokens/s)."""
    folder.mkdir(parents=True)
    text = "\n".join(
        f"\x1b[31mstep: {step:2}  \x1b[32mloss: {loss:8.5f}  grad_norm:  1.0  "
        f"memory: {gib:5.2f}GiB(60.00%)  tps: {tps:,}  tflops: 1.00  mfu: 1.00%"
        for step, loss, gib, tps in lines
    )
    (folder / "train.log").write_text(text)
    if kernels_us is not None:
        trace = folder / "traces" / "iteration_26" / "rank0_trace.json.gz"
        trace.parent.mkdir(parents=True)
        event = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": kernels_us}
        trace.write_bytes(gzip.compress(json.dumps({"traceEvents": [event]}).encode()))
    return folder


def test_what_a_job_logged_and_traced(tmp_path):
    lines = [(1, 9.0, 70.0, 10), (5, 8.0, 60.0, 20), (10, 5.0, 61.0, 1000), (15, 4.0, 62.0, 3000)]
    lines += [(20, 3.0, 62.0, 2000), (20, -1.0, 65.0, 2000), (25, 1.0, 99.0, 9999)]
    folder = finished(tmp_path / "a", *lines, kernels_us=600_000)
    row = train.read(folder, 20, tokens=2000)  # A step takes a second.
    assert row == {"tokens/s": 2000, "GiB": 70, "compute": pytest.approx(0.6), "loss": 4.0}
    with pytest.raises(ValueError, match="no steps with a loss after step 5"):
        train.read(finished(tmp_path / "b", *lines[:2]), 20, 2000)


@pytest.mark.parametrize(
    "name, flags, gpus, changed",
    [
        ("llama3_8b", (), 8, {}),
        ("llama3_8b", (), 4, {"shard": 4, "batch": 16}),
        ("llama3_8b", (), 16, {}),  # eight of them
        ("llama3_debug", (), 4, {"shard": 4}),
        ("llama3_8b", (P + "data_parallel_replicate_degree", "2"), 8,
         {"replicate": 1, "batch": 16}),
        ("deepseek_v3_16b", (), 4, {"shard": 4, "expert": 4}),
        ("deepseek_v3_16b", (P + "tensor_parallel_degree", "2"), 4, {"shard": 2, "expert": 4}),
    ],
)  # fmt: skip
def test_the_plan_is_fitted_to_the_gpus(name, flags, gpus, changed):
    config = config_of(name, *flags)
    p, keys = config.parallelism, ("replicate", "shard", "expert", "batch")
    before = (
        p.data_parallel_replicate_degree,
        p.data_parallel_shard_degree,
        p.expert_parallel_degree,
        config.training.global_batch_size,
    )
    found = dict(zip(keys, train.fitted(config, gpus).values(), strict=True))
    assert found == dict(zip(keys, before, strict=True)) | changed


def test_too_few_gpus_for_a_replica():
    with pytest.raises(ValueError, match="need more GPUs together than the 4 there are"):
        train.fitted(config_of("llama3_70b"), 4)


def compared(monkeypatch, tmp_path, run, *flags, recipes="blockwise,rowwise"):
    monkeypatch.setattr(train, "run", run)
    config = str(ROOT / "configs/deepseek_v3_16b.toml")
    options = argparse.Namespace(config=config, recipes=recipes, ngpu=8)
    flags = ["--job.dump_folder", str(tmp_path), *flags]
    table, is_slower = train.compare(options, flags, command.parse)
    command.print_table(table, text=1)
    return int(is_slower)


@pytest.mark.parametrize(
    "speeds, status",
    [([100, 110, 120, 90], 0), ([100, 110, 105, 90], 1), ([110, 100, 109, 109], 1)],
    ids=["faster", "slower than bf16 with what is not FP8", "slower than bf16"],
)
def test_the_arms_and_the_exit_status(speeds, status, tmp_path, monkeypatch, capsys):
    runs, left = [], iter(speeds)

    def run(config, flags, ranks, blocks, steps, folder):
        parsed = command.parse(config, flags)
        quantize = parsed.quantize
        linear, grouped = quantize.linear.titan_fp8, quantize.grouped_mm.titan_fp8
        runs.append((linear.recipe, grouped.recipe, linear.host_speedups))
        assert (ranks, blocks, steps) == (8, 27, 20)
        finished(folder, (20, 4.0, 60.0, next(left)), kernels_us=1e6)

    assert compared(monkeypatch, tmp_path, run) == status
    recipes = [(recipe, recipe, None) for recipe in ("blockwise", "rowwise")]
    assert runs == [(BF16, BF16, False), (BF16, BF16, True), *recipes]
    title, _, header, *rows = capsys.readouterr().out.splitlines()
    assert title == "27 of 27 blocks on 8 GPUs" and len(rows) == 4
    # 131,072 tokens a step on 8 GPUs, of which kernels took a second.
    compute = f"{speeds[2] / 16384:.0%}"
    cells = [f"{speeds[2]}", f"{speeds[2] / speeds[0]:.2f}", "60.0", compute, "4.0000"]
    assert rows[2].split() == ["blockwise", *cells]


def test_without_recipes_it_is_the_config_that_trains(tmp_path, monkeypatch):
    runs = []

    def run(config, flags, ranks, blocks, steps, folder):
        quantize = command.parse(config, flags).quantize
        runs.append((quantize.linear.titan_fp8.recipe, quantize.grouped_mm.titan_fp8.recipe))
        finished(folder, (20, 4.0, 60.0, 100))

    own = "--quantize.grouped_mm.titan_fp8.recipe"
    compared(monkeypatch, tmp_path, run, own, "rowwise", recipes=None)
    assert runs == [(BF16, BF16), (BF16, BF16), ("blockwise", "rowwise")]


def test_depth_is_halved_until_every_arm_fits(tmp_path, monkeypatch, capsys):
    """27 blocks do not fit in bf16, 13 not in FP8."""
    runs = []

    def run(config, flags, ranks, blocks, steps, folder):
        recipe = command.parse(config, flags).quantize.linear.titan_fp8.recipe
        runs.append((recipe, blocks))
        if blocks > (13 if recipe == BF16 else 6):
            return "torch.OutOfMemoryError: CUDA out of memory."
        finished(folder, (20, 4.0, 60.0, 100))

    compared(monkeypatch, tmp_path, run, recipes="blockwise")
    tried = [(BF16, 27), (BF16, 13), (BF16, 13), ("blockwise", 13)]
    assert runs == [*tried, (BF16, 6), (BF16, 6), ("blockwise", 6)]
    assert "6 of 27 blocks" in capsys.readouterr().out


def test_a_job_that_fails_and_one_that_never_fits(tmp_path, monkeypatch):
    for error in ("RuntimeError: no", "torch.OutOfMemoryError: CUDA out of memory."):
        with pytest.raises(ValueError, match=f"in bf16 with {27 if 'no' in error else 2} blocks"):
            compared(monkeypatch, tmp_path, lambda *_, error=error: error)


def test_a_bf16_config_needs_recipes(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="recipe of CONFIG is bf16"):
        compared(monkeypatch, tmp_path, None, recipes="bf16")


def test_a_training_on_the_cpu(text, tmp_path):
    """Two of the debug model's six blocks, in the module that each rank runs on a GPU, too."""
    flags = ["--model.hf_assets_path", str(text), "--training.dataset_path", str(text / "corpus")]
    flags += ["--training.seq_len", "32", "--training.local_batch_size", "1"]
    config = str(ROOT / "configs/llama3_debug.toml")
    flags += [P + "data_parallel_shard_degree", "1", *train.arm_flags("rowwise", [train.LINEAR])]
    assert train.run(config, flags, 1, 2, 10, tmp_path) is None
    row = train.read(tmp_path, 10, 32)
    assert row["tokens/s"] > 0 and 5 < row["loss"] < 10 and row["compute"] is None
    log = (tmp_path / "train.log").read_text()
    assert '"n_layers": 2' in log and "converted 14 of 15 linears, rowwise" in log
    error = train.run(config, [*flags, "--training.seq_len", "-1"], 1, 2, 10, tmp_path)
    assert "Error" in error


def test_a_job_ends_with_its_parent(tmp_path, monkeypatch):
    """torchrun and its rank, which would sleep for minutes."""
    rank = tmp_path / "torchtitan_rank.py"
    rank.write_text("import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(300)\n")
    parent = textwrap.dedent(f"""
        import subprocess
        from pathlib import Path
        from titan_fp8.plan import train
        start = subprocess.Popen
        def popen(command, **options):
            at = command.index("titan_fp8.plan.train") - 1
            return start([*command[:at], {str(rank)!r}], **options)
        subprocess.Popen = popen
        train.run("", [], 1, 0, 5, Path({str(tmp_path)!r}))
    """)
    job = subprocess.Popen(
        [sys.executable, "-c", parent], env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    log, deadline = tmp_path / "train.log", time.monotonic() + 60
    while not log.exists() or "pid" not in log.read_text():
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    pid = int(log.read_text().partition("pid ")[2].split()[0])
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
