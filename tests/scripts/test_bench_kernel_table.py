"""bench/kernel_table.py without a GPU: a table that the plan reads, and the shipped ones."""

import json

import pytest
import torch
from bench import gemm, kernel_table

from titan_fp8 import reference
from titan_fp8.plan import bound

SHIPPED = bound.TABLES
FACTS = {"card": "NVIDIA H100 80GB HBM3", "torch": "2.11.0", "date": "2026-01-02"}
FACTS |= {"commit": "abc1234", "command": "python scripts/bench kernel_table"}


@pytest.fixture
def on_cpu(monkeypatch):
    """Tiny shapes, the reference in place of kernels; a call takes 10 us."""
    for name, value in {
        "TOKENS": (32,),
        "DENSE": ((16, 32), (32, 16)),
        "GROUPS": ((2, 1024),),
        "GROUPED": ((16, 32),),
        "sets_beyond_l2": lambda size: 2,
        "median_us": lambda functions: [each() for each in functions] and 20.0,
        "environment": lambda: FACTS,
        "require_hopper": lambda: None,
    }.items():
        monkeypatch.setattr(kernel_table, name, value)
    monkeypatch.setattr(gemm, "hopper", reference)
    monkeypatch.setattr(gemm, "randn", lambda *shape: torch.randn(shape, dtype=torch.bfloat16))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)


def test_a_measured_gpu_gets_a_table(on_cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_table, "TABLES", tmp_path)
    kernel_table.main([])
    monkeypatch.setattr(bound, "TABLES", tmp_path)
    (table,), shipped = bound.tables(), json.loads((SHIPPED / "h100.json").read_text())
    assert FACTS.items() <= table.items() and table["columns"] == shipped["columns"]
    assert len(table["us"]) == 6
    assert table["us"][0] == ["mm", 0, 32, 16, 32, 10.0, 10.0, 10.0]
    assert table["us"][-1] == ["wgrad", 2, 1024, 16, 32, 10.0, 10.0, 10.0]


@pytest.mark.parametrize(
    "card, gpu", [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GH200 480GB", None)]
)
def test_the_name_of_a_table(card, gpu):
    if gpu is None:
        with pytest.raises(ValueError, match="card 'NVIDIA GH200 480GB': allowed"):
            kernel_table.file_of(card)
    else:
        assert kernel_table.file_of(card) == SHIPPED / f"{gpu}.json"


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_shipped_tables_say_what_they_come_from(gpu):
    (table,) = (each for each in bound.tables() if gpu.upper() in each["card"])
    assert table["date"] and table["commit"]
    ops = {(row[0], bool(row[1])) for row in table["us"]}
    assert ops == {(op, grouped) for op in ("mm", "wgrad") for grouped in (True, False)}
    assert all(us is None or us > 0 for row in table["us"] for us in row[5:])
