"""What speeds torchtitan and FSDP2 up and is not FP8: jobs in bf16 may use all of it, too.

One key switches it on, `host_speedups`; with FP8 it is on by default. An adapter's `host.py` is the
door: its function `speed_up` applies what its torchtitan has use for.

- permute.py: sorting tokens by expert, and back, by gathers in both passes.
- gradient_reduction.py, gradient_copies.py: FSDP2 sends bf16 gradients in bf16.
- profiler_ranges.py: FSDP2 marks ranges for the profiler only while it runs.
- torchtitan_0_2/: MoE layers and the exchange of tokens by these gathers (moe.py, permutation.py,
  token_exchange.py), MoE blocks compiled up to the experts (moe_block.py), and batches on a stream
  of their own (input_stream.py).
- torchtitan_0_3/: a dispatcher of tokens by these gathers.

The kernels are in `kernels/permute.py` and `kernels/gradients.py`, the ops in `ops/permute.py`.
"""
