"""What FSDP2 gathers of FP8 modules, and when it is quantized.

To FSDP2 an FP8 module is an ordinary one, with high-precision parameters under their own names. So
FSDP2 gathers them for forward and again for backward, in `mixed_precision_param`, and each product
quantizes the weight that it finds. wgrad returns the gradient in the dtype of the gathered weight.

With `fsdp_all_gather = true` each rank quantizes its shard instead, and the gathers move FP8.
Gradients, and what the optimizer and checkpoints see, do not change. `sharded_weight.py` explains
how, and what makes it right; docs/architecture.md shows the steps.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from titan_fp8.fsdp.sharded_weight import (
    ShardGather,
    gathers_of,
    mark,
    runs_on,
    shown_to_fsdp2,
    with_new_values,
)
from titan_fp8.modules.report import ConversionReport
from titan_fp8.patches import FP8_GATHERS
from titan_fp8.recipe import get_recipe


def gather_in_fp8(model: nn.Module, layer_class: type[nn.Module]) -> ConversionReport:
    """Makes FSDP2 gather the weights of the model's FP8 layers in FP8, once it is applied.

    Losses and gradients are those of gathers in high precision, whatever writes to the shards, and
    by whatever means. For that every gather quantizes. In a training loop of your own, win the time
    back by a call of `requantize([model])` after each step of the optimizer.

    Not supported: `fully_shard` with an integer `reshard_after_forward`, with `ignored_params` of a
    compiled layer, or not called at all before a layer is compiled; and compiled autograd.
    torchtitan does none of these, except that its SimpleFSDP, AutoParallel and graph_trainer never
    call `fully_shard`. The adapters leave their models alone.

    Args:
        model: before FSDP2, tensor or expert parallelism is applied, on any device.
        layer_class: FP8Linear, or the class of the experts. Its layers have `recipe` and `emulate`,
            and use their parameters of two and three dimensions in FP8 products only.

    Returns:
        The report on every weight of these layers. Those of rowwise recipes are left.

    Raises:
        RuntimeError: this version of FSDP2 cannot be patched.
    """
    FP8_GATHERS.apply(shown_to_fsdp2, with_new_values)
    readers = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    report = ConversionReport()
    for fqn, layer in model.named_modules():
        if not isinstance(layer, layer_class):
            continue
        for name, param in list(layer.named_parameters(recurse=False)):
            if param.dim() < 2:
                continue
            shape = " x ".join(map(str, param.shape))
            reason = "another module reads it, too" if readers[param] > 1 else None
            if not get_recipe(str(layer.recipe)).has_weight_blocks:
                reason = "rowwise, its rows and its columns would take as many bytes"
            if report.add(f"{fqn}.{name}", shape, str(layer.recipe), reason):
                mark(layer, name)
    return report


def requantize(models: Iterable[nn.Module]) -> None:
    """Has the shards of each model quantized once, together, until the next call.

    Call it on every rank after each step of the optimizer, once you have begun to. It only takes
    notes: the next gather in training mode quantizes, with one collective per process group that
    shares weights, and later ones reuse the result. So after that first gather weights must not
    change, except by `load_state_dict` or `Module._apply` on every rank. In eval and inference mode
    they may, because there each gather quantizes.

    It also tells FSDP2 not to gather embeddings in backward: their gradient depends on the tokens
    alone.
    """
    for model in models:
        together: list[ShardGather] = []
        for module in model.modules():
            together += gathers_of(module).values()
            # A subclass may read its weight in backward.
            if type(module).__bases__ == (FSDPModule, nn.Embedding):
                _leave_out_of_backward(module)
        for gather in together:
            gather.together, gather.fresh = together, False


def _leave_out_of_backward(embedding: Any) -> None:
    group = embedding._get_fsdp_state()._fsdp_param_group
    # Backward may need what shares the unit, such as the output layer to which it is tied.
    if group is not None and len(group.modules) == len(group.fsdp_params) == 1:
        embedding.set_unshard_in_backward(False)
