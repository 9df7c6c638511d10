"""Trainings in torchtitan that report the health of FP8, and what they must report."""

from typing import Any

from titan_fp8.health.observer import OPERANDS
from titan_fp8.health.report import kind_of


class Recorder:
    """In place of torchtitan's logger: the metrics of each step."""

    def __init__(self):
        self.steps: dict[int, dict[str, float]] = {}

    def log(self, metrics, step):
        self.steps.setdefault(step, {}).update(metrics)

    def close(self):
        pass

    def health(self) -> dict[int, dict[str, float]]:
        """The metrics of health alone, without the steps that have none."""
        found = {
            step: {tag: value for tag, value in metrics.items() if tag.startswith("health")}
            for step, metrics in self.steps.items()
        }
        return {step: metrics for step, metrics in found.items() if metrics}

    def losses(self) -> list[float]:
        return [metrics["loss_metrics/global_avg_loss"] for metrics in self.steps.values()]


def run(config) -> Recorder:
    """The steps of a training with torchtitan 0.2, without validation and checkpoints."""
    from titan import trainer

    recorder = Recorder()
    with trainer(config) as t:
        t.metrics_processor.logger = recorder
        steps(t)
    return recorder


def steps(t: Any) -> None:
    """The trainer's steps, without the two seconds that it sleeps in the end."""
    batches = t.batch_generator(t.dataloader)
    for _ in range(t.job_config.training.steps):
        t.step += 1
        t.train_step(batches)


def tags(layers: set[str]) -> set[str]:
    """Those of all scalars of a step, but for tokens per expert."""
    operands = [operand.replace(" ", "_") for operand in OPERANDS]
    shares = ("underflow", "at_448", "error", "non_finite")
    kinds = {kind_of(layer) for layer in layers}
    found = {f"health_{name}/{kind}/{of}" for name in shares for kind in kinds for of in operands}
    found |= {f"health_scale_spread/{kind}" for kind in kinds}
    return found | {
        f"health_layer_{name}/{layer}" for name in (*shares, "scale_spread") for layer in layers
    }


def layers_in(metrics: dict[str, float]) -> set[str]:
    prefix = "health_layer_error/"
    return {tag.removeprefix(prefix) for tag in metrics if tag.startswith(prefix)}


def assert_complete(metrics: dict[str, float]) -> None:
    """Every operand of every kind of layers was seen, and its error is that of four bits."""
    kinds = {tag.split("/")[1] for tag in metrics if tag.startswith("health_error/")}
    for kind in kinds:
        for operand in OPERANDS:
            error = metrics[f"health_error/{kind}/{operand.replace(' ', '_')}"]
            assert 0.01 < error < 0.03, (kind, operand)
