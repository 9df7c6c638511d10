"""Measures whether FP8 pays for a model and a parallel plan; docs/plan.md says how to use it.

`model.py` reads what a rank computes, from torchtitan's own plan on a meta model. `measure.py`
times its layers on this GPU; `bound.py` says without one what a table of GEMM speeds knows;
`train.py` trains the config. None is imported here, as torchtitan must be prepared before.
"""
