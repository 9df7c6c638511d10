"""What all tests share: torchtitan prepared for the CPU, and one thread per process."""

import atexit
import functools
import gc
import importlib.metadata
import os
from pathlib import Path

import pytest

# Inductor's C++ code without vector instructions compiles in half the time, and no process has to
# find out first which ones there are. Processes that tests start inherit it.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"

# Imports and collection leave half a million objects, and no garbage to look for among them. Tests
# do not look there either.
gc.disable()

# torch.cuda cannot be used in the same process: `scripts/test_gpu.sh` runs the GPU tests.
collect_ignore = ["gpu"]

# One environment has one torchtitan. That of torchtitan 0.3 runs only the tests of its adapter.
if importlib.metadata.version("torchtitan").startswith("0.3."):
    folders = (path.name for path in Path(__file__).parent.iterdir() if path.is_dir())
    collect_ignore += [name for name in folders if name != "torchtitan_0_3"]
else:
    collect_ignore += ["torchtitan_0_3"]


def pytest_collection(session):
    """Runs before any test imports torchtitan, which chooses its device on import.

    Here models train on the CPU even if the machine has GPUs.
    """
    # torchtitan takes 9 s. The controller of pytest-xdist's workers runs no tests, and kernels need
    # no torchtitan.
    if session.config.getoption("dist", "no") != "no" or session.config.args == ["tests/kernels"]:
        return
    import torch

    from titan_fp8 import cpu_host

    cpu_host.prepare()
    from torchtitan.config import ConfigManager

    # Each manager registers the same rule in one list, and every parse tries all for every field.
    register = functools.cache(ConfigManager.register_tyro_rules)
    ConfigManager.register_tyro_rules = staticmethod(register)
    # The tensors are so small that a second thread only costs time.
    torch.set_num_threads(1)


def pytest_collection_finish():
    gc.freeze()
    atexit.register(gc.unfreeze)  # for libraries that would report leaks
    gc.enable()


@pytest.fixture
def fresh_torchtitan(monkeypatch):
    """torchtitan as in a new process: what conversions and trainers change is put back after.

    Only its help texts are missing.
    """
    import torch
    import torch._functorch.config
    from parsing import without_help_texts
    from torchtitan.models.moe import moe, utils
    from unpatched import restore

    from titan_fp8.patches import log_once
    from titan_fp8.torchtitan_0_2 import patches

    log_once.cache_clear()
    # torchtitan's own changes: apply_compile, and the memory budget of activation checkpointing.
    monkeypatch.setattr(moe, "_run_experts_grouped_mm", moe._run_experts_grouped_mm)
    monkeypatch.setattr(utils, "TOKEN_GROUP_ALIGN_SIZE_M", 8)
    with torch._functorch.config.patch(activation_memory_budget=1.0), without_help_texts():
        yield
    restore(patches.ON_CONVERSION)
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    gc.enable()


@pytest.fixture
def fresh_graphs():
    """torch.compile gets no graphs from other tests or the disk, only C++ code that is the same."""
    import torch
    import torch._functorch.config
    import torch._inductor.config

    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder with the tokenizer and the corpus of `corpus.write_text`."""
    from corpus import write_text

    return write_text(tmp_path_factory.mktemp("text"))
