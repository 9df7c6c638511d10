"""Checkpoints of torchtitan 0.3: bf16 into FP8 and back, also where FSDP2 gathers in FP8."""

from pathlib import Path

import titan_0_3
import torch
from gloo import spawn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.trainer import Trainer

OVERRIDES = {
    "bf16": "titan_fp8.torchtitan_0_3.bf16",
    "fp8": "titan_fp8.torchtitan_0_3.blockwise",
    "gathers": 'titan_fp8.torchtitan_0_3.blockwise={"fsdp_all_gather": true}',
}


def train(recipe: str, flags: list[str], steps: int, load: Path | None = None) -> tuple:
    """The losses of `steps` steps, and all parameters before and after; saves a checkpoint."""
    loading = ["--checkpoint.initial_load_path", load, "--checkpoint.no-initial-load-model-only"]
    flags = [*flags, "--override.imports", OVERRIDES[recipe], *(loading if load else [])]
    config = titan_0_3.parse("llama3_plain", *flags)
    losses: list[float] = []
    with titan_0_3.trainer(config) as trainer:
        assert trainer.checkpointer.load() == bool(load)
        trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
        before = parameters(trainer)
        data = trainer.batch_generator(trainer.dataloader)
        for _ in range(steps):
            trainer.step += 1
            trainer.train_step(data)
        trainer.checkpointer.save(trainer.step, last_step=True)
        return losses, before, parameters(trainer)


def parameters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in trainer.model_parts[0].named_parameters()}


def whole(parameter: Tensor) -> Tensor:
    values = parameter.detach()
    return (values.full_tensor() if isinstance(values, DTensor) else values).clone()


def exchange(rank: int, text: Path, folder: Path) -> None:
    def flags(name: str) -> list[str]:
        checkpoints = ("--checkpoint.enable", "--checkpoint.no-last-save-model-only")
        return titan_0_3.flags(text, folder / name, *checkpoints)

    *_, saved = train("gathers", flags("first"), 2)
    _, loaded, bf16 = train("bf16", flags("second"), 1, folder / "first/checkpoint/step-2")
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert any(not torch.equal(saved[name], bf16[name]) for name in saved)
    second = folder / "second/checkpoint/step-3"
    fp8, gathers = (train(name, flags(name), 2, second) for name in ("fp8", "gathers"))
    assert len(fp8[0]) == 2 and fp8[0] == gathers[0]
    for name, values in fp8[-1].items():
        assert torch.equal(values, gathers[-1][name])


def test_checkpoints_load_into_bf16_and_into_fp8_gathers(text, tmp_path):
    spawn(exchange, 2, text, tmp_path)
