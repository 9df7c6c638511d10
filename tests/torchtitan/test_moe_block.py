"""Blocks with experts, compiled as one region up to the experts, compute what torchtitan's do."""

import pickle

import pytest
import torch
from titan import (
    CHECKPOINTING,
    COMPILE,
    COMPILE_BLOCKS,
    TRACE_BLOCKS,
    loss_and_gradients,
    one_process,
    parse,
    toml,
    trainer,
    training,
)
from torch._dynamo import OptimizedModule
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _CachingTorchDispatchMode, _VersionWrapper
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.deepseek_v3.infra.parallelize import _op_sac_save_list

from titan_fp8.host.torchtitan_0_2 import moe_block

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")

MODELS = {"deepseek_v3": "one_block", "qwen3": "tiny_moe", "llama4": "one_block"}


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


def test_a_block_can_be_pickled():
    classes = [*moe_block._COMPILED.values()]
    assert pickle.loads(pickle.dumps(classes)) == classes


@pytest.mark.parametrize("model", MODELS)
def test_a_block_computes_what_torchtitans_does(job, monkeypatch, regions, model):
    """The same with and without activation checkpointing.

    Checkpoints run forward twice, so torchtitan counts tokens twice.
    """

    def run(*flags, ours: bool) -> tuple[dict, list]:
        with trainer(job(model, "--debug.deterministic", *COMPILE_BLOCKS, *flags)) as t:
            gradients = loss_and_gradients(t)
            blocks = blocks_with_experts(t)
        assert blocks and {isinstance(block, moe_block.MoEBlock) for block in blocks} == {ours}
        return gradients, [block.moe.tokens_per_expert.clone() for block in blocks]

    results = []
    ways = (CHECKPOINTING["op"], ())
    for flags in ways if model == "deepseek_v3" else ways[:1]:
        if not flags:
            torch._dynamo.reset()  # So that it is compiled outside of checkpoints, too.
        regions.clear()
        gradients, tokens = run(*flags, ours=True)
        passes = 2 if flags else 1
        assert len(regions) == passes * len(tokens)
        results.append((gradients, [count / passes for count in tokens]))
    regions.clear()
    monkeypatch.setattr(moe_block, "_COMPILED", {})
    want, counts = run(ours=False)
    assert not regions and all(count.any() for count in counts)
    for got, tokens in results:
        assert got.keys() == want.keys()
        assert not [name for name in got if not torch.equal(got[name], want[name])]
        assert all(map(torch.equal, tokens, counts))


def test_all_blocks_share_one_graph(job):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with trainer(job("qwen3", *TRACE_BLOCKS)) as t:
        assert len(blocks_with_experts(t)) == 2
        loss_and_gradients(t)
    # Experts and shared experts are not compiled.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_hook_on_a_part_still_runs(job, regions):
    with trainer(job("qwen3", *TRACE_BLOCKS)) as t:
        first, last = blocks_with_experts(t)
        for part in ("moe", "attention", "ffn_norm", "moe.router", "moe.reorderer"):
            regions.clear()
            calls = []
            handle = last.get_submodule(part).register_forward_hook(
                lambda *args, calls=calls: calls.append(args)
            )
            loss_and_gradients(t)
            assert len(calls) == 1 and len(regions) == 1, part
            handle.remove()
            loss_and_gradients(t)
            assert len(calls) == 1 and len(regions) == 1 + 2, part


def test_a_hook_on_the_shared_experts_still_runs(job, regions):
    with trainer(job("deepseek_v3", *TRACE_BLOCKS)) as t:
        (block,) = blocks_with_experts(t)
        calls = []
        block.moe.shared_experts.register_forward_hook(lambda *args: calls.append(args))
        loss_and_gradients(t)
    assert len(calls) == 1 and len(regions) == 1


@pytest.fixture
def seen(monkeypatch):
    """The ops that checkpoints see in forward. Those of titan_fp8 are not saved."""
    ops = []
    dispatch = _CachingTorchDispatchMode.__torch_dispatch__

    def note(self, func, *args):
        ops.append(func)
        out = dispatch(self, func, *args)
        of_fp8 = [each for op, each in self.storage.items() if "titan_fp8" in str(op)]
        assert not [x for x in tree_leaves(of_fp8) if isinstance(x, _VersionWrapper)]
        return out

    monkeypatch.setattr(_CachingTorchDispatchMode, "__torch_dispatch__", note)
    return ops


def test_checkpoints_see_ops_only_where_they_save_some(job, monkeypatch, seen):
    """Ops outside of the region, and those of a region with FlexAttention, are not dispatched.

    FlexAttention cannot be trained on the CPU, so SDPA stands in for it; checkpoints do not save
    what the CPU's SDPA returns.
    """
    flags = (*COMPILE_BLOCKS, "--compile.backend", "inductor", *CHECKPOINTING["op"])
    results = []
    with trainer(job("qwen3", *flags)) as t:
        for wrapper in (moe_block.FlexAttentionWrapper, ScaledDotProductAttentionWrapper):
            monkeypatch.setattr(moe_block, "FlexAttentionWrapper", wrapper)
            loss_and_gradients(t)  # compiles
            seen.clear()
            results.append((loss_and_gradients(t), set(seen)))
    (want, with_mode), (got, without) = results
    assert not [name for name in want if not torch.equal(got[name], want[name])]
    assert without < with_mode
    assert not _op_sac_save_list & with_mode  # so nothing is lost without the mode
    assert not [op for op in without if "titan_fp8" in str(op)]


def test_checkpoints_see_what_uncompiled_code_of_a_region_calls(job, monkeypatch, seen):
    """With another backend than Inductor, products of matrices are dispatched, and some saved."""
    monkeypatch.setattr(moe_block, "FlexAttentionWrapper", ScaledDotProductAttentionWrapper)
    with trainer(job("deepseek_v3", *COMPILE_BLOCKS, *CHECKPOINTING["op"])) as t:
        loss_and_gradients(t)
        seen.clear()
        loss_and_gradients(t)
    assert torch.ops.aten.mm.default in seen


@pytest.mark.parametrize(
    "flags", [(), (*COMPILE, "--compile.components", "loss")], ids=["eager", "loss only"]
)
def test_without_the_compiler_blocks_stay_torchtitans(job, regions, flags):
    with trainer(job("deepseek_v3", *flags)) as t:
        loss_and_gradients(t)
        blocks = blocks_with_experts(t)
    assert blocks and not any(isinstance(block, moe_block.MoEBlock) for block in blocks)
    assert not regions


def test_in_bf16_the_key_compiles_blocks_that_compute_the_same(job, regions):
    """The same as torchtitan's blocks with gathers, which alone leave them in parts."""
    results = []
    for speedups in ("False", "True"):
        flags = ("--quantize.linear.titan_fp8.recipe", "bf16", *CHECKPOINTING["op"])
        flags += ("--quantize.grouped_mm.titan_fp8.permutation", "gather")
        flags += ("--quantize.linear.titan_fp8.host_speedups", speedups, *COMPILE_BLOCKS)
        with trainer(job("deepseek_v3", "--debug.deterministic", *flags)) as t:
            blocks = blocks_with_experts(t)
            assert all(isinstance(block.attention, OptimizedModule) for block in blocks)
            results.append(loss_and_gradients(t))
        assert bool(regions) == (speedups == "True")
    want, got = results
    assert want.keys() == got.keys()
    assert not [name for name in got if not torch.equal(got[name], want[name])]
