"""What is for torchtitan 0.3 only; `titan_fp8/torchtitan_0_3/host.py` applies it."""
