"""Blocks with experts, compiled as one region up to the experts, compute what torchtitan's do."""

import pytest
import torch
from titan import CHECKPOINTING, loss_and_gradients, one_process, parse, toml, trainer, training
from torch._dynamo import OptimizedModule

from titan_fp8.torchtitan_0_2 import moe_block

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")

MODELS = {"deepseek_v3": "tiny", "qwen3": "tiny_moe", "llama4": "tiny"}
COMPILE = ("--compile.enable", "--compile.backend", "aot_eager")


@pytest.fixture
def job(text, tmp_path):
    with one_process():
        yield lambda model, *flags: parse(
            tmp_path, toml(model, flavor=MODELS[model]), *training(text, tmp_path), *flags
        )


def blocks_with_experts(t) -> list:
    layers = [layer for part in t.model_parts for layer in part.layers.values()]
    blocks = [getattr(layer, "_checkpoint_wrapped_module", layer) for layer in layers]
    return [block for block in blocks if getattr(block, "moe_enabled", False)]


@pytest.fixture
def regions(monkeypatch):
    """The tokens of each call of a region."""
    calls = []
    compiled = moe_block.compiled_before_experts

    def counted(backend):
        region = compiled(backend)
        return lambda *args, **kwargs: calls.append(args[6].shape) or region(*args, **kwargs)

    monkeypatch.setattr(moe_block, "compiled_before_experts", counted)
    return calls


@pytest.mark.parametrize("checkpointing", [None, "op", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_a_block_computes_what_torchtitans_does(job, monkeypatch, regions, model, checkpointing):
    flags = CHECKPOINTING.get(checkpointing, ("--activation_checkpoint.mode", "none"))
    flags += ("--debug.deterministic", *COMPILE)
    with trainer(job(model, *flags)) as t:
        got = loss_and_gradients(t)
        blocks = blocks_with_experts(t)
        assert blocks and all(isinstance(block, moe_block.MoEBlock) for block in blocks)
        tokens = [block.moe.tokens_per_expert.clone() for block in blocks]
    passes = 1 if checkpointing is None else 2
    assert len(regions) == passes * len(blocks)
    monkeypatch.setattr(moe_block, "_COMPILED", {})
    with trainer(job(model, *flags)) as t:
        want = loss_and_gradients(t)
        blocks = blocks_with_experts(t)
        assert not any(isinstance(block, moe_block.MoEBlock) for block in blocks)
        counts = [block.moe.tokens_per_expert for block in blocks]
    assert len(regions) == passes * len(blocks)
    assert got.keys() == want.keys()
    for name in got:
        # The gradients of the residual stream may be summed in another order.
        assert (got[name] - want[name]).norm() <= 1e-5 * want[name].norm(), name
    assert all(map(torch.equal, tokens, counts)) and all(count.any() for count in counts)


def test_a_hook_on_the_moe_layer_still_runs(job, regions):
    with trainer(job("deepseek_v3", *COMPILE)) as t:
        *others, last = blocks_with_experts(t)
        calls = []
        last.moe.register_forward_hook(lambda *args: calls.append(args))
        loss_and_gradients(t)
    assert len(calls) == 1 and len(regions) == len(others)


@pytest.mark.parametrize(
    "flags", [(), (*COMPILE, "--compile.components", "loss")], ids=["eager", "loss only"]
)
def test_blocks_that_are_not_compiled_stay_torchtitans(job, regions, flags):
    with trainer(job("deepseek_v3", *flags)) as t:
        loss_and_gradients(t)
        blocks = blocks_with_experts(t)
    assert blocks and not any(isinstance(block, moe_block.MoEBlock) for block in blocks)
    assert not regions


def test_bf16_stays_torchtitans(job, regions):
    flags = ("--quantize.linear.titan_fp8.recipe", "bf16")
    flags += ("--quantize.grouped_mm.titan_fp8.permutation", "gather")
    with trainer(job("deepseek_v3", *COMPILE, *flags)) as t:
        blocks = blocks_with_experts(t)
        assert all(isinstance(block.attention, OptimizedModule) for block in blocks)
        loss_and_gradients(t)
    assert not regions
