"""The adapter for torchtitan 0.3.

    from titan_fp8.torchtitan_0_3 import FP8GroupedExpertsConverter, FP8LinearConverter

    model_registry("16B", converters=[FP8LinearConverter.Config(recipe="blockwise"), ...])

Every recipe is also an override, for the command line (`overrides.py`):

    --override.imports titan_fp8.torchtitan_0_3.blockwise
"""

import torch.distributed

from titan_fp8.recipe import RECIPE_NAMES
from titan_fp8.torchtitan_0_3 import patches
from titan_fp8.torchtitan_0_3.converters import FP8GroupedExpertsConverter, FP8LinearConverter
from titan_fp8.torchtitan_0_3.overrides import override_for

__all__ = ["FP8GroupedExpertsConverter", "FP8LinearConverter"]

globals().update({recipe: override_for(recipe, __name__) for recipe in RECIPE_NAMES})

if not hasattr(torch.distributed, "set_timeout"):
    patches.GROUP_TIMEOUT.apply(lambda _: torch.distributed.distributed_c10d._set_pg_timeout)
