"""What FSDP2 does with an FP8 module, and how it gathers the module's weights in FP8.

To FSDP2 an FP8 module is an ordinary one, with high-precision parameters under their own names:

- forward: FSDP2 all-gathers the parameters in `mixed_precision_param`, bf16 by default. fprop
  quantizes the gathered weight, which FSDP2 then frees, if `fsdp_reshard_after_forward` says so.
- backward: FSDP2 gathers again, and dgrad quantizes the weight as gathered then.
- gradients: wgrad returns the gradient in the dtype of the gathered weight. FSDP2 copies it into a
  buffer (`gradient_copies.py`) and sums it over the ranks in `mixed_precision_reduce`, FP32 by
  default (`gradient_reduction.py`).

With `fsdp_all_gather = true` each rank quantizes its shard instead, and the gathers move FP8.
Gradients, and what the optimizer and checkpoints see, do not change. This uses FSDP2's own
extension: if the local tensor of a sharded parameter has the methods `fsdp_pre_all_gather` and
`fsdp_post_all_gather`, FSDP2 gathers what the first returns, and the second makes the unsharded
parameter from it. `gather_in_fp8` replaces the weights of FP8 layers by `ShardedWeight`s, which
have both (`sharded_weight.py`):

    ShardedWeight      high precision, a shard: what the optimizer, clipping and checkpoints see
      | fsdp_pre_all_gather: quantizes the shard (`shards.py`), if it has been written to since
      v
    all-gather         one per FSDP2 unit: weights in FP8, other parameters as without titan_fp8
      | fsdp_post_all_gather
      v
    GatheredWeight     what the layer multiplies by (`gathered_weight.py`)

Rowwise recipes quantize rows for fprop and columns for dgrad. Backward's gathers move both, as many
bytes as in bf16, because a forward that is recomputed in backward reads rows. Forward's gathers
move the rows alone, half of that, if FSDP2 frees the weight after forward and the unit has not run
since the last backward (`columns_buffer.py`).

The ranks that share a 128x128 block or a column agree on its scale by a collective. At its gather a
shard that has been written to is quantized with a collective of its own. The adapters avoid that:
between a step of the optimizer and the next gather they call `requantize.py`, which quantizes all
shards of a model together, with one collective per process group.
"""

import functools
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from titan_fp8.checks import ConversionReport
from titan_fp8.patches import SHARD_MEMORY
from titan_fp8.shard_memory import compare_memory_of
from titan_fp8.sharded_weight import ShardedWeight


def gather_in_fp8(model: nn.Module, layer_class: type[nn.Module]) -> ConversionReport:
    """Makes FSDP2 gather the weights of the model's FP8 layers in FP8, once it is applied.

    Not supported: `fully_shard` with an integer `reshard_after_forward`, with `ignored_params` of a
    compiled layer, or not called at all before a layer is compiled; and compiled autograd.
    torchtitan does none of these, except that its SimpleFSDP, AutoParallel and graph_trainer never
    call `fully_shard`. The adapters leave their models alone.

    Rowwise weights are not gathered for backward, which is an error there, if a unit is prefetched
    after its forward in eval mode, or while a second forward of the model waits for its backward.

    Args:
        model: before FSDP2, tensor or expert parallelism is applied, on any device.
        layer_class: FP8Linear, or the class of the experts. Its layers have `recipe` and `emulate`,
            and use their parameters of two and three dimensions in FP8 products only.

    Returns:
        The report on every weight of these layers.

    Raises:
        RuntimeError: this version of FSDP2 cannot be patched.
    """
    SHARD_MEMORY.apply(compare_memory_of(ShardedWeight))
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, set()).add(module)
    report = ConversionReport()
    for fqn, layer in model.named_modules():
        if not isinstance(layer, layer_class):
            continue
        for name, param in list(layer.named_parameters(recurse=False)):
            row = f"{fqn}.{name}", " x ".join(map(str, param.shape))
            if param.dim() < 2:
                continue
            if len(owners[param]) > 1:
                report.left.append((*row, "another module reads it, too"))
                continue
            _wrap(layer, name=name)
            # Runs before the hook of FSDP2, which keeps the parameter that it finds.
            layer.register_load_state_dict_post_hook(functools.partial(_wrap, name=name))
            report.converted.append((*row, str(layer.recipe)))
    return report


def _wrap(layer: nn.Module, *_: Any, name: str) -> None:
    """Makes a weight of a layer a ShardedWeight, also if load_state_dict has assigned another."""
    # Not getattr: SimpleFSDP has properties of these names, which gather the parameters.
    param = layer._parameters[name]
    assert param is not None
    local = param._local_tensor if isinstance(param, DTensor) else param
    if isinstance(local, ShardedWeight):
        memory = local.memory
        replaced = memory.values is not None and memory.values() is not local
        if replaced and memory.shard is not None and not memory.shard.spec.is_even:
            # FSDP2 moves the shards of some ranks to new memory, so all ranks begin anew.
            memory.shard = memory.values = memory.columns = None
            memory.stale = True
        return
    weight = ShardedWeight(local.detach(), str(layer.recipe), bool(layer.emulate))
    if isinstance(param, DTensor):
        param._local_tensor = weight
    else:
        setattr(layer, name, nn.Parameter(weight, requires_grad=param.requires_grad))
