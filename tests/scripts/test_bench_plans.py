"""bench_plans.py without GPUs: its plans, its flags, and the table of what runs leave behind."""

import json
import subprocess

import bench_plans
import pytest
from loss_runs import SCRIPTS, curve, dump
from torchtitan.config import ConfigManager
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
    parsed = ConfigManager().parse_args(["--job.config_file", config, *flags])
    assert parsed.model.flavor == plan.flavor and parsed.training.steps == 30
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
    assert {plan.gpus for plan in PLANS.values()} == {2, 4}
    assert len({tuple(plan.flags()) for plan in PLANS.values()}) == len(PLANS)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["llama3-8b-fsdp3"], "no such plan: llama3-8b-fsdp3"),
        (["--steps", "3"], "--steps 3: at least"),
        (["--recipes", "bf16,fp8"], "--recipes: 'fp8' is no recipe; allowed: blockwise, "),
        (["--recipes", "bf16+fsdp_all_gather"], "'bf16+fsdp_all_gather' is no recipe"),
    ],
)
def test_bad_arguments(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench_plans.parse(argv)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_the_number_of_gpus_chooses_the_plans(monkeypatch, capsys):
    for gpus in (2, 4):
        monkeypatch.setenv("NGPU", str(gpus))
        assert {PLANS[name].gpus for name in bench_plans.parse([]).plans} == {gpus}
    monkeypatch.setenv("NGPU", "3")
    with pytest.raises(SystemExit):
        bench_plans.parse([])
    assert "NGPU=3" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama3-8b-fsdp2", "deepseek-16b-ep2"])
def test_weights_are_gathered_in_fp8_if_the_recipe_says_so(name, tmp_path, monkeypatch):
    monkeypatch.chdir(bench_plans.ROOT)
    for gather in ("", bench_plans.GATHER):
        _, config, *flags = bench_plans.command(PLANS[name], f"rowwise{gather}", 30, tmp_path)
        quantize = ConfigManager().parse_args(["--job.config_file", config, *flags]).quantize
        assert quantize.linear.titan_fp8.recipe == "rowwise"
        gathers = quantize.linear.titan_fp8.fsdp_all_gather
        experts = quantize.grouped_mm.titan_fp8.fsdp_all_gather
        assert gathers == bool(gather) and experts == (gathers and name.startswith("deepseek"))


def test_micro_batches_are_those_of_the_plan(tmp_path):
    flags = bench_plans.command(PLANS["llama3-8b-fsdp2-2048x4"], "bf16", 30, tmp_path)
    assert flags[flags.index("--training.global_batch_size") + 1] == "8"


def trace(folder, *kernels):
    """A trace of rank 0 with kernels (start, duration) in us, and two all-gathers beside them."""
    path = folder / "traces" / "iteration_30" / "rank0_trace.json"
    path.parent.mkdir(parents=True)
    events = [{"ph": "X", "cat": "kernel", "name": "k", "ts": t, "dur": d} for t, d in kernels]
    gathers = [{"Out msg nelems": 10**9, "dtype": d} for d in ("Byte", "BFloat16")]
    events += [dict(events[0], name="ncclDevKernel_AllGather_RING_LL", args=a) for a in gathers]
    path.write_text(json.dumps({"traceEvents": events}))


def test_rows_of_finished_runs(tmp_path):
    name = "llama3-8b-fsdp2"
    folders = [dump(tmp_path, kind, curve(range(1, 31), gap)) for kind, gap in (("a", 0), ("b", 1))]
    trace(folders[0], (0, 60), (100, 100))
    base = bench_plans.row_of(name, "bf16", folders[0], None, None)
    row = bench_plans.row_of(name, "blockwise", folders[1], None, base)
    assert base["idle %"] == pytest.approx(20) and row["idle %"] is None
    assert base["gathered GB"] == pytest.approx(3) and row["gathered GB"] is None
    assert base["gap %"] is None and row["gap %"] == pytest.approx(1, rel=0.01)
    assert base["error"] is row["error"] is None
    assert list(base) == list(row)


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
