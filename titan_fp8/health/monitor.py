"""Observes the steps of a run that are due, and reports each of them.

An adapter calls `Monitor.after_step` after each step, on every rank. So the first step after a
start is never observed. A report waits for the GPU: made later, it would be lost if the next step
failed, when it is needed most. Nothing is observed that runs while the model is not in training
mode, such as validation.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from titan_fp8.fsdp.sharded_weight import quantized
from titan_fp8.health.observer import Layer, Observer
from titan_fp8.health.report import Report
from titan_fp8.ops import observe

_logger = logging.getLogger()  # torchtitan's own


class Monitor:
    """Observes the steps of one run up to `last_step`; ends what an earlier run has left.

    `freqs` are those of all layers of the model, on whatever ranks they are.
    """

    def __init__(self, freqs: Iterable[int], last_step: int):
        self.freqs, self.last_step = {*freqs} - {0}, last_step
        self._observer: Observer | None = None
        observe(None)

    def after_step(
        self, step: int, models: Sequence[nn.Module], logger: Any, device: torch.device
    ) -> None:
        """Reports `step` to `logger`, torchtitan's, if it was observed; observes the next if due.

        `models` are the parts of the model on this rank. The ranks reduce on `device`.
        """
        if self._observer is not None:
            observe(None)
            names = [layer.name for layer in self._observer.layers]
            report = Report.of_ranks(names, *self._observer.table(), device)
            self._observer = None
            logger.log(report.metrics(), step)
            title = f"FP8 health of step {step}, each figure for the worst operand"
            _logger.info(f"titan_fp8: {title}\n{report}")
            for warning in report.warnings(step):
                _logger.warning(f"titan_fp8: {warning}")
        due = [freq for freq in self.freqs if (step + 1) % freq == 0]
        if due and step < self.last_step:
            layers = list(_layers_of(models, due))
            with quantized(models):  # The observer samples the shards.
                self._observer = Observer(layers, lambda: models[0].training, phase=step)
            observe(self._observer.wrap)


def _layers_of(models: Sequence[nn.Module], freqs: Collection[int]) -> Iterator[Layer]:
    """The weights of modules with such a `health_freq`: of linears (N, K), of experts (E, N, K)."""
    for model in models:
        for module in model.modules():
            if getattr(module, "health_freq", 0) not in freqs:
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if name == "weight":
                    yield Layer(str(module.fqn), module, name)
                elif parameter.dim() == 3:
                    yield Layer(f"{module.fqn}.{name}", module, name)
