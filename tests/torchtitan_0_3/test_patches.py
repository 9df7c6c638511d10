"""Every patch of the adapter: its targets are here, and those of this adapter alone do their work.

`tests/torchtitan/test_patches.py` tests the machinery and the patches that both adapters share.
"""

import datetime
import logging
import sys

import pytest
import titan_0_3
import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.models.common.attention import FlexAttention
from torchtitan.trainer import Trainer

from titan_fp8 import cpu_host
from titan_fp8.torchtitan_0_3 import FP8LinearConverter, patches


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.name)
def test_targets_are_here_and_take_what_the_replacement_relies_on(patch):
    assert not [t.problem() for t in (*patch.targets, *patch.relies_on) if t.problem()]


NO_GRAPHS = [("fsdp_all_gather", True), ("health_freq", 10)]


@pytest.mark.parametrize("key, value", NO_GRAPHS)
def test_what_does_not_work_in_cuda_graphs_is_refused(monkeypatch, key, value):
    config = titan_0_3.small("llama3", [FP8LinearConverter.Config(**{key: value})])
    config._validate_cuda_graphs()
    monkeypatch.setattr("torchtitan.tools.utils.device_type", "cuda")
    with pytest.raises(ValueError, match=f"{key} = {value}, at layers.0.*disable_cuda_graphs = Tr"):
        config._validate_cuda_graphs()
    titan_0_3.small("llama3", [FP8LinearConverter.Config()])._validate_cuda_graphs()
    config.training.disable_cuda_graphs = True
    config._validate_cuda_graphs()


@pytest.mark.parametrize("key, value", NO_GRAPHS)
def test_it_is_an_error_where_the_check_of_cuda_graphs_has_changed(monkeypatch, key, value):
    monkeypatch.setattr(Trainer.Config, "_validate_cuda_graphs", lambda self, strict=True: None)
    with pytest.raises(RuntimeError, match="'check of CUDA graphs' does not apply"):
        titan_0_3.small("llama3", [FP8LinearConverter.Config(**{key: value})])


def test_importing_the_adapter_provides_the_timeout_that_older_torch_lacks():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.set_timeout(datetime.timedelta(seconds=7), None)
    finally:
        dist.destroy_process_group()


def test_models_get_an_attention_that_the_cpu_can_differentiate():
    assert any(titan_0_3.small("deepseek_v3").model_spec.model.traverse(FlexAttention.Config))
    parsed = titan_0_3.parse("deepseek_v3_blockwise")
    assert not any(parsed.model_spec.model.traverse(FlexAttention.Config))


def test_attention_without_its_sinks_is_warned_of(caplog):
    titan_0_3.parse("deepseek_v3_plain")
    assert "sinks" not in caplog.text
    titan_0_3.parse("gpt_oss_plain")
    assert caplog.text.count("on the CPU this attention runs without its sinks") == 2  # layers


@pytest.mark.parametrize("ranks", [1, 2])
def test_unseeded_sharded_start_is_warned_of(ranks, monkeypatch, caplog):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    manager = object.__new__(CheckpointManager)
    manager.enable = False
    with caplog.at_level(logging.WARNING):
        assert not manager.load()
    assert ("starts without a checkpoint" in caplog.text) == (ranks > 1)


def test_main_adds_what_the_cpu_needs(monkeypatch):
    calls = []
    monkeypatch.setattr("torchtitan.train.main", lambda: calls.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["cpu_host", "--module", "llama3"])
    cpu_host.main()
    (arguments,) = calls
    assert arguments[2:4] == ["--optimizer.implementation", "foreach"]
    assert "--training.disable_cuda_graphs" in arguments
