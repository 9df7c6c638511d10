"""Measures whether FP8 pays for a model and a parallel plan.

    python -m titan_fp8.plan CONFIG [--train] [--filter auto [--out FILE]] [--section.key value ...]

CONFIG is the TOML of a run that loads the plugin. `model.py` reads what a rank computes, from
torchtitan's own plan on a meta model. `measure.py` times its layers on this GPU; `bound.py` says
without one what a table of GEMM speeds knows; `train.py` trains the config. docs/plan.md says more.

This module imports none of them: the command line prepares torchtitan before it is imported.
"""
