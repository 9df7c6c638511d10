"""What every test shares: torchtitan readied for the CPU, and one thread for each process."""

import gc
from importlib.util import find_spec

import pytest
import torch

from titan_fp8 import cpu_host

# Before any test imports torchtitan, which asks for its device while it is imported. Models train
# on the CPU in tests, where there are GPUs too; the kernels are tested without torchtitan.
if find_spec("torchtitan"):
    cpu_host.prepare()

# The tensors are small: two threads wait for each other longer than they compute.
torch.set_num_threads(1)

HOST_MODELS = ("llama3", "deepseek_v3", "qwen3", "llama4", "gpt_oss")


@pytest.fixture
def fresh_host(monkeypatch):
    """torchtitan as in a new process: what trainers and conversions change is put back after."""
    from titan import save_list
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.models.moe import moe, utils

    from titan_fp8.plugin import converters

    converters.announce_emulation.cache_clear()
    converters.warn_async_tp.cache_clear()
    monkeypatch.setattr(utils, "TOKEN_GROUP_ALIGN_SIZE_M", 8)
    monkeypatch.setattr(moe, "_run_experts_grouped_mm", moe._run_experts_grouped_mm)
    saved = {model: set(save_list(model)) for model in HOST_MODELS}
    metrics = dict(MetricsProcessor.__dict__)
    yield
    for model, ops in saved.items():
        save_list(model).intersection_update(ops)
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
