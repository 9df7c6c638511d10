"""Observes every `health_freq`-th step of a run and reports it to torchtitan's metrics and log.

torchtitan asks its MetricsProcessor after every step, on every rank, whether to log the step. There
this module reports the step, if it was observed, and prepares the next one. So the first step after
a start is never observed. Between observed steps nothing of it runs but that one call.

Validation is not observed, nor is anything else that runs while the model is not in training mode.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_fp8.health import Layer, Observer, Report
from titan_fp8.health.report import union_of_names
from titan_fp8.linear import FP8Linear
from titan_fp8.ops.observe import observe
from titan_fp8.torchtitan_0_2 import patches
from titan_fp8.torchtitan_0_2.experts import FP8GroupedExperts


class Monitor:
    """Observes the steps of one job."""

    def __init__(self, linear_freq: int, experts_freq: int):
        self.freqs = {FP8Linear: linear_freq, FP8GroupedExperts: experts_freq}
        self.observer: Observer | None = None
        self.names: list[str] = []
        self._names_of: dict[tuple[bool, ...], list[str]] = {}

    def after(self, step: int, processor: Any) -> None:
        """Reports `step` if it was observed, and observes the next one if it is its turn.

        Args:
            processor: torchtitan's MetricsProcessor.
        """
        if self.observer is not None:
            observe(None)
            self.report(step, processor)
            self.observer = None
        due = tuple(freq > 0 and (step + 1) % freq == 0 for freq in self.freqs.values())
        if any(due) and step < processor.job_config.training.steps:
            models = processor.model_parts
            kinds = tuple(kind for kind, now in zip(self.freqs, due) if now)
            layers = list(layers_of(models, kinds))
            if due not in self._names_of:
                self._names_of[due] = union_of_names([layer.name for layer in layers])
            self.names = self._names_of[due]
            self.observer = Observer(layers, lambda: models[0].training, phase=step)
            observe(self.observer.wrap)

    def report(self, step: int, processor: Any) -> None:
        assert self.observer is not None
        own = [layer.name for layer in self.observer.layers]
        report = Report.of_rank(self.names, own, *self.observer.table())
        report = report.over_ranks(torch.device(utils.device_type))
        processor.logger.log(report.metrics(), step)
        logger.info(f"titan_fp8: FP8 health of step {step}, each figure at its worst\n{report}")
        for warning in report.warnings(step):
            logger.warning(f"titan_fp8: {warning}")


def layers_of(models: list[nn.Module], kinds: tuple[type[nn.Module], ...]) -> Iterator[Layer]:
    """The weights of the FP8 layers of these kinds."""
    for model in models:
        for module in model.modules():
            if isinstance(module, kinds):
                for parameter in ("weight",) if isinstance(module, FP8Linear) else _EXPERTS:
                    name = str(module.fqn)
                    yield Layer(
                        name if parameter == "weight" else f"{name}.{parameter}", module, parameter
                    )


_EXPERTS = ("w1", "w2", "w3")


def install(job_config: JobConfig) -> None:
    """Observes the job, if its sections say so; each of the two converters may call it."""
    observe(None)  # A run that failed in this process may have left an observer.
    monitor = Monitor(
        job_config.quantize.linear.titan_fp8.health_freq,
        job_config.quantize.grouped_mm.titan_fp8.health_freq,
    )
    if not any(monitor.freqs.values()):
        return

    def monitored(should_log: Callable[[Any, int], bool]) -> Callable[[Any, int], bool]:
        @functools.wraps(should_log)
        def report_and_ask(self: Any, step: int) -> bool:
            if self.job_config is job_config:
                monitor.after(step, self)
            return should_log(self, step)

        return report_and_ask

    patches.STEP_METRICS.apply(monitored)
