"""bench_plans.py without GPUs: its plans, its flags, and the table of what runs leave behind."""

import gzip
import importlib
import json
import subprocess

import bench_plans
import pytest
import torch
from loss_runs import SCRIPTS, curve, dump
from parsing import parse_args
from torchtitan.distributed import ParallelDims

PLANS = bench_plans.PLANS


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.mark.parametrize("name", PLANS)
def test_torchtitan_accepts_the_flags_of_a_plan(name, tmp_path, monkeypatch):
    plan = PLANS[name]
    _, config, *flags = bench_plans.command(plan, "blockwise", 30, tmp_path)
    monkeypatch.chdir(bench_plans.ROOT)
    parsed = parse_args(["--job.config_file", config, *flags])
    assert parsed.model.flavor == plan.flavor and parsed.training.steps == 30 + bench_plans.TRACED
    assert parsed.quantize.linear.titan_fp8.recipe == "blockwise"
    p = parsed.parallelism
    dims = ParallelDims(
        dp_replicate=p.data_parallel_replicate_degree,
        dp_shard=p.data_parallel_shard_degree,
        cp=p.context_parallel_degree,
        tp=p.tensor_parallel_degree,
        pp=p.pipeline_parallel_degree,
        ep=p.expert_parallel_degree,
        etp=p.expert_tensor_parallel_degree,
        world_size=plan.gpus,
    )
    assert dims.world_size == plan.gpus
    from torchtitan.protocols.train_spec import get_train_spec

    model = get_train_spec(parsed.model.name).model_args[plan.flavor]
    if "-" in plan.flavor:
        assert model.n_layers == int(plan.flavor.split("-")[1])


def test_every_plan_has_the_gpus_that_its_name_says():
    assert {plan.gpus for plan in PLANS.values()} == {1, 2, 4}
    assert len({tuple(plan.flags()) for plan in PLANS.values()}) == len(PLANS)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["llama3-8b-fsdp3"], "no such plan: llama3-8b-fsdp3"),
        (["--steps", "3"], "--steps 3: at least"),
        (["--recipes", "bf16,fp8"], "--recipes: 'fp8' is no recipe; allowed: blockwise, "),
        (["--recipes", "bf16+bf16_all_gather"], "'bf16+bf16_all_gather' is no recipe"),
    ],
)
def test_bad_arguments(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench_plans.parse(argv)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_the_number_of_gpus_chooses_the_plans(monkeypatch, capsys):
    for gpus in (1, 2, 4):
        monkeypatch.setenv("NGPU", str(gpus))
        assert {PLANS[name].gpus for name in bench_plans.parse([]).plans} == {gpus}
    monkeypatch.setenv("NGPU", "3")
    with pytest.raises(SystemExit):
        bench_plans.parse([])
    assert "NGPU=3" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama3-8b-fsdp2", "deepseek-16b-ep2"])
def test_weights_are_gathered_in_bf16_if_the_recipe_says_so(name, tmp_path, monkeypatch):
    monkeypatch.chdir(bench_plans.ROOT)
    for in_bf16 in ("", bench_plans.IN_BF16):
        _, config, *flags = bench_plans.command(PLANS[name], f"rowwise{in_bf16}", 30, tmp_path)
        quantize = parse_args(["--job.config_file", config, *flags]).quantize
        assert quantize.linear.titan_fp8.recipe == "rowwise"
        gathers = quantize.linear.titan_fp8.fsdp_all_gather
        experts = quantize.grouped_mm.titan_fp8.fsdp_all_gather
        assert gathers == (not in_bf16)
        assert experts == (gathers or not name.startswith("deepseek"))


def test_micro_batches_are_those_of_the_plan(tmp_path):
    flags = bench_plans.command(PLANS["llama3-8b-fsdp2-2048x4"], "bf16", 30, tmp_path)
    assert flags[flags.index("--training.global_batch_size") + 1] == "8"


def trace(folder, step, *events):
    """A trace of rank 0 with GPU events (start and duration in us, name, arguments)."""
    path = folder / "traces" / f"iteration_{step}" / "rank0_trace.json"
    path.parent.mkdir(parents=True)
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": us, "args": args}
        for begin, us, name, args in events
    ]
    path.write_text(json.dumps({"traceEvents": events}))


def test_rows_of_finished_runs(tmp_path):
    name = "llama3-8b-fsdp2"
    speed = dict.fromkeys(range(1, 31), 4096.0) | dict.fromkeys(range(31, 43), 2048.0)
    folders = [
        dump(tmp_path, kind, curve(range(1, 43), gap), tps=speed, memory=60)
        for kind, gap in (("a", 0), ("b", 1))
    ]
    step = 2e6  # us
    gathers = [{"Out msg nelems": 10**9, "dtype": d} for d in ("Byte", "BFloat16")]
    trace(folders[0], 96, *((0, step, "ncclDevKernel_AllGather_RING_LL", each) for each in gathers))
    # The shortest step is that from 1 to 2: 1 to 1.4 and 1.82 to 2 count, with the optimizer at its
    # end. The one before it takes 1.2.
    starts = (-0.38, -0.25, 0.82, 0.95, 1.82, 1.95)
    optimizer = [(t * step, 0.05 * step, "FusedAdamMathFunctor", {}) for t in starts]
    kernels = [(t * step, 0.3 * step, "k", {}) for t in (0.1, 0.9, 1.1, 1.85)]
    trace(folders[0], 100, *optimizer, *kernels)
    base = bench_plans.row_of(name, "bf16", 30, folders[0], None, None)
    row = bench_plans.row_of(name, "blockwise", 30, folders[1], None, base)
    assert base["idle %"] == pytest.approx(42) and row["idle %"] is None
    assert base["gathered GB"] == pytest.approx(3) and row["gathered GB"] is None
    assert base["tokens/s"] == row["tokens/s"] == 4096 and row["x bf16"] == 1
    assert base["gap %"] is None and row["gap %"] == pytest.approx(1, rel=0.01)
    assert base["loss"] == pytest.approx(sum(curve(range(26, 31), 0).values()) / 5)
    assert base["error"] is row["error"] is None
    assert list(base) == list(row)


def test_a_trace_that_was_cut_short_is_named(tmp_path):
    folder = dump(tmp_path, "a", curve(range(1, 31)), tps=4096, memory=60)
    trace(folder, 30, (0, 1, "k", {}))
    file = folder / "traces/iteration_30/rank0_trace.json"
    (file.parent / "rank0_trace.json.gz").write_bytes(gzip.compress(file.read_bytes())[:-9])
    file.unlink()
    row = bench_plans.row_of("llama3-8b-fsdp2", "bf16", 30, folder, None, None)
    assert "EOFError" in row["error"] and row["tokens/s"] == 4096


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("llama3-8b-fsdp2-2048x4", 4 * 2048),
        ("llama3-8b-tp2", 8192 / 2),
        ("llama3-8b-cp2-fsdp2", 8192 / 2),
        ("llama3-8b-ddp4", 8192),
        ("deepseek-16b-ep4", 4 * 4096),
        ("deepseek-16b-ep2-tp2-fsdp2", 4 * 4096 / 2),
    ],
)
def test_tokens_of_a_gpu(name, tokens):
    assert PLANS[name].tokens_of_gpu == tokens


def test_the_last_trace_has_no_cpu_events(monkeypatch):
    """Of 42 steps, the 34th and the last four are traced, after three and one that warm up."""
    plugin = importlib.import_module("bench_plans_plugin")
    prepared = []
    for method in ("prepare_trace", "start_trace", "stop_trace"):
        monkeypatch.setattr(torch.profiler.profile, method, lambda self: None)

    def prepare(self):
        prepared.append((set(self.activities), self.record_shapes))

    monkeypatch.setattr(torch.profiler.profile, "prepare_trace", prepare)
    dumped = []
    activities = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
    with plugin.TwoTraces(
        activities=activities,
        schedule=torch.profiler.schedule(wait=38, warmup=3, active=1),
        on_trace_ready=lambda profiler: dumped.append(profiler.step_num),
        record_shapes=True,
    ) as profiler:
        for _ in range(42):
            profiler.step()
            if profiler.step_num == 42 - bench_plans.TRACED - 1:
                assert not prepared
    assert dumped == [34, 42]
    cuda = {torch.profiler.ProfilerActivity.CUDA}
    assert prepared == [(activities, True), (cuda, False)]


def test_idle_needs_a_whole_step(tmp_path):
    folder = dump(tmp_path, "a", curve(range(1, 31)), tps=4096, memory=60)
    trace(folder, 39, (0, 1, "FusedAdamMathFunctor", {}), (5, 1, "FusedAdamMathFunctor", {}))
    row = bench_plans.row_of("llama3-8b-fsdp2", "bf16", 30, folder, None, None)
    assert "1 steps of the trace" in row["error"] and row["tokens/s"] == 4096


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    def fail(command, stdout, **options):
        stdout.write("step: 1\nRuntimeError: out of memory\nChildFailedError: rank 0\n")
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(bench_plans, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(subprocess, "run", fail)
    monkeypatch.setattr(bench_plans.bench_common, "environment", dict)
    with pytest.raises(SystemExit) as stopped:
        bench_plans.main(["llama3-8b-fsdp2", "llama3-8b-tp2"])
    assert stopped.value.code == 1
    rows = json.loads((tmp_path / "results" / "result.json").read_text())["rows"]
    assert [row["plan"] for row in rows] == ["llama3-8b-fsdp2"] * 2 + ["llama3-8b-tp2"] * 2
    assert all(row["error"] == "RuntimeError: out of memory" for row in rows)
    assert "RuntimeError: out of memory" in capsys.readouterr().out
