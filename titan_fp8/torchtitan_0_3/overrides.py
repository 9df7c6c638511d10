"""FP8 from the command line, without a config of one's own: an override for each recipe.

    --override.imports 'titan_fp8.torchtitan_0_3.blockwise={"filter_fqns": ["lm_head"]}'

torchtitan applies an override to every config of its target class. These target the whole model, to
report on it as a whole and to name patterns that match nothing. torchtitan refuses to combine them
with overrides of parts of the model; use the converters for that.
"""

from collections.abc import Callable
from typing import Any

from torchtitan.config import override
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols import BaseModel

from titan_fp8.recipe import BF16
from titan_fp8.torchtitan_0_3.converters import FP8GroupedExpertsConverter, FP8LinearConverter

KEYS = ("filter_fqns", "fqns", "emulate", "fsdp_all_gather", "health_freq", "host_speedups")


def override_for(recipe: str, module: str) -> Callable[..., BaseModel.Config]:
    """Registers the override `module`.`recipe`, and returns its function."""

    def convert(config: BaseModel.Config, /, **settings: Any) -> BaseModel.Config:
        """Converts the linears, and the experts if the model has any, by `settings`, see KEYS.

        With `fqns = []` the experts stay in high precision. ValueError for another key, for fqns
        without experts, and for what the converters refuse.
        """
        for key in settings:
            if key not in KEYS:
                raise ValueError(
                    f"{module}.{recipe}: {key!r} is no key: allowed are {', '.join(KEYS)}"
                )
        linear = {key: settings[key] for key in settings if key != "fqns"}
        experts = {key: settings[key] for key in settings if key != "filter_fqns"}
        experts["recipe"] = recipe
        if experts.get("fqns") == []:
            experts["recipe"] = BF16
            del experts["fqns"]
        FP8LinearConverter.Config(recipe=recipe, **linear).build().convert(config)
        if "fqns" in experts or any(config.traverse(GroupedExperts.Config)):
            FP8GroupedExpertsConverter.Config(**experts).build().convert(config)
        return config

    # torchtitan finds an override by the module and the name of its function.
    convert.__module__, convert.__name__, convert.__qualname__ = module, recipe, recipe
    return override(target=BaseModel.Config, description=f"FP8 by titan_fp8, {recipe}")(convert)
