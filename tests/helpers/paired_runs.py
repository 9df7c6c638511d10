"""Paired runs of tiny models, for the tests of scripts/converge."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from titan import one_process

SCRIPTS = Path(__file__).parents[2] / "scripts/converge"
TINY = Path(__file__).with_name("tiny.toml")
TOKENS = 512
SHORT = ("--training.steps", "12", "--lr_scheduler.warmup_steps", "2")


def write_text(path: Path) -> Path:
    """A text in which each token has four successors, so that a model learns it in some steps."""
    generator = np.random.default_rng(0)
    successors = generator.integers(0, TOKENS, (TOKENS, 4))

    def tokens(count: int) -> np.ndarray:
        found, last = np.empty(count, np.uint16), 0
        for i, choice in enumerate(generator.integers(0, 4, count)):
            found[i] = last = successors[last, choice]
        return found

    train, held_out = tokens(30_000), tokens(1_200)
    np.savez(path, train=train, held_out=held_out, vocabulary=TOKENS, end=1)
    return path


def write_moe(folder: Path) -> Path:
    """The TOML of torchtitan's tiny DeepSeekV3 of titan.py, otherwise as tiny.toml."""
    toml = TINY.read_text()
    for old, new in (
        ('"llama3"', '"deepseek_v3"'),
        ('"paired_tiny"', '"tiny"'),
        ('_fp8"]', '_fp8", "quantize.grouped_mm.titan_fp8"]'),
    ):
        toml = toml.replace(old, new)
    path = folder / "tiny_moe.toml"
    path.write_text(toml + '\n[quantize.grouped_mm.titan_fp8]\npermutation = "gather"\n')
    return path


@contextlib.contextmanager
def paired_trainer(arm: str, text: Path, toml: Path, *flags: str) -> Iterator:
    """A `PairedTrainer` in this process; torchtitan forgets the models that it registers."""
    from torchtitan.protocols import train_spec
    from worker import PairedTrainer, job_config, texts

    with one_process():
        try:
            config = job_config(str(toml), [*SHORT, *flags], arm)
            trainer = PairedTrainer(config, texts.read(text))
            yield trainer
            trainer.close()
        finally:
            train_spec._extra_train_specs.clear()
