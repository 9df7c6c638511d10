"""measure_plan.py and plan_table.py: from measurements to the tables of titan_fp8.plan."""

import importlib
import itertools
import json
import shutil

import plan_table
import pytest
import torch

from titan_fp8 import kernels, reference
from titan_fp8.plan import times

FACTS = {"card": "NVIDIA H100 80GB HBM3", "date": "2026-01-02", "commit": "abc1234"}


def test_the_tables_are_those_of_the_measurements():
    assert plan_table.main(["--check"]) == 0


@pytest.fixture
def measure_plan(monkeypatch):
    """The script, with tiny shapes and the reference in place of kernels; a call takes 10 us."""
    monkeypatch.setattr(kernels, "hopper", reference, raising=False)
    script = importlib.import_module("measure_plan")
    for name, value in {
        "hopper": reference,
        "TOKENS": (32, 64),
        "DENSE": ((16, 32), (32, 16)),
        "GROUPS": ((2, 1024),),
        "GROUPED": ((16, 32),),
        "ELEMENTS": (1 << 12, 1 << 13),
        "WIDTH": 32,
        "MAX_ELEMENTS": 1,
        "ATTENTION": (1, 2, 16, 8),
        "randn": lambda *shape, requires_grad=False: torch.randn(
            shape, dtype=torch.bfloat16
        ).requires_grad_(requires_grad),
        "copy_gbps": lambda: 2000.0,
        "kernel_us": lambda products: [each() for each in products] and 10.0,
        "event_ms": lambda functions, **_: [each() for each in functions] and 1.0,
        "call_us": lambda steps, *_: [100.0],
        "linear_step": lambda *args: None,
        "grouped_step": lambda kind: None,
        "chain_step": lambda kind: None,
        "environment": lambda: FACTS,
        "require_hopper": lambda arguments: None,
    }.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    return script


def test_a_measured_gpu_gets_a_table(measure_plan, monkeypatch, tmp_path):
    inputs = tmp_path / "inputs"
    shutil.copytree(plan_table.INPUTS, inputs)
    measured = inputs / "plan" / "measure_h100.json"
    measure_plan.main(["--json", str(measured)])
    monkeypatch.setattr(plan_table, "INPUTS", inputs)
    monkeypatch.setattr(plan_table, "TABLES", tmp_path)
    monkeypatch.setattr(times, "TABLES", tmp_path)
    assert plan_table.main(["--check"]) == 1
    assert plan_table.main([]) == 0 and plan_table.main(["--check"]) == 0
    times.load.cache_clear()
    h100, h200 = times.load("h100"), times.load("h200")
    times.load.cache_clear()
    assert h100.gpu == FACTS["card"] and h100.copy_gbps == 2000
    assert h100.gemm.keys() == h200.gemm.keys() and len(h100.gemm["bf16", "mm"]) == 5
    assert h100.quantize.keys() <= h200.quantize.keys()
    for family, op in h100.gemm:
        assert h100.gemm_us(family, op, 0, 32, 16, 32) == pytest.approx(10, rel=1e-3)
    # What was not measured there follows the bandwidth of the copy, or is that of the H200.
    slower = h200.copy_gbps / 2000
    assert h100.dense_ps == pytest.approx(h200.dense_ps * slower, rel=1e-3)
    assert h100.optimizer_ps["float32"] == pytest.approx(
        h200.optimizer_ps["float32"] * slower, rel=1e-3
    )
    assert h100.optimizer_ps["bfloat16"] == h200.optimizer_ps["bfloat16"]
    assert h100.link_gbps == h200.link_gbps
    entries = {entry: origin["how"] for entry, origin in h100.sources.items()}
    assert entries["gemm"] == entries["host"] == "measured"
    assert entries["dense_ps"] == "scaled" and entries["link_gbps"] == "taken"
    assert h100.sources["dense_ps"]["card"] == h200.gpu
    assert h100.host_us("linear, eager", "rowwise_with_gw_hp") == 100
    assert h100.host["code"] == "abc1234" and h100.host["block_us"] == h200.host["block_us"]


@pytest.mark.parametrize(
    "card, gpu",
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100")],
)
def test_the_table_of_a_card(card, gpu):
    assert plan_table.gpu_of({"card": card}) == gpu


@pytest.mark.parametrize("card", ["NVIDIA L40S", "NVIDIA GH200 480GB", "NVIDIA RTX A6000", "CPU"])
def test_a_card_without_a_short_name(card):
    with pytest.raises(ValueError, match=f"card '{card}': allowed are names with a word such as"):
        plan_table.gpu_of({"card": card})


@pytest.mark.parametrize("name", ["plan/measure_nvl.json", plan_table.RUNS])
def test_two_cards_of_one_short_name_share_no_table(name, tmp_path):
    shutil.copytree(plan_table.INPUTS, tmp_path / "inputs")
    file = tmp_path / "inputs" / name
    result = json.loads((file if file.exists() else plan_table.INPUTS / "gemm.json").read_text())
    file.write_text(json.dumps(result | {"card": "NVIDIA H200 NVL"}))
    problem = "results of 'NVIDIA H200' and 'NVIDIA H200 NVL' would share the table h200.json"
    with pytest.raises(ValueError, match=problem):
        plan_table.tables(tmp_path / "inputs")


def test_interpolation():
    h200 = times.load("h200")
    for (family, op), rows in h200.gemm.items():
        groups, m, n, k, us = rows[0]
        same = [row[-1] for row in rows if row[:4] == rows[0][:4]]
        assert h200.gemm_us(family, op, groups, m, n, k) == pytest.approx(
            sum(same) / len(same), rel=0.02
        )
    for low, high in itertools.pairwise((1024, 1 << 20, 1 << 26, 1 << 27, 1 << 30)):
        op = "quantize_1x128"
        assert 0 < h200.quantize_us(op, low) < h200.quantize_us(op, high)
    with pytest.raises(ValueError, match="--gpu = 'a100': allowed are .*'h200', of which"):
        times.load("a100")


def test_every_number_of_a_table_says_where_it_comes_from():
    for file in sorted(plan_table.TABLES.glob("*.json")):
        table = json.loads(file.read_text(encoding="utf-8"))
        entries = {entry.partition(".")[0] for entry in table["sources"]}
        assert entries == table.keys() - {"gpu", "sources"}
        # Parts of an entry that another card's runs gave.
        for entry in ("host", "optimizer_ps"):
            parts = {e.partition(".")[2] for e in table["sources"]} - {""}
            own = {"linear, eager", "linear, compiled", "grouped", "code"}
            assert table[entry].keys() - own <= parts
        for entry, origin in table["sources"].items():
            assert origin["how"] in ("measured", "scaled", "taken", "estimated")
            assert (origin["how"] == "estimated") == (entry in plan_table.ESTIMATED)
            for each in origin["from"]:
                assert (plan_table.ROOT / each.partition(":")[0]).is_file()
            if origin["how"] in ("scaled", "taken"):
                assert origin["card"] != table["gpu"]


def test_groups_that_end_anywhere_count_for_rowwise_alone():
    file = plan_table.INPUTS / "gemm.json"
    rows = plan_table.gemm_rows(json.loads(file.read_text()))
    assert {row[0] for row in rows} == {"bf16", "blockwise", "rowwise"}
    shapes = [tuple(row[:6]) for row in rows if row[0] == "blockwise"]
    assert ("blockwise", "mm", 8, 32768, 2048, 7168) in shapes
