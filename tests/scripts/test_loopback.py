"""One process as rank 0 of several, whose ranks all have the same tensors."""

import re
import sys
from pathlib import Path

import loopback
import pytest
import torch
import torch.distributed as dist
from jobs import log_of
from titan import training
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ROOT = Path(__file__).parents[2]
RANKS = 4


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setitem(dist.Backend._plugins, "FAKE", loopback.PLUGIN)
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def test_reductions(ranks):
    x = torch.arange(8.0)
    total, most = x.clone(), x.clone()
    dist.all_reduce(total)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert torch.equal(total, RANKS * x) and torch.equal(most, x)
    part, mean = torch.empty(2), torch.empty(2)
    dist.reduce_scatter_tensor(part, x)
    dist.reduce_scatter_tensor(mean, x, dist.ReduceOp.AVG)
    assert torch.equal(part, RANKS * x[:2]) and torch.equal(mean, x[:2])


def test_gathers(ranks):
    x = torch.arange(6.0).view(2, 3)
    whole = torch.empty(RANKS * 2, 3)
    dist.all_gather_into_tensor(whole, x)
    assert torch.equal(whole, x.repeat(RANKS, 1))
    whole[:2] = 7  # in place, as FSDP2 gathers
    dist.all_gather_into_tensor(whole, whole[:2])
    assert torch.equal(whole, torch.full((RANKS * 2, 3), 7.0))
    parts = [torch.empty(2, 3) for _ in range(RANKS)]
    dist.all_gather(parts, x)
    assert all(torch.equal(part, x) for part in parts)


def test_all_to_all(ranks):
    x = torch.arange(8.0)
    received = torch.empty(8)
    dist.all_to_all_single(received, x)
    assert torch.equal(received, x[:2].repeat(RANKS))
    received = torch.empty(12)
    dist.all_to_all_single(received, x, [3] * RANKS, [3, 0, 4, 1])
    assert torch.equal(received, x[:3].repeat(RANKS))
    received = torch.empty(10)
    dist.all_to_all_single(received, x, [5, 0, 4, 1], [3, 0, 4, 1])
    assert torch.equal(received, torch.cat([x[:5], x[:4], x[:1]]))
    dist.all_to_all_single(received, x[:0], [5, 0, 4, 1], [0, 0, 0, 0])
    assert not received.any()


def test_a_model_under_fsdp(ranks):
    model = nn.Linear(8, 12, bias=False)
    w = model.weight.detach()[:3].repeat(RANKS, 1).requires_grad_()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    x = torch.randn(5, 8)
    y = model(x)
    torch.testing.assert_close(y, x @ w.T)
    y.square().sum().backward()
    (x @ w.T).square().sum().backward()
    torch.testing.assert_close(model.weight.grad.to_local(), w.grad[:3])


def test_a_training(text, tmp_path):
    command = [sys.executable, ROOT / "scripts/loopback.py", 2, ROOT / "configs/llama3_debug.toml"]
    command += training(text, tmp_path)
    command += ["--parallelism.data_parallel_shard_degree", 2, "--validation.no_enable"]
    command += ["--checkpoint.no_enable", "--training.steps", 1, "--training.seq_len", 96]
    log = log_of(command, 180, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    assert re.search(r"step:\s+1 .*loss:\s+\d", re.sub(r"\x1b\[[\d;]*m", "", log))
    assert "FSDP2 gathers" in log
