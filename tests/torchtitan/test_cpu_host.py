"""What each patch of cpu_host enables. Other tests run whole trainings on the CPU."""

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torchtitan.train
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.metrics import build_device_memory_monitor
from torchtitan.config import ConfigManager
from torchtitan.models.moe.kernels import generate_permute_indices

from titan_fp8 import cpu_host
from titan_fp8.torchtitan_0_2.cpu import check_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_imports_change_nothing_and_import_neither_torchtitan_nor_triton() -> None:
    code = """
import sys, torch
known, histc = set(dir(torch.cpu)), torch.histc
import titan_fp8.cpu_host, titan_fp8.export.__main__
weight = torch.ones(16, 16, requires_grad=True)
titan_fp8.fp8_linear(torch.ones(1, 16), weight).sum().backward()
assert not {"torchtitan", "triton"} & set(sys.modules)
assert torch._utils._get_available_device_type() is None
assert set(dir(torch.cpu)) == known and torch.histc is histc
assert "/patches.py" not in torch._C._dispatch_dump("aten::mm")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_prepare_refuses_to_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = SimpleNamespace(device_type="cuda")
    monkeypatch.setitem(sys.modules, "torchtitan.tools.utils", utils)
    with pytest.raises(RuntimeError, match="already imported and has chosen 'cuda'"):
        cpu_host.prepare()


def test_prepare_twice_patches_once() -> None:
    histc = torch.histc
    cpu_host.prepare()
    assert torch.histc is histc


def test_prepare_replaces_bf16_products_that_onednn_lacks() -> None:
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert native != ("/patches.py" in torch._C._dispatch_dump("aten::mm"))


def test_monitor_reads_the_machine() -> None:
    monitor = build_device_memory_monitor()
    assert monitor.device_name == "CPU"
    assert monitor.device_capacity > 2**28
    assert monitor.get_peak_stats().max_reserved_gib < 0  # unknown, and shown as -0.00


def test_histc_counts_integers_as_floats() -> None:
    experts = torch.tensor([0, 5, 2, 2, 7, 5, 5])
    counts = torch.histc(experts, bins=8, min=0, max=8)
    assert counts.dtype == torch.int64
    assert counts.equal(torch.bincount(experts, minlength=8))
    assert torch.histc(experts.float(), bins=8, min=0, max=8).equal(counts.float())


def test_permutation_runs_without_triton() -> None:
    tokens = torch.tensor([3, 0, 2, 1])  # for 2 experts from 2 ranks
    indices, sizes, offsets = generate_permute_indices(tokens, 2, 2, max_len=24, alignment=8)
    assert sizes.tolist() == [8, 8]
    assert offsets.tolist() == [8, 16]
    assert indices.tolist() == [0, 1, 2, 3, 4, -1, -1, -1, 5] + [-1] * 15


@pytest.mark.parametrize("ranks", [1, 2])
def test_unseeded_sharded_start_is_warned_of(
    ranks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    manager = object.__new__(CheckpointManager)
    manager.enable = manager.enable_ft_dataloader_checkpoints = False
    with caplog.at_level(logging.WARNING):
        assert not manager.load()
    assert ("starts without a checkpoint" in caplog.text) == (ranks > 1)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (["--training.steps", "1"], ["--optimizer.implementation", "foreach"]),
        (["--optimizer.implementation=for-loop"], []),
    ],
)
def test_main_prefers_foreach(
    given: list[str],
    used: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And says so, since it overrides the config."""
    calls = []
    monkeypatch.setattr(torchtitan.train, "main", lambda trainer: calls.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["cpu_host", *given])
    cpu_host.main()
    assert calls == [given + used]
    assert ("optimizer.implementation foreach, which overrides" in caplog.text) == bool(used)


def test_an_amd_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    with pytest.raises(SystemExit, match="AMD GPU, which titan_fp8 does not support: hide it"):
        cpu_host.main()


def test_a_model_without_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_host, "memory_of_machine", lambda: 8 * 2**30)
    config = ConfigManager().parse_args(["--model.flavor", "8B"])
    refusal = r"llama3 8B has 8.0 billion .* no GPU .* allowed on this CPU are 0.5 billion"
    with pytest.raises(ValueError, match=refusal):
        check_model(config)
    check_model(ConfigManager().parse_args(["--model.flavor", "debugmodel"]))
    monkeypatch.setattr(cpu_host, "memory_of_machine", lambda: 2**40)
    check_model(config)
