"""The door to `titan_fp8/host/`: what speeds torchtitan 0.3 up and is not FP8, behind one key."""

from typing import Any

from torchtitan.protocols.module import Module

from titan_fp8.host import log_permutation, speed_up_fsdp2
from titan_fp8.host.torchtitan_0_3.dispatcher import dispatch_by_gathers
from titan_fp8.modules.checks import permutation_of
from titan_fp8.modules.settings import ExpertsSettings
from titan_fp8.recipe import BF16, get_recipe


def speed_up(model: Module.Config, settings: Any) -> None:
    """Switches on what a converter's model has use for, if `host_speedups` says so.

    `permutation` of the experts' settings decides about the gathers alone.

    Args:
        model: the model's config, changed in place, before its experts are converted: they may rely
            on the alignment of groups.
    """
    recipe, on = settings.recipe, settings.host_speedups
    if on is None:
        on = recipe != BF16
    if on:
        speed_up_fsdp2()
    if not isinstance(settings, ExpertsSettings):
        return
    if permutation_of(settings.permutation, on) == "host":
        return
    layers = dispatch_by_gathers(model, 1 if recipe == BF16 else get_recipe(recipe).alignment)
    log_permutation(layers, settings.permutation, settings.where, "AllToAllTokenDispatcher")
