"""Layers that exchange their tokens by themselves train as with torchtitan's hooks.

The CPU has all-to-alls in place of GPUs that write to each other's memory.
"""

from pathlib import Path

import gloo
import pytest
import torch
from titan import (
    BOTH,
    CHECKPOINTING,
    GROUPED_MM,
    ONE_BLOCK,
    TRACE_BLOCKS,
    loss_and_gradients,
    parse,
    toml,
    trainer,
    training,
)

from titan_fp8.torchtitan_0_2 import moe, peer_exchange

EP = ("--parallelism.expert_parallel_degree", 2)
TP = ("--parallelism.tensor_parallel_degree", 2)
EXPERT_TP = "--parallelism.expert_tensor_parallel_degree"


def train_both_ways(rank: int, folder: Path, text: Path, model: str, *flags: object) -> None:
    """Two steps by hooks, by the layers themselves in bf16, and with FP8 on the wire."""
    folder = folder / str(rank)
    folder.mkdir()
    flags = (*training(text, folder), "--debug.deterministic", *flags)
    results = []
    for way in ("hooks", "layers", "fp8"):
        key = (f"--{GROUPED_MM}.exchange", "fp8" if way == "fp8" else "bf16")
        with pytest.MonkeyPatch.context() as patch:
            if way == "layers":
                patch.setattr(moe, "can_exchange", lambda experts, *_: True)
            peer_exchange.exchanging.clear()
            with trainer(parse(folder, toml(model, BOTH), *flags, *key)) as t:
                results.append([loss_and_gradients(t, seed) for seed in (0, 1)])
            assert bool(peer_exchange.exchanging) == (way != "hooks")
    hooks, layers, fp8 = results
    for want, got, near in zip(hooks, layers, fp8, strict=True):
        assert want.keys() == got.keys() == near.keys()
        exact = EXPERT_TP not in flags
        for name, tensor in want.items():
            if exact:
                assert torch.equal(tensor, got[name]), name
            bound = 0 if exact else 0.02
            assert (got[name] - tensor).norm() <= bound * tensor.norm(), name
        # Unless they are weighted first, tokens in FP8 are what experts would have made of them.
        assert model == "llama4" or torch.equal(near["loss"], want["loss"])
        errors = {n: float((near[n] - t).norm() / t.norm()) for n, t in want.items() if t.any()}
        assert max(errors.values()) < 0.1, errors
        assert all(e > 0 for n, e in errors.items() if ".experts." in n), errors


@pytest.mark.parametrize(
    "model, ranks, flags",
    [
        ("deepseek_v3", 2, (*EP, *CHECKPOINTING["full"])),
        ("deepseek_v3", 2, (*EP, *TRACE_BLOCKS, *ONE_BLOCK, *CHECKPOINTING["op"])),
        ("llama4", 2, (*EP, *ONE_BLOCK)),
        ("deepseek_v3", 4, (*EP, *ONE_BLOCK, *CHECKPOINTING["full"])),
        ("deepseek_v3", 4, (*EP, *TP, *ONE_BLOCK, EXPERT_TP, 1)),
        ("deepseek_v3", 4, (*EP, *TP, *ONE_BLOCK, EXPERT_TP, 2)),
    ],
    ids=["full", "op, compiled", "llama4", "FSDP2", "expert TP 1", "expert TP 2"],
)  # fmt: skip
def test_training_does_not_change(tmp_path, text, model, ranks, flags):
    gloo.spawn(train_both_ways, ranks, tmp_path, text, model, *flags)


@pytest.mark.parametrize(
    "lines, words",
    [
        ("exchange_capacity = 0.5", "exchange_capacity = 0.5: allowed are numbers from 1 on"),
        ('exchange = "fp16"', "exchange = 'fp16': allowed are 'bf16', 'fp8'"),
        ('exchange = "fp8"\nrecipe = "rowwise"', "recipe = 'rowwise'.* needs a blockwise recipe"),
        ('exchange = "fp8"\npermutation = "host"', "permutation = 'host': it needs .*gather"),
    ],
)
def test_bad_settings_are_named(tmp_path, lines, words):
    with pytest.raises(ValueError, match=words):
        parse(tmp_path, f"{toml('deepseek_v3', BOTH)}\n[{GROUPED_MM}]\n{lines}\n")
