"""bench/plans.py without GPUs: its plans, its flags, and the table of what runs leave behind."""

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
    assert degrees_of(config).world_size == plan.gpus
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
        (["--recipes", "bf16+cuda_graph"], "'bf16+cuda_graph' is no recipe"),
        (["--recipes", "blockwise+graph"], "'blockwise+graph' is no recipe"),
        (["--recipes", "torchao rowwise"], "'torchao rowwise' needs torchao 0.17 on PYTHONPATH"),
    ],
)
def test_bad_arguments(argv, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(common, "HAS_TORCHAO", False)
    with pytest.raises(SystemExit) as stopped:
        plans.parse(argv)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_the_number_of_gpus_chooses_the_plans(monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert {PLANS[name].gpus for name in plans.parse([]).plans} == {gpus}


def test_options_follow_an_arm():
    for arm, exchange in (("rowwise", "bf16"), ("blockwise+exchange_fp8", "fp8")):
        for option in ("", "+cuda_graph"):
            quantize = parsed("deepseek-16b-ep2", arm + option).quantize
            assert quantize.linear.titan_fp8.recipe == arm.partition("+")[0]
            assert quantize.linear.titan_fp8.cuda_graph == bool(option)
            assert quantize.grouped_mm.titan_fp8.exchange == exchange
    assert parsed("llama3-8b-fsdp2", "bf16 tuned+cuda_graph").quantize.linear.titan_fp8.cuda_graph


@pytest.mark.parametrize("name", ["llama3-8b-fsdp4", "qwen3-30b-ep4"])
@pytest.mark.parametrize(
    "arm, values",
    [("torchao tensorwise", (True, True, None)), ("torchao rowwise", (False, False, "rowwise"))],
)
def test_torchao_runs_in_stock_torchtitan(name, arm, values, tmp_path):
    plan = PLANS[name]
    config = plans.config_of(plan, arm, tmp_path / "run")
    config = parse_args(["--job.config_file", config, *plans.flags_of(plan, arm, 30)])
    float8 = config.quantize.linear.float8
    gathers = float8.enable_fsdp_float8_all_gather, float8.precompute_float8_dynamic_scale_for_fsdp
    assert (*gathers, float8.recipe_name) == values
    assert float8.filter_fqns == ["output", "router.gate"]
    assert not hasattr(config.quantize.linear, "titan_fp8")
    experts = ["converge.torchao_experts"] if name.startswith("qwen3") else []
    assert config.model.converters == ["quantize.linear.float8", *experts]


def test_micro_batches_are_those_of_the_plan():
    assert parsed("llama3-8b-fsdp2-2048x4").training.global_batch_size == 8


def test_rows_of_finished_runs():
    result = {"tokens/s": 4096, "GiB": 60.0, "compute": 0.5, "loss": 4.0}
    base = plans.row_of("llama3-8b-fsdp2", "bf16", result, None)
    row = plans.row_of(
        "llama3-8b-fsdp2", "blockwise", result | {"tokens/s": 6144, "loss": 4.04}, base
    )
    assert (base["compute %"], row["tokens/s"], row["x bf16"]) == (50, 6144, 1.5)
    assert base["gap %"] is None and row["gap %"] == pytest.approx(1)
    assert base["error"] is row["error"] is None and list(base) == list(row)


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plans, "ROOT", tmp_path)
    monkeypatch.setattr(plans, "RESULTS", tmp_path / "results")

    def run(*_):
        raise RuntimeError("RuntimeError: out of memory")

    monkeypatch.setattr(train, "run", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(common, "environment", dict)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/stamp").touch()
    assert plans.main(["llama3-8b-fsdp2", "llama3-8b-tp2", "--repeats", "2"]) == 1
    rows = json.loads((tmp_path / "results" / "result.json").read_text())["rows"]
    arms = ("bf16", "bf16 tuned", "blockwise")
    names = [(row["plan"], row["recipe"]) for row in rows]
    assert names == [(p, a) for p in ("llama3-8b-fsdp2", "llama3-8b-tp2") for a in arms * 2]
    assert all(row["error"] == "RuntimeError: out of memory" for row in rows)
    assert "RuntimeError: out of memory" in capsys.readouterr().out
