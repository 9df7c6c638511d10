"""What speeds torchtitan and FSDP2 up and is not FP8: jobs in bf16 may use all of it, too.

One key switches it on, `host_speedups`; with FP8 it is on by default. An adapter's `host.py` is the
door: its function `speed_up` applies what its torchtitan has use for.

- permute.py: sorting tokens by expert, and back, by gathers in both passes.
- gradient_reduction.py: FSDP2 sends bf16 gradients in bf16.
- profiler_ranges.py: FSDP2 marks ranges for the profiler only while it runs.
- torchtitan_0_2/, torchtitan_0_3/: what uses the gathers, and more that is for one of them only.
"""

import logging

from titan_fp8.host.gradient_reduction import in_bf16, noting_accumulation
from titan_fp8.host.profiler_ranges import below_modes, while_profiling
from titan_fp8.patches import GRADIENT_REDUCTION, PROFILER_RANGES

_logger = logging.getLogger()  # torchtitan's own


def speed_up_fsdp2() -> None:
    """What every job that uses FSDP2 gains from."""
    GRADIENT_REDUCTION.apply(in_bf16, noting_accumulation)
    PROFILER_RANGES.apply(while_profiling, below_modes)


def log_permutation(layers: int, permutation: str | None, where: str, what: str) -> None:
    """Logs how many layers permute by gathers; a warning if none does and the setting says so.

    `where` is the setting's place, and `what` the part of torchtitan that gathers can replace.
    """
    if layers:
        _logger.info(f"titan_fp8: {layers} MoE layers permute their tokens by gathers")
    elif permutation is not None:
        _logger.warning(
            f'titan_fp8: {where} permutation = "gather" changes nothing: no MoE layer of this '
            f"model uses torchtitan's {what}"
        )
