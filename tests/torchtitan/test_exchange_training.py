"""`exchange = "fp8"` in torchtitan: trains nearly as the all-to-alls in bf16 do, under any plan.

The CPU has all-to-alls in place of GPUs that write to each other's memory. With `cuda_graph` tokens
in high precision travel by such writes, too, and train as by all-to-alls, bit for bit; here
`peers.py` stands in for them.
"""

import logging
from pathlib import Path

import gloo
import pytest
import torch
from peers import use_peers
from titan import (
    BOTH,
    CHECKPOINTING,
    GROUPED_MM,
    LINEAR,
    ONE_BLOCK,
    TRACE_BLOCKS,
    converted,
    loss_and_gradients,
    of_type,
    parse,
    toml,
    trainer,
    training,
)

from titan_fp8.host.torchtitan_0_2.moe import GatherMoE

EP = ("--parallelism.expert_parallel_degree", 2)
TP = ("--parallelism.tensor_parallel_degree", 2)
EXPERT_TP = "--parallelism.expert_tensor_parallel_degree"


def train_both_ways(
    rank: int, ranks: int, folder: Path, text: Path, model: str, *flags: object
) -> None:
    """The gradients by copies in bf16 and by tokens in FP8; on two ranks those of two batches."""
    folder = folder / str(rank)
    folder.mkdir()
    flags = (*training(text, folder), "--debug.deterministic", *flags)
    results = []
    for exchange in ("bf16", "fp8"):
        key = (f"--{GROUPED_MM}.exchange", exchange)
        with trainer(parse(folder, toml(model, BOTH), *flags, *key)) as t:
            layers = of_type(t.model_parts[0], GatherMoE).values()
            assert all((x.exchange is None) == (exchange == "bf16") for x in layers)
            results.append([loss_and_gradients(t, seed) for seed in range(4 // ranks)])
    for want, got in zip(*results, strict=True):
        assert want.keys() == got.keys()
        # Unless they are weighted first, tokens in FP8 are what experts would have made of them.
        assert model == "llama4" or torch.equal(got["loss"], want["loss"])
        # Equal experts have equal scores, whose gradient, normalized, is rounding errors.
        large = {n: t for n, t in want.items() if t.norm() > 1e-9}
        errors = {n: float((got[n] - t).norm() / t.norm()) for n, t in large.items()}
        assert max(errors.values()) < 0.1, errors
        assert all(e > 0 for n, e in errors.items() if ".experts." in n), errors


@pytest.mark.parametrize(
    "model, ranks, flags",
    [
        ("deepseek_v3", 2, (*EP, *TRACE_BLOCKS, *ONE_BLOCK, *CHECKPOINTING["op"])),
        ("deepseek_v3", 4, (*EP, *ONE_BLOCK, *CHECKPOINTING["full"])),
        ("deepseek_v3", 4, (*EP, *TP, *ONE_BLOCK, EXPERT_TP, 2)),
        ("llama4", 2, (*EP, *ONE_BLOCK)),
    ],
    ids=["op, compiled", "full, FSDP2", "expert TP 2", "llama4"],
)  # fmt: skip
def test_training_hardly_changes(tmp_path, text, model, ranks, flags):
    gloo.spawn(train_both_ways, ranks, ranks, tmp_path, text, model, *flags)


def train_rows(rank: int, ranks: int, folder: Path, text: Path, model: str, *flags: object) -> None:
    """The same by all-to-alls and by peers in high precision."""
    folder = folder / str(rank)
    folder.mkdir()
    flags = (*training(text, folder), "--debug.deterministic", *flags)
    results = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_peers(monkeypatch)
        for key in ((), (f"--{LINEAR}.cuda_graph", f"--{GROUPED_MM}.exchange_capacity", ranks)):
            with trainer(parse(folder, toml(model, BOTH), *flags, *key)) as t:
                layers = of_type(t.model_parts[0], GatherMoE).values()
                assert all((x.exchange is not None) == bool(key) for x in layers)
                results.append([loss_and_gradients(t, seed) for seed in range(2)])
    for want, got in zip(*results, strict=True):
        assert want.keys() == got.keys()
        assert not [n for n, t in want.items() if not torch.equal(got[n], t)]


BF16 = (f"--{LINEAR}.recipe", "bf16", f"--{LINEAR}.host_speedups", "True")
ROWWISE = (f"--{LINEAR}.recipe", "rowwise")


@pytest.mark.parametrize(
    "model, ranks, flags",
    [
        ("deepseek_v3", 2, (*EP, *ONE_BLOCK, *CHECKPOINTING["op"], *BF16)),
        ("qwen3", 2, (*EP, "--model.flavor", "tiny_moe", *ROWWISE)),
        ("qwen3", 4, (*EP, "--model.flavor", "tiny_moe", *CHECKPOINTING["early stop"], *BF16)),
        ("llama4", 2, (*EP, *ONE_BLOCK, *CHECKPOINTING["early stop"])),
    ],
    ids=["op, bf16", "rowwise", "bf16", "llama4"],
)  # fmt: skip
def test_rows_by_peers_train_the_same(tmp_path, text, model, ranks, flags):
    gloo.spawn(train_rows, ranks, ranks, tmp_path, text, model, *flags)


@pytest.mark.parametrize(
    "lines, words",
    [
        ("exchange_capacity = 0.5", "exchange_capacity = 0.5: allowed are finite numbers from 1"),
        ("exchange_capacity = inf", "exchange_capacity = inf: allowed are finite numbers from 1"),
        ("exchange_capacity = true", "exchange_capacity = True: allowed are finite numbers"),
        ('exchange = "fp16"', "exchange = 'fp16': allowed are 'bf16', 'fp8'"),
        ('exchange = "fp8"\nrecipe = "rowwise"', "recipe = 'rowwise'.*: allowed are a blockwise"),
        ('exchange = "fp8"\npermutation = "host"', "permutation = 'host': allowed are .*gather"),
    ],
)
def test_bad_settings_are_named(tmp_path, lines, words):
    with pytest.raises(ValueError, match=words):
        parse(tmp_path, f"{toml('deepseek_v3', BOTH)}\n[{GROUPED_MM}]\n{lines}\n")


def test_a_job_that_exchanges_nothing_says_so(tmp_path, caplog):
    key = (f"--{GROUPED_MM}.exchange", "fp8")
    caplog.set_level(logging.WARNING)
    parse(tmp_path, toml("deepseek_v3", BOTH), *key, f"--{LINEAR}.recipe", "bf16")
    model = converted(parse(tmp_path, toml("deepseek_v3", BOTH), *key))
    assert 'exchange = "fp8" changes nothing: no MoE layer exchanges tokens by it' in caplog.text
    assert all(layer.exchange is None for layer in of_type(model, GatherMoE).values())
