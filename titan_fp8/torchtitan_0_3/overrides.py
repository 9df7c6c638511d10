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

from titan_fp8.torchtitan_0_3.converters import FP8GroupedExpertsConverter, FP8LinearConverter


def override_for(recipe: str, module: str) -> Callable[..., BaseModel.Config]:
    """Registers the override `module`.`recipe`, and returns its function."""

    def convert(
        config: BaseModel.Config,
        *,
        filter_fqns: list[str] | None = None,
        emulate: bool = False,
        fqns: list[str] | None = None,
        permutation: str | None = None,
        fsdp_all_gather: bool = False,
        health_freq: int = 0,
    ) -> BaseModel.Config:
        """Converts the linears, and the experts if the model has any or `fqns` is given.

        The arguments are the fields of the two converters.
        """
        both: dict[str, Any] = {
            "recipe": recipe,
            "emulate": emulate,
            "fsdp_all_gather": fsdp_all_gather,
            "health_freq": health_freq,
        }
        linear: dict[str, Any] = {} if filter_fqns is None else {"filter_fqns": filter_fqns}
        FP8LinearConverter.Config(**both, **linear).build().convert(config)
        if (
            fqns is not None
            or permutation is not None
            or any(config.traverse(GroupedExperts.Config))
        ):
            experts: dict[str, Any] = {} if fqns is None else {"fqns": fqns}
            experts["permutation"] = permutation
            FP8GroupedExpertsConverter.Config(**both, **experts).build().convert(config)
        return config

    # torchtitan finds an override by the module and the name of its function.
    convert.__module__, convert.__name__, convert.__qualname__ = module, recipe, recipe
    return override(target=BaseModel.Config, description=f"FP8 by titan_fp8, {recipe}")(convert)
