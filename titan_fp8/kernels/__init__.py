"""The Hopper kernels, one function for each op of `reference.py`; the only room that imports triton."""
