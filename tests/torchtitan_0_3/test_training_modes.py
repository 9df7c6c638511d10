"""Compiled blocks and activation checkpointing in torchtitan's trainer, on one rank."""

import contextlib
import os

import pytest
import titan_0_3
import torch
import torch.distributed as dist
from count import Count
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.tools.utils import set_default_dtype
from unpatched import restore

from titan_fp8.patches import SAC_POLICY, Patch
from titan_fp8.torchtitan_0_3 import patches


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def step(config: str, text, folder, *flags: object, checkpointing=None) -> tuple[dict, dict]:
    """The loss and the gradients of one step, and the calls of titan_fp8's ops."""
    backend = ("--parallelism.spmd_backend", "spmd_types")
    parsed = titan_0_3.parse(config, *titan_0_3.flags(text, folder, *backend, *flags))
    parsed.activation_checkpoint = checkpointing
    # A compiled block does not run inside a dispatch mode.
    count = contextlib.nullcontext() if parsed.compile.enable else Count()
    with titan_0_3.trainer(parsed) as trainer, count:
        inputs, labels = next(iter(trainer.dataloader))
        loss = trainer.forward_backward_step(
            input_dict=inputs, labels=labels, global_valid_tokens=torch.tensor(64.0)
        )
        result = {"loss": loss.detach(), **titan_0_3.gradients(trainer.model_parts[0])}
    wrappers = ("_checkpoint_wrapped_module.", "_orig_mod.")
    for wrapper in wrappers:
        result = {name.replace(wrapper, ""): value for name, value in result.items()}
    return result, getattr(count, "calls", {})


def distances(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    assert got.keys() == want.keys()
    return {name: float((got[name] - w).norm() / (w.norm() + 1e-20)) for name, w in want.items()}


@pytest.mark.parametrize("model, backend", [("llama3", "aot_eager"), ("deepseek_v3", "eager")])
def test_a_compiled_block_is_one_graph_and_computes_the_same(model, backend, text, tmp_path):
    """MoE blocks, too; in `test_spmd_types.py` with a number of tokens unknown to the compiler."""
    eager, _ = step(f"{model}_blockwise", text, tmp_path)
    flags = ("--compile.enable", "--compile.components", "model", "--compile.backend", backend)
    compiled, _ = step(f"{model}_blockwise", text, tmp_path, *flags)
    assert max(distances(compiled, eager).values()) < 0.02


GEMMS = 2 * 5
"""Two layers with wqkv, wo, w1, w3 and w2."""


@pytest.mark.parametrize(
    "checkpointing, with_policy, recomputed",
    [
        (SelectiveAC.Config(), True, 2 * 2),
        (SelectiveAC.Config(), False, GEMMS),
        (FullAC.Config(), True, GEMMS),
    ],
)
def test_op_level_checkpointing_saves_every_second_fp8_gemm(
    monkeypatch, text, tmp_path, checkpointing, with_policy, recomputed
):
    want, calls = step("llama3_blockwise", text, tmp_path)
    assert calls["blockwise_fprop"] == GEMMS
    if not with_policy:
        apply = Patch.apply

        def apply_others(patch, *makes):
            return patch is not SAC_POLICY and apply(patch, *makes)

        monkeypatch.setattr(Patch, "apply", apply_others)
        restore(patches.ON_CONVERSION)
    got, calls = step("llama3_blockwise", text, tmp_path, checkpointing=checkpointing)
    assert calls["blockwise_fprop"] == GEMMS + recomputed
    assert max(distances(got, want).values()) == 0


@pytest.mark.parametrize("model", titan_0_3.MODELS)
def test_a_step_reads_no_values_on_the_host(model):
    """Fake tensors have none. A CUDA graph can capture only such a step."""
    config = titan_0_3.parse(f"{model}_blockwise")
    config.training.seq_len = 64
    config.model_spec.model.update_from_config(config=config)
    with FakeTensorMode(), set_default_dtype(torch.bfloat16):
        built = config.model_spec.model.build()
        loss = built(torch.zeros(2, 64, dtype=torch.long)).float().sum()
        with pytest.raises(DataDependentOutputException):
            loss.item()
        loss.backward()
    assert all(parameter.grad is not None for parameter in built.parameters())
