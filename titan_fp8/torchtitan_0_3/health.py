"""`health_freq`: observes every so many steps of torchtitan 0.3's trainer (`titan_fp8/health/`).

How often a module is observed is a field of its config. The trainer's monitor is called after each
of its steps, on every rank.
"""

import functools
from collections.abc import Callable
from typing import Any

from torchtitan.protocols.module import Module

from titan_fp8.health import Monitor

NOT_FINITE = "Loss is not finite"
"""How the error begins with which the trainer ends, on all ranks that have the loss."""


def reporting(train_step: Callable) -> Callable:
    """Wraps a step of the trainer, to report on the modules whose config says so."""

    @functools.wraps(train_step)
    def train_and_report(self: Any, data_iterator: Any) -> None:
        if not hasattr(self, "fp8_monitor"):
            self.fp8_monitor = _monitor_of(self)
        monitor = self.fp8_monitor
        arguments = self.model_parts, self.metrics_processor.logger, self.device
        try:
            train_step(self, data_iterator)
        except RuntimeError as error:
            # Where NaN came from is most needed now. Other errors may be this rank's alone, as this
            # one is in a pipeline, and a report of all ranks would wait forever.
            if str(error).startswith(NOT_FINITE) and not self.parallel_dims.pp_enabled:
                monitor.after_step(self.step, *arguments)
            raise
        monitor.after_step(self.step, *arguments)

    return train_and_report


def _monitor_of(trainer: Any) -> Monitor:
    configs = trainer.model_config.traverse(Module.Config, recurse=True)
    freqs = {getattr(config, "health_freq", 0) for _, config, *_ in configs}
    return Monitor(freqs, trainer.config.training.steps)
