"""`health_freq` in torchtitan's trainer: which steps it reports, what, and at what cost."""

import logging
from unittest import mock

import pytest
import torch
from count import CountKernels
from health_runs import Recorder, assert_complete, layers_in, run, steps, tags
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from titan import (
    BOTH,
    CHECKPOINTING,
    COMPILE,
    CONVERTERS,
    GROUPED_MM,
    LINEAR,
    TRACE_BLOCKS,
    one_process,
    parse,
    toml,
    trainer,
    training,
)

from titan_fp8.health import report
from titan_fp8.ops import observe

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")


@pytest.fixture
def job(text, tmp_path):
    """Makes the config of a tiny training job with these frequencies of health reports."""

    def make(model, *flags, linear=0, experts=0):
        common = [*training(text, tmp_path), "--training.steps", 4]
        freqs = [f"--{LINEAR}.health_freq", linear] if linear else []
        freqs += [f"--{GROUPED_MM}.health_freq", experts] if experts else []
        return parse(tmp_path, toml(model, CONVERTERS[model]), *common, *freqs, *flags)

    with one_process():
        yield make
    observe(None)


def linears(model: str) -> set[str]:
    """The names of the linears of a tiny model."""
    attention = ["wq", "wk", "wv", "wo"] if model == "llama3" else ["wq", "wkv_a", "wkv_b", "wo"]
    feed_forward = [f"feed_forward.w{i}" for i in (1, 2, 3)]
    shared = [f"moe.shared_experts.w{i}" for i in (1, 2, 3)] if model != "llama3" else feed_forward
    names = {f"layers.{i}.attention.{w}" for i in (0, 1) for w in attention}
    return names | {f"layers.0.{w}" for w in feed_forward} | {f"layers.1.{w}" for w in shared}


EXPERTS = {f"layers.1.moe.experts.w{i}" for i in (1, 2, 3)}


def test_steps_layers_and_losses(job):
    without = run(job("deepseek_v3"))
    found = run(job("deepseek_v3", linear=2, experts=3))
    assert found.losses() == without.losses()
    assert not without.health()
    health = found.health()
    tokens_of = {
        f"health_tokens_per_expert/layers.1.moe.experts/{name}" for name in ("mean", "max", "min")
    }
    assert {step: set(metrics) for step, metrics in health.items()} == {
        2: tags(linears("deepseek_v3")),
        3: tags(EXPERTS) | tokens_of,
        4: tags(linears("deepseek_v3")),
    }
    for metrics in health.values():
        assert_complete(metrics)
    experts = {name: health[3][f"health_tokens_per_expert/layers.1.moe.experts/{name}"]
               for name in ("mean", "max", "min")}  # fmt: skip
    tokens, count, top_k = 2 * 96, 4, 2
    assert experts["mean"] == tokens * top_k / count
    assert experts["min"] <= experts["mean"] <= experts["max"]


@pytest.mark.parametrize(
    "model, flags",
    [
        ("llama3", (*COMPILE, *CHECKPOINTING["op"])),
        ("llama3", ("--training.global_batch_size", 4, *CHECKPOINTING["full"])),
        ("deepseek_v3", (*TRACE_BLOCKS, f"--{LINEAR}.recipe", "blockwise_pow2")),
        ("deepseek_v3", (f"--{LINEAR}.recipe", "rowwise", *CHECKPOINTING["layer 2"])),
    ],
)
def test_every_operand_is_seen_in_every_mode(job, model, flags):
    freqs = {"linear": 2} if model == "llama3" else {"linear": 2, "experts": 2}
    health = run(job(model, "--training.steps", 2, *flags, **freqs)).health()
    assert layers_in(health[2]) == linears(model) | (EXPERTS if model != "llama3" else set())
    assert_complete(health[2])


def test_only_observed_steps_cost_anything(job):
    def kernels(config) -> list[int]:
        counts = []
        with trainer(config) as t:
            batches = t.batch_generator(t.dataloader)
            for _ in range(t.job_config.training.steps):
                t.step += 1
                with CountKernels() as counted:
                    t.train_step(batches)
                counts.append(counted.calls.total())
        return counts

    without = kernels(job("llama3"))
    found = kernels(job("llama3", linear=3))
    more = [a - b for a, b in zip(found, without)]
    # The report computes with small tensors on the CPU.
    assert 0 < more.pop(2) < 32 * len(linears("llama3")) + 2000
    assert more == [0, 0, 0]


def test_validation_is_not_observed(job, text):
    validation = [
        *("--validation.enable", "--validation.freq", 1, "--validation.steps", 2),
        *("--validation.dataset", "c4_test", "--validation.dataset_path", text / "corpus"),
        *("--validation.local_batch_size", 2, "--validation.seq_len", 96),
    ]
    two = ("--training.steps", 2)
    expected = run(job("llama3", *two, linear=2)).health()
    found = Recorder()
    with trainer(job("llama3", *two, *validation, linear=2)) as t:
        t.metrics_processor.logger = found
        t.train()
    assert found.health() == expected
    assert "validation_metrics/loss" in found.steps[2]


def test_the_log_and_the_event_files(job, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(report, "UNDERFLOW_BOUND", -1)
    with trainer(job("llama3", "--metrics.enable_tensorboard", linear=4)) as t:
        steps(t)
    (text,) = [r.getMessage() for r in caplog.records if "FP8 health of step 4" in r.getMessage()]
    assert "attention.wq" in text and "worst layers" in text
    (warning,) = [r.getMessage() for r in caplog.records if "became zero" in r.getMessage()]
    assert warning.startswith("titan_fp8: step 4") and "layers." in warning
    (file,) = tmp_path.rglob("*tfevents*")
    events = EventAccumulator(str(file)).Reload()
    scalars = {tag for tag in events.Tags()["scalars"] if tag.startswith("health")}
    assert "health_underflow/attention.wq/g_dgrad" in scalars
    assert {e.step for tag in scalars for e in events.Scalars(tag)} == {4}


def test_a_report_survives_a_failure_of_the_next_step(job):
    recorder = Recorder()
    with trainer(job("llama3", linear=2)) as t, pytest.raises(RuntimeError, match="out of memory"):
        t.metrics_processor.logger = recorder
        block = t.model_parts[0].layers["1"]
        batches = t.batch_generator(t.dataloader)
        for t.step in (1, 2, 3):
            if t.step == 3:
                block.register_forward_pre_hook(
                    mock.Mock(side_effect=RuntimeError("out of memory"))
                )
            t.train_step(batches)
    assert_complete(recorder.health()[2])


@pytest.mark.parametrize("where", [(3, 5), ...])
def test_nan_is_reported_with_the_layer(job, caplog, where):
    with trainer(job("llama3", linear=3)) as t:
        batches = t.batch_generator(t.dataloader)
        for _ in range(4):
            t.step += 1
            if t.step == 3:
                with torch.no_grad():
                    t.model_parts[0].layers["1"].feed_forward.w2.weight[where] = float("nan")
            t.train_step(batches)
    (warning,) = [r.getMessage() for r in caplog.records if "NaN or Inf" in r.getMessage()]
    # Forward is broken from here on, and all of backward.
    assert "operands of layers.1.feed_forward.w2 (w fprop, g dgrad, " in warning
    assert warning.endswith("more layers")


@pytest.mark.parametrize("value", [-1, True, 1.5, '"10"'])
@pytest.mark.parametrize("section", BOTH)
def test_a_bad_frequency(tmp_path, section, value):
    body = f"[{section}]\nhealth_freq = {str(value).lower()}\n"
    with pytest.raises(ValueError, match=r"health_freq = .*: allowed are whole numbers"):
        parse(tmp_path, toml("deepseek_v3") + body)
