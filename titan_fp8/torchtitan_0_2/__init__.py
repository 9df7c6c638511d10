"""The adapter for torchtitan 0.2; `titan_fp8.plugin` loads it."""
