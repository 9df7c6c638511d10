"""What FSDP2 does with an FP8 module, and how it gathers the module's weights in FP8.

To FSDP2 an FP8 module is an ordinary one, with high-precision parameters under their own names:

- forward: FSDP2 all-gathers the parameters in `mixed_precision_param`, bf16 by default. fprop
  quantizes the gathered weight, which FSDP2 then frees, if `fsdp_reshard_after_forward` says so.
- backward: FSDP2 gathers again, and dgrad quantizes the weight as gathered then.
- gradients: wgrad returns the gradient in the dtype of the gathered weight. FSDP2 copies it into a
  buffer and sums it over the ranks in `mixed_precision_reduce`, FP32 by default.

With `fsdp_all_gather = true` each rank quantizes its shard instead, and the gathers move FP8.
Gradients, and what the optimizer and checkpoints see, do not change. `gather_in_fp8` marks the
weights of FP8 layers, and FSDP2 is shown an extension for them, a `ShardGather`, which
`sharded_weight.py` explains. docs/architecture.md shows the steps.
"""

from torch import nn

from titan_fp8.fsdp.requantize import requantize
from titan_fp8.fsdp.sharded_weight import mark, shown_to_fsdp2, with_new_values
from titan_fp8.modules.report import ConversionReport
from titan_fp8.patches import FP8_GATHERS

__all__ = ["gather_in_fp8", "requantize"]


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
        The report on every weight of these layers.

    Raises:
        RuntimeError: this version of FSDP2 cannot be patched.
    """
    FP8_GATHERS.apply(shown_to_fsdp2, with_new_values)
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, set()).add(module)
    report = ConversionReport()
    for fqn, layer in model.named_modules():
        if not isinstance(layer, layer_class):
            continue
        for name, param in list(layer.named_parameters(recurse=False)):
            if param.dim() < 2:
                continue
            shape = " x ".join(map(str, param.shape))
            reason = "another module reads it, too" if len(owners[param]) > 1 else None
            if report.add(f"{fqn}.{name}", shape, str(layer.recipe), reason):
                mark(layer, name)
    return report
