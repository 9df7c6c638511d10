"""The trainings of `python -m titan_fp8.plan --train` and of scripts/bench/plans.py."""

import contextlib
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import gloo
import pytest
import torch
from torch.autograd import DeviceType
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from titan_fp8.plan import train
from titan_fp8.plan.model import parse
from titan_fp8.recipe import BF16

ROOT = Path(__file__).parents[2]
P = "--parallelism."
pytestmark = pytest.mark.usefixtures("fresh_torchtitan")


def config_of(name, *flags):
    return parse(str(ROOT / "configs" / f"{name}.toml"), flags)


def event(begin, us, name="gemm", device=DeviceType.CUDA, is_user_annotation=False):
    span = SimpleNamespace(start=begin, end=begin + us)
    return SimpleNamespace(
        time_range=span, name=name, device_type=device, is_user_annotation=is_user_annotation
    )


def test_compute_is_counted_once_and_without_collectives():
    events = [
        event(30, 10),
        event(0, 10),
        event(2, 3),  # inside the one before
        event(8, 4),  # overlaps with it
        event(0, 100, "ncclDevKernel_SendRecv"),
        event(50, 5, "multimem_all_reduce_kernel"),
        event(55, 5, "exchange_barrier_kernel"),
        event(60, 5, "Memcpy HtoD (Pinned -> Device)"),
        event(70, 5, device=DeviceType.CPU),
        event(70, 5, "FSDP::all_gather", is_user_annotation=True),
    ]
    assert train.busy_us(events) == 12 + 10
    assert train.busy_us([]) == 0


def test_on_a_gpu_one_step_more_is_traced(monkeypatch):
    steps, trace = [], SimpleNamespace(events=lambda: [event(0, 10)])
    host = train.train.Trainer
    monkeypatch.setattr(host, "train_step", lambda self, data: steps.append(self.step))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(train, "profile", lambda **_: contextlib.nullcontext(trace))
    trainer = object.__new__(train.Trainer)
    trainer.job_config = SimpleNamespace(training=SimpleNamespace(steps=2))
    for kind, expected in (("cpu", [1, 2]), ("cuda", [1, 2, 3])):
        trainer.device, trainer.busy_us = torch.device(kind), math.nan
        steps.clear()
        for trainer.step in (1, 2):
            trainer.train_step(None)
        assert steps == expected and math.isnan(trainer.busy_us) == (kind == "cpu")
    assert trainer.busy_us == 10


@pytest.mark.parametrize(
    "name, flags, gpus, changed",
    [
        ("llama3_8b", (), 8, {}),
        ("llama3_8b", (), 4, {"shard": 4, "batch": 16}),
        ("llama3_8b", (), 16, {}),  # eight of them
        ("llama3_debug", (), 4, {"shard": 4}),
        ("llama3_8b", (P + "data_parallel_replicate_degree", "2"), 8,
         {"shard": 4, "batch": 16}),
        ("deepseek_v3_16b", (), 4, {"shard": 4, "expert": 4}),
        ("deepseek_v3_16b", (P + "tensor_parallel_degree", "2"), 4, {"shard": 2, "expert": 4}),
    ],
)  # fmt: skip
def test_the_plan_is_fitted_to_the_gpus(name, flags, gpus, changed):
    def plan(*flags):
        config = config_of(name, *flags)
        p, batch = config.parallelism, config.training.global_batch_size
        degrees = p.data_parallel_shard_degree, p.expert_parallel_degree
        return dict(zip(("shard", "expert", "batch"), (*degrees, batch), strict=True))

    found = plan(*flags, *train.fitted(config_of(name, *flags), gpus))
    assert found == plan(*flags) | changed


def test_too_few_gpus_for_a_replica():
    with pytest.raises(ValueError, match="need more GPUs than the 4 there are"):
        train.fitted(config_of("llama3_70b"), 4)


def row(tokens_per_second=100):
    return {"tokens/s": tokens_per_second, "GiB": 60.0, "loss": 4.0, "compute": 0.75}


def compared(monkeypatch, tmp_path, run, *flags, recipes=("blockwise", "rowwise")):
    monkeypatch.setattr(train, "run", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    flags = ["--job.dump_folder", str(tmp_path), *flags]
    return train.compare(str(ROOT / "configs/deepseek_v3_16b.toml"), flags, [*recipes])


@pytest.mark.parametrize(
    "speeds, status",
    [([100, 110, 120, 90], 0), ([100, 110, 105, 90], 1), ([110, 100, 109, 109], 1)],
    ids=["faster", "slower than bf16 with what is not FP8", "slower than bf16"],
)
def test_the_arms_and_the_exit_status(speeds, status, tmp_path, monkeypatch, capsys):
    runs, left = [], iter(speeds)

    def run(config, flags, ranks, blocks, steps, folder):
        quantize = parse(config, flags).quantize
        linear, grouped = quantize.linear.titan_fp8, quantize.grouped_mm.titan_fp8
        runs.append((linear.recipe, grouped.recipe, linear.host_speedups, grouped.permutation))
        assert (ranks, blocks, steps) == (8, 27, 20)
        return row(next(left))

    assert compared(monkeypatch, tmp_path, run) == status
    recipes = [(recipe, recipe, None, None) for recipe in ("blockwise", "rowwise")]
    assert runs == [(BF16, BF16, False, "host"), (BF16, BF16, True, "gather"), *recipes]
    degrees, *arms, header, _, _, blockwise, _ = capsys.readouterr().out.splitlines()
    assert "shard_degree=8 --parallelism.expert_parallel_degree=8" in degrees
    assert arms[2:] == [f"{name}: 27 of 27 blocks on 8 GPUs" for name in ("blockwise", "rowwise")]
    cells = [f"{speeds[2]}", f"{speeds[2] / speeds[0]:.2f}", "60.0", "75%", "4.0000"]
    assert blockwise.split() == ["blockwise", *cells]


def test_bf16_is_tuned_in_a_config_that_lists_only_experts():
    flags = train.arm_flags(train.TUNED, [train.GROUPED_MM])
    config = config_of("deepseek_v3_16b", "--model.converters", train.GROUPED_MM, *flags)
    assert config.quantize.linear.titan_fp8.host_speedups is True
    assert sorted(config.model.converters) == [train.GROUPED_MM, train.LINEAR]


def test_without_recipes_it_is_the_config_that_trains(tmp_path, monkeypatch):
    runs = []

    def run(config, flags, ranks, blocks, steps, folder):
        quantize = parse(config, flags).quantize
        runs.append((quantize.linear.titan_fp8.recipe, quantize.grouped_mm.titan_fp8.recipe))
        return row()

    own = "--quantize.grouped_mm.titan_fp8.recipe"
    compared(monkeypatch, tmp_path, run, own, "rowwise", recipes=())
    assert runs == [(BF16, BF16), (BF16, BF16), ("blockwise", "rowwise")]


def test_depth_is_halved_until_every_arm_fits(tmp_path, monkeypatch, capsys):
    """27 blocks do not fit in bf16, 13 not in FP8."""
    runs = []

    def run(config, flags, ranks, blocks, steps, folder):
        recipe = parse(config, flags).quantize.linear.titan_fp8.recipe
        runs.append((recipe, blocks))
        if blocks > (13 if recipe == BF16 else 6):
            raise RuntimeError("torch.OutOfMemoryError: CUDA out of memory.")
        return row()

    compared(monkeypatch, tmp_path, run, recipes=["blockwise"] * 2)  # trains it once
    tried = [(BF16, 27), (BF16, 13), (BF16, 13), ("blockwise", 13)]
    assert runs == [*tried, (BF16, 6), (BF16, 6), ("blockwise", 6)]
    assert "blockwise: 6 of 27 blocks" in capsys.readouterr().out


def test_a_job_that_fails_and_one_that_never_fits(tmp_path, monkeypatch):
    for error in ("RuntimeError: no", "torch.OutOfMemoryError: CUDA out of memory."):

        def run(*_, error=error):
            raise RuntimeError(error)

        with pytest.raises(ValueError, match=f"in bf16 with {27 if 'no' in error else 2} blocks"):
            compared(monkeypatch, tmp_path, run)


def test_a_bf16_config_needs_recipes(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="CONFIG trains in bf16"):
        recipe = ("--quantize.linear.titan_fp8.recipe", BF16)
        compared(monkeypatch, tmp_path, None, *recipe, recipes=())


def test_a_training_on_the_cpu(text, tmp_path):
    """Two of the debug model's six blocks, in the process that each rank runs on a GPU, too."""
    flags = ["--model.hf_assets_path", str(text), "--training.dataset_path", str(text / "corpus")]
    flags += ["--training.seq_len", "32", "--training.local_batch_size", "1"]
    config = str(ROOT / "configs/llama3_debug.toml")
    flags += ["--optimizer.implementation", "foreach"]  # fused takes no DTensors on the CPU
    flags += [P + "data_parallel_shard_degree", "1", *train.arm_flags("rowwise", [train.LINEAR])]
    row = train.run(config, flags, 1, 2, 10, tmp_path)
    assert row["tokens/s"] > 0 and 5 < row["loss"] < 10 and math.isnan(row["compute"])
    log = "".join(file.read_text() for file in tmp_path.rglob("std*.log"))
    assert '"n_layers": 2' in log and "converted 14 of 15 linears, rowwise" in log


def test_a_rank_that_fails_says_why(tmp_path, monkeypatch):
    """In the file that torchrun reads; here this process is torchrun and the rank."""

    def torchrun(command):
        at = command.index("titan_fp8.plan.train")
        # torchtitan has read sys.argv when it was imported.
        parse_args = train.train.ConfigManager.parse_args
        monkeypatch.setattr(parse_args, "__defaults__", (command[at + 1 :],))
        with pytest.raises(KeyError):
            train.record(train.train.main)(train.Trainer)
        failure = ProcessFailure(0, os.getpid(), 1, str(tmp_path / "error.json"))
        raise ChildFailedError("rank", {0: failure})

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(train, "torchrun", torchrun)
    config = str(ROOT / "configs/llama3_debug.toml")
    with pytest.raises(RuntimeError, match="^KeyError: 'none'"):
        train.run(config, ["--model.flavor", "none"], 1, 2, 10, tmp_path)


def run_asleep(folder: Path) -> None:
    """Runs a job whose rank would sleep for minutes."""
    start = train.torchrun
    train.torchrun = lambda command: start([*command[: command.index("-m")], str(folder / RANK)])
    train.run("", [], 1, 0, 5, folder)


RANK = "sleeping_rank.py"


def test_a_job_ends_with_its_parent(tmp_path):
    rank, file = tmp_path / RANK, tmp_path / f"{RANK}.pid"
    rank.write_text(
        "import os, time\n"
        "with open(__file__ + '.pid', 'w') as file:\n"
        "    print(os.getpid(), file=file)\n"
        "time.sleep(300)\n"
    )
    job = gloo.process(run_asleep, tmp_path)
    deadline = time.monotonic() + 60
    while not file.exists() or "\n" not in file.read_text():
        assert job.is_alive() and time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)  # torchrun knows its ranks
    job.terminate()
    job.join(60)
    assert job.exitcode  # not 0, nor None
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)
