"""What torch.compile recomputes of FP8 layers in backward.

AOTAutograd traces forward and backward into one joint graph, and its min-cut partitioner chooses
the tensors that forward saves for backward.

The wgrad of a linear layer reads the transposed FP8 copy of its input, which forward's quantizer
has written. The partitioner never recomputes a custom op, so it would save that copy. But most
inputs of a transformer's linears are available in backward anyway, in bf16: attention saves its
output, and one pointwise kernel recomputes the output of RMSNorm or SwiGLU from saved tensors.
`with_recomputable_quantizers` adds our quantizers to the ops that the partitioner may recompute. It
then weighs them like any pointwise op, and saves the FP8 copy only where that is the smallest
tensor to save, as for an input of the graph.

If all blocks are checkpointed, this is left out. In blocks that are compiled in parts
(activation_checkpointing.py) a part has no marks, and recomputing a quantizer there would add to
the recomputation of the whole block.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from titan_fp8.recipe import RECIPES

_QUANTIZERS = {
    recipe.quantize_rows_and_columns.overload.overloadpacket for recipe in RECIPES.values()
}
"""The quantizers that write the copies of an input for fprop and for wgrad from one read."""


def with_recomputable_quantizers(get_default_op_list: Callable[[], Any]) -> Callable[[], Any]:
    """Wraps the partitioner's list of op kinds, so that it may recompute our quantizers.

    They have to count as fusible, too. The partitioner bans the recomputation of other ops whose
    results backward reads from memory.
    """

    @functools.wraps(get_default_op_list)
    def op_list() -> Any:
        kinds = get_default_op_list()
        return dataclasses.replace(
            kinds,
            recomputable_ops=kinds.recomputable_ops | _QUANTIZERS,
            fusible_ops=kinds.fusible_ops | _QUANTIZERS,
        )

    return op_list
