"""The door to `titan_fp8/host/`: what speeds torchtitan 0.3 up and is not FP8, behind one key."""

from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

from titan_fp8.checks import permutation_of
from titan_fp8.host import gradient_reduction
from titan_fp8.host.gradient_copies import copy_by_kernel
from titan_fp8.host.profiler_ranges import below_modes, while_profiling
from titan_fp8.host.torchtitan_0_3.dispatcher import dispatch_by_gathers
from titan_fp8.recipe import BF16, get_recipe
from titan_fp8.torchtitan_0_3 import patches


def speed_up(
    model: Module.Config,
    recipe: str,
    host_speedups: bool | None,
    permutation: str | None = "host",
) -> None:
    """Switches on what a converter's model has use for, if its `host_speedups` says so.

    Args:
        model: the model's config, changed in place, before its experts are converted: they may rely
            on the alignment of groups.
        recipe: the converter's.
        permutation: as in FP8GroupedExpertsConverter; decides about the gathers alone.
    """
    on = recipe != BF16 if host_speedups is None else host_speedups
    if on:
        patches.GRADIENT_REDUCTION.apply(
            copy_by_kernel, gradient_reduction.in_bf16, gradient_reduction.noting_accumulation
        )
        patches.PROFILER_RANGES.apply(while_profiling, below_modes)
    if permutation_of(permutation, on) == "host":
        return
    alignment = 1 if recipe == BF16 else get_recipe(recipe).alignment
    if layers := dispatch_by_gathers(model, alignment):
        logger.info(f"titan_fp8: {layers} MoE layers permute their tokens by gathers")
    elif permutation is not None:
        logger.warning(
            'titan_fp8: FP8GroupedExpertsConverter: permutation = "gather" changes nothing: no MoE '
            "layer of this model uses torchtitan's AllToAllTokenDispatcher"
        )
