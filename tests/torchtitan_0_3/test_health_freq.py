"""`health_freq` in torchtitan 0.3's trainer, on one rank; others are in `test_training.py`."""

import os
from collections.abc import Callable, Iterator

import pytest
import titan_0_3
import torch
import torch.distributed as dist
from count import CountKernels
from health_runs import Recorder, assert_complete, tags
from torchtitan.trainer import Trainer

from titan_fp8.ops import observe
from titan_fp8.torchtitan_0_3 import FP8LinearConverter
from titan_fp8.torchtitan_0_3.linear import FP8Linear

ADAPTER = "titan_fp8.torchtitan_0_3"
EXPERTS = "layers.1.moe.routed_experts.inner_experts"
EXPERT_WEIGHTS = {f"{EXPERTS}.{name}" for name in ("w1_EFD", "w2_EDF", "w3_EFD")}
TOKENS = {f"health_tokens_per_expert/{EXPERTS}/{name}" for name in ("mean", "max", "min")}
COMPILE = ("--compile.enable", "--compile.components", "model", "--compile.backend", "eager")


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    observe(None)


@pytest.fixture
def parse(text, tmp_path) -> Callable[..., Trainer.Config]:
    """Makes the config of a training of four steps."""

    def make(config: str, *more: object) -> Trainer.Config:
        flags = titan_0_3.flags(text, tmp_path, "--training.steps", 4, *more)
        return titan_0_3.parse(config, *flags)

    return make


def steps(trainer: Trainer) -> Iterator[int]:
    """The steps of a training, each before it runs."""
    data = trainer.batch_generator(trainer.dataloader)
    for step in range(1, trainer.config.training.steps + 1):
        trainer.step = step
        yield step
        trainer.train_step(data)


def run(config: Trainer.Config) -> tuple[Recorder, set[str]]:
    """The metrics of a training, and the names of its FP8 linears."""
    recorder = Recorder()
    with titan_0_3.trainer(config) as trainer:
        trainer.metrics_processor.logger = recorder
        for _ in steps(trainer):
            pass
        linears = titan_0_3.of_type(trainer.model_parts[0], FP8Linear).values()
    return recorder, {linear.fqn for linear in linears}


def test_steps_layers_scalars_and_losses(parse):
    without, _ = run(parse("deepseek_v3_blockwise"))
    config = parse("deepseek_v3_plain")
    for converter, freq in zip(titan_0_3.converters("deepseek_v3"), (2, 3)):
        converter.health_freq = freq
        converter.build().convert(config.model_spec.model)
    found, linears = run(config)
    assert found.losses() == without.losses()
    assert not without.health()
    health = found.health()
    assert {step: set(metrics) for step, metrics in health.items()} == {
        2: tags(linears),
        3: tags(EXPERT_WEIGHTS) | TOKENS,
        4: tags(linears),
    }
    for metrics in health.values():
        assert_complete(metrics)


def test_an_override_observes_compiled_blocks(parse):
    override = f'{ADAPTER}.rowwise={{"health_freq": 2}}'
    flags = ("--training.steps", 2, "--override.imports", override, *COMPILE)
    found, linears = run(parse("deepseek_v3_plain", *flags))
    (metrics,) = found.health().values()
    assert tags(linears | EXPERT_WEIGHTS) | TOKENS == set(metrics)
    assert_complete(metrics)


def test_only_observed_steps_and_their_reports_cost_anything(parse):
    counts: dict[str, list[int]] = {}
    for name, converter in (
        ("without", FP8LinearConverter.Config()),
        ("with", FP8LinearConverter.Config(health_freq=3)),
    ):
        config = parse("llama3_plain")
        converter.build().convert(config.model_spec.model)
        counts[name] = []
        with titan_0_3.trainer(config) as trainer:
            data = trainer.batch_generator(trainer.dataloader)
            for step in range(1, 5):
                trainer.step = step
                with CountKernels() as counted:
                    trainer.train_step(data)
                counts[name].append(counted.calls.total())
    more = [a - b for a, b in zip(counts["with"], counts["without"])]
    assert more.pop(2) > 0 and more == [0, 0, 0]


def test_without_it_the_trainer_is_as_it_was():
    train_step = Trainer.train_step
    titan_0_3.small("llama3", [FP8LinearConverter.Config()])
    assert Trainer.train_step is train_step
    titan_0_3.small("llama3", [FP8LinearConverter.Config(recipe="bf16", health_freq=1)])
    assert Trainer.train_step is train_step


def test_nan_is_reported_before_it_ends_training(parse, caplog):
    config = parse("llama3_plain")
    FP8LinearConverter.Config(health_freq=2).build().convert(config.model_spec.model)
    ended = pytest.raises(RuntimeError, match="Loss is not finite")
    with titan_0_3.trainer(config) as trainer, ended:
        for step in steps(trainer):
            if step == 2:
                with torch.no_grad():
                    trainer.model_parts[0].layers["1"].feed_forward.w2.weight[3, 5] = torch.nan
    (warning,) = [r.getMessage() for r in caplog.records if "NaN or Inf" in r.getMessage()]
    assert "step 2" in warning and "operands of layers.1.feed_forward.w2 (w fprop" in warning
