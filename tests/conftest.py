"""What every test shares: torchtitan readied for the CPU, and one thread for each process."""

import gc

import pytest
import torch
import torch._functorch.config
import torch._inductor.config

from titan_fp8 import cpu_host

# Before any test imports torchtitan, which asks for its device while it is imported. Models train
# on the CPU in tests, where there are GPUs too.
cpu_host.prepare()

# torch.cuda does not work beside that: `scripts/test_gpu.sh` runs these in a process of their own.
collect_ignore = ["gpu"]

# The tensors are small: two threads wait for each other longer than they compute.
torch.set_num_threads(1)


@pytest.fixture
def fresh_host(monkeypatch):
    """torchtitan as in a new process: what trainers and conversions change is put back after."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.distributed import activation_checkpoint, expert_parallel
    from torchtitan.models.moe import moe, utils

    from titan_fp8.torchtitan_0_2 import converters

    converters.announce_emulation.cache_clear()
    converters.warn_async_tp.cache_clear()
    monkeypatch.setattr(utils, "TOKEN_GROUP_ALIGN_SIZE_M", 8)
    for owner, name in (
        (moe, "_run_experts_grouped_mm"),
        (expert_parallel, "_permute"),
        (expert_parallel, "_unpermute"),
        (_fsdp_collectives, "foreach_reduce_scatter_copy_in"),
        (activation_checkpoint, "ptd_checkpoint_wrapper"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    metrics = dict(MetricsProcessor.__dict__)
    with (
        torch._inductor.config.patch(joint_custom_pre_pass=None),
        torch._functorch.config.patch(activation_memory_budget=1.0),
    ):
        yield
    for name in MetricsProcessor.__dict__.keys() - metrics.keys():
        delattr(MetricsProcessor, name)
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    gc.enable()


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder with the tokenizer and the corpus of `titan.write_text`."""
    from titan import write_text

    return write_text(tmp_path_factory.mktemp("text"))
