"""FSDP2's all-gather of weights in FP8 (`titan_fp8/fsdp/`), for torchtitan 0.3.

Whether a module's weights are gathered in FP8 is a field of its config. The module then marks them
as soon as it has built them, before torchtitan shards it. After each step of the optimizer all
weights of a model are quantized together.

A CUDA graph of a step would not see that: it reads the memory that the shards had when it was
captured. So training must run without CUDA graphs.
"""

import functools
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

from titan_fp8.fsdp import requantize
from titan_fp8.modules.conversion import log_gathers
from titan_fp8.modules.report import ConversionReport
from titan_fp8.torchtitan_0_3.experts import FP8GroupedExperts
from titan_fp8.torchtitan_0_3.linear import FP8Linear


def uses_fsdp2(model: Module.Config) -> bool:
    """Whether torchtitan shards this model by FSDP2, if the plan shards it."""
    modules = [each.__module__ for each in type(model).__mro__]
    return not any(each.startswith("torchtitan.experiments.graph_trainer") for each in modules)


def gather_in_fp8(where: str, model: Module.Config, converted: ConversionReport) -> None:
    """Makes FSDP2 gather, in FP8, the weights that were `converted`, and logs it.

    `model` is the config after the conversion, changed in place.
    """
    if not uses_fsdp2(model):
        logger.warning(
            "titan_fp8: fsdp_all_gather = True changes nothing: models of "
            "torchtitan.experiments.graph_trainer do not use FSDP2"
        )
        return
    configs = {fqn: config for fqn, config, *_ in model.traverse(Module.Config, recurse=True)}
    report = ConversionReport()
    for fqn, shape, recipe in converted.converted:
        config: Any = configs[fqn]
        reason = None
        if fqn == "lm_head" and getattr(model, "enable_weight_tying", False):
            reason = "tok_embeddings reads the weight, too"
        elif not isinstance(config, (FP8Linear.Config, FP8GroupedExperts.Config)):
            reason = f"{config._owner.__name__} reads the weights itself"
        if report.add(fqn, shape, recipe, reason):
            config.fsdp_all_gather = True
    _requantize_after_each_step()
    log_gathers(where, f"the weights of {len(report.converted)} modules", report)


@functools.cache
def _requantize_after_each_step() -> None:
    register_optimizer_step_post_hook(_requantize)


def _requantize(optimizer: Optimizer, *_: Any) -> None:
    # torchtitan's container steps optimizers that call this hook, too.
    if isinstance(optimizer, OptimizersContainer):
        requantize(optimizer.model_parts)
