"""Imported by the server of ranks: what each rank would otherwise import and prepare by itself."""

import gc

gc.disable()  # in ranks, too: they end before garbage matters

import plan_ranks  # (prepares the CPU before torchtitan is imported)
import pytest  # noqa: F401
import scipy.io  # noqa: F401  (datasets imports it to read text)
import titan  # noqa: F401

# Imports titan_fp8's converters, too. tyro keeps what it finds out about the config classes.
for model in plan_ranks.SHAPES:
    plan_ranks.parse_once(model)
gc.freeze()  # trainers look for garbage themselves
