"""The settings of linears and of experts, as both adapters have them, and the check of each.

An adapter derives its own dataclasses, a section of the TOML or the config of a converter. They say
what is different there: other defaults, and `where`, which errors name. The docstring of a field is
the help text of its flag.
"""

# No `from __future__ import annotations` here: torchtitan's merge needs annotations to be types.

from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from titan_fp8.modules.checks import CHECKS, EXCHANGES, PERMUTATIONS
from titan_fp8.recipe import RECIPE_NAMES

RecipeName = Literal[RECIPE_NAMES]  # type: ignore[valid-type]
PermutationName = Literal[PERMUTATIONS]  # type: ignore[valid-type]
ExchangeName = Literal[EXCHANGES]  # type: ignore[valid-type]


@dataclass(kw_only=True)
class Settings:
    """What linears and experts have in common."""

    where: ClassVar[str]
    """What errors begin with."""

    recipe: RecipeName = "blockwise"
    """How operands are scaled. "blockwise": 1x128 activations and gradients, 128x128 weights, as
    in DeepSeek-V3. "rowwise": one scale per row. "rowwise_with_gw_hp": rowwise, with weight
    gradients in bf16. "blockwise_pow2": blockwise, with scales that are powers of two. "bf16":
    nothing is converted, for the baseline."""

    emulate: bool = False
    """Computes the same numbers in FP32 arithmetic, on any device; slow. CPUs always do."""

    fsdp_all_gather: bool = True
    """With FSDP2 or HSDP and a blockwise recipe each rank quantizes its shard of a weight once a
    step, and FSDP2 gathers FP8. The values are the same. False: FSDP2 gathers high precision."""

    health_freq: int = 0
    """N: every N steps, report what FP8 does to the operands of each layer (underflow, error and
    scales) in TensorBoard and the log. 0: never."""

    def __post_init__(self) -> None:
        """ValueError for a value that is not allowed. None is, where it is the default."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in CHECKS and not (value is None and each.default is None):
                CHECKS[each.name](f"{self.where} {each.name}", value)


@dataclass(kw_only=True)
class LinearSettings(Settings):
    """FP8 for linears."""

    filter_fqns: list[str]
    """Linears whose qualified name contains one of these are left in high precision. The default
    list means the output layer and the routers; in models of Hugging Face the output layer is the
    one that they name, such as lm_head."""

    host_speedups: bool | None = None
    """Whether to use what speeds torchtitan and FSDP2 up and is not FP8: permutation by gathers and
    the exchange of tokens, MoE blocks compiled up to the experts, bf16 gradients sent as bf16,
    backward on the calling thread. Applies to experts, too. The default is true with FP8, and false
    with recipe "bf16", which then is torchtitan as it is."""


@dataclass(kw_only=True)
class ExpertsSettings(Settings):
    """FP8 for the grouped GEMMs of MoE experts."""

    fqns: list[str] = field(default_factory=lambda: ["experts"])
    """Grouped experts whose qualified name contains one of these are converted."""
