"""Has torchtitan 0.2's trainer call the monitor of `health_freq` after each step.

torchtitan asks its MetricsProcessor after every step, on every rank, whether to log the step.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torchtitan.config import JobConfig
from torchtitan.tools import utils

from titan_fp8.health import Monitor
from titan_fp8.torchtitan_0_2 import patches


def install(job_config: JobConfig) -> None:
    """Observes the job, if its sections say so; each of the two converters may call it."""
    quantize = job_config.quantize
    sections = quantize.linear.titan_fp8, quantize.grouped_mm.titan_fp8
    monitor = Monitor([each.health_freq for each in sections], job_config.training.steps)
    if not monitor.freqs:
        return

    def monitored(should_log: Callable[[Any, int], bool]) -> Callable[[Any, int], bool]:
        @functools.wraps(should_log)
        def report_and_ask(self: Any, step: int) -> bool:
            if self.job_config is job_config:
                device = torch.device(utils.device_type)
                monitor.after_step(step, self.model_parts, self.logger, device)
            return should_log(self, step)

        return report_and_ask

    patches.STEP_METRICS.apply(monitored)
