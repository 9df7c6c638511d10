"""What speeds torchtitan and FSDP2 up and is not FP8: jobs in bf16 may use all of it, too.

One key switches it on, `host_speedups`; with FP8 it is on by default. The adapters apply what their
torchtitan has use for; `titan_fp8/torchtitan_0_2/speedups.py` says what depends on what.

- permute.py: sorting tokens by expert, and back, by gathers in both passes.
- exchange.py, peer_exchange.py, all_to_all.py: tokens between the ranks of experts.
- symmetric_buffers.py, gpu_failure.py: memory that other GPUs write to, and what a GPU reports.
- fp8_exchange.py, row_exchange.py: the same for autograd, in FP8 and in high precision.
- gradient_reduction.py: FSDP2 sends bf16 gradients in bf16.
- profiler_ranges.py: FSDP2 marks ranges for the profiler only while it runs.
- torchtitan_0_2/: what uses these, and more that is for torchtitan 0.2 only.
"""

from titan_fp8.host.gradient_reduction import in_bf16, noting_accumulation
from titan_fp8.host.profiler_ranges import below_modes, while_profiling
from titan_fp8.patches import GRADIENT_REDUCTION, PROFILER_RANGES


def speed_up_fsdp2() -> None:
    """What every job that uses FSDP2 gains from."""
    GRADIENT_REDUCTION.apply(in_bf16, noting_accumulation)
    PROFILER_RANGES.apply(while_profiling, below_modes)
