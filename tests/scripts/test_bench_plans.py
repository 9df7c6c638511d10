"""bench/plans.py without GPUs: its plans, its flags, and the table of what runs leave behind."""

import gzip
import json

import pytest
import torch
from bench import common, plans
from parsing import parse_args
from torchtitan.protocols.train_spec import get_train_spec

from titan_fp8.plan import train
from titan_fp8.plan.model import degrees_of

PLANS = plans.PLANS


def parsed(name, arm="blockwise"):
    plan = PLANS[name]
    config = plans.ROOT / "configs" / f"{plan.config}.toml"
    return parse_args(["--job.config_file", config, *plans.flags_of(plan, arm, 30)])


@pytest.mark.parametrize("name", PLANS)
def test_torchtitan_accepts_the_flags_of_a_plan(name):
    plan, config = PLANS[name], parsed(name)
    assert config.model.flavor == plan.flavor
    assert config.quantize.linear.titan_fp8.recipe == "blockwise"
    assert degrees_of(config, plan.gpus).world_size == plan.gpus
    whole = get_train_spec(config.model.name).model_args[plan.flavor].n_layers
    assert 0 <= plan.blocks < whole


def test_every_plan_has_the_gpus_that_its_name_says():
    assert {plan.gpus for plan in PLANS.values()} == {1, 2, 4}
    assert len(set(PLANS.values())) == len(PLANS)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["llama3-8b-fsdp3"], "no such plan: llama3-8b-fsdp3"),
        (["--steps", "5"], "--steps 5: multiples of 5, at least 10"),
        (["--steps", "32"], "--steps 32: multiples of 5"),
        (["--recipes", "bf16,fp8"], "--recipes: 'fp8' is no recipe; allowed: blockwise, "),
        (["llama3-8b-fsdp4"], "llama3-8b-fsdp4: more GPUs than the 2 there are"),
        (["--recipes", "bf16+bf16_all_gather"], "'bf16+bf16_all_gather' is no recipe"),
    ],
)
def test_bad_arguments(argv, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit) as stopped:
        plans.parse(argv)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_the_number_of_gpus_chooses_the_plans(monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert {PLANS[name].gpus for name in plans.parse([]).plans} == {gpus}


@pytest.mark.parametrize("name", ["llama3-8b-fsdp2", "deepseek-16b-ep2"])
def test_weights_are_gathered_in_bf16_if_the_recipe_says_so(name):
    for in_bf16 in ("", plans.IN_BF16):
        quantize = parsed(name, f"rowwise{in_bf16}").quantize
        assert quantize.linear.titan_fp8.recipe == "rowwise"
        gathers = quantize.linear.titan_fp8.fsdp_all_gather
        experts = quantize.grouped_mm.titan_fp8.fsdp_all_gather
        assert gathers == (not in_bf16)
        assert experts == (gathers or not name.startswith("deepseek"))


def test_micro_batches_are_those_of_the_plan():
    assert parsed("llama3-8b-fsdp2-2048x4").training.global_batch_size == 8


def job(folder, tokens_per_second, loss, *events):
    """What a finished job leaves behind, with a trace of these kernels (name, us, args)."""
    trace = folder / "traces" / "iteration_36" / "rank0_trace.json.gz"
    trace.parent.mkdir(parents=True)
    line = f"loss: {loss:8.5f}  memory: 60.00GiB(75.00%)  tps: {tokens_per_second:,}"
    (folder / "train.log").write_text(f"step: 30  {line}\n")
    kernels = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": 0, "dur": us, "args": args}
        for name, us, args in events
    ]
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": kernels}).encode()))
    return trace


def test_rows_of_finished_runs(tmp_path):
    name = "llama3-8b-fsdp2"
    gathers = [{"Out msg nelems": 10**9, "dtype": d} for d in ("Byte", "BFloat16")]
    nccl = [("ncclDevKernel_AllGather_RING_LL", 2e6, each) for each in gathers]
    job(tmp_path / "a", 4096, 4.0, *nccl, ("gemm", 1e6, {}))  # A step takes 2 s.
    job(tmp_path / "b", 6144, 4.04, ("gemm", 1e6, {}))
    base = plans.row_of(name, "bf16", 30, tmp_path / "a", None, None)
    row = plans.row_of(name, "blockwise", 30, tmp_path / "b", None, base)
    assert base["compute %"] == pytest.approx(50) and row["compute %"] == pytest.approx(75)
    assert base["gathered GB"] == pytest.approx(3) and row["gathered GB"] == 0
    assert (base["tokens/s"], row["tokens/s"], row["x bf16"]) == (4096, 6144, 1.5)
    assert base["gap %"] is None and row["gap %"] == pytest.approx(1)
    assert base["error"] is row["error"] is None and list(base) == list(row)


def test_a_trace_that_was_cut_short_is_named(tmp_path):
    trace = job(tmp_path, 4096, 4.0, ("gemm", 1, {}))
    trace.write_bytes(trace.read_bytes()[:-9])
    row = plans.row_of("llama3-8b-fsdp2", "bf16", 30, tmp_path, None, None)
    assert "EOFError" in row["error"] and row["compute %"] is None


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


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plans, "ROOT", tmp_path)
    monkeypatch.setattr(plans, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(train, "run", lambda *_: "RuntimeError: out of memory")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(common, "environment", dict)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/stamp").touch()
    assert plans.main(["llama3-8b-fsdp2", "llama3-8b-tp2"]) == 1
    rows = json.loads((tmp_path / "results" / "result.json").read_text())["rows"]
    assert [row["plan"] for row in rows] == ["llama3-8b-fsdp2"] * 2 + ["llama3-8b-tp2"] * 2
    assert all(row["error"] == "RuntimeError: out of memory" for row in rows)
    assert "RuntimeError: out of memory" in capsys.readouterr().out
