"""The Hopper kernels, a function for each op of `reference.py`; the only room to import triton."""
