"""What is for torchtitan 0.2 only; `titan_fp8/torchtitan_0_2/speedups.py` applies it."""
