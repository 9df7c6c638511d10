"""Two corrections of what torch.compile recomputes in backward.

AOTAutograd traces forward and backward into one joint graph, and its min-cut partitioner chooses
the tensors that forward saves for backward.

Quantized inputs. The wgrad of a linear layer reads the transposed FP8 copy of its input, which
forward's quantizer has written. The partitioner never recomputes a custom op, so it would save that
copy. But most inputs of a transformer's linears are available in backward anyway, in bf16:
attention saves its output, and one pointwise kernel recomputes the output of RMSNorm or SwiGLU from
tensors that are saved. `with_recomputable_quantizers` adds our quantizers to the ops that the
partitioner may recompute. It then weighs them like any pointwise op, and saves the FP8 copy only
where that is the smallest tensor to save, as for an input of the graph.

Checkpointed blocks. Activation checkpointing marks what to recompute for the partitioner, in
`node.meta["recompute"]`. Under full checkpointing torch 2.11 leaves the ops of an autograd.Function
unmarked, and a block would save the outputs of all its FP8 GEMMs. The pass `CompleteMarks` marks
them.

If all blocks are checkpointed, the first correction is left out. In blocks that are compiled in
parts (activation_checkpointing.py) a part has no marks, and recomputing a quantizer there would add
to the recomputation of the whole block.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from titan_fp8.chained_pass import ChainedPass
from titan_fp8.recipe import RECIPES

_aten = torch.ops.aten
_QUANTIZERS = {
    recipe.quantize_rows_and_columns.overload.overloadpacket for recipe in RECIPES.values()
}
"""The quantizers that write the copies of an input for fprop and for wgrad from one read."""

_VIEWS_AND_CASTS = {
    _aten.view.default,
    _aten.reshape.default,
    _aten._unsafe_view.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.clone.default,
    _aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
}


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


@dataclass(frozen=True)
class CompleteMarks(ChainedPass):
    """Marks FP8 ops and casts of forward that lie between marked nodes of one checkpoint.

    To be installed as `torch._inductor.config.joint_custom_pre_pass`. `ac_graph_id` in a mark is
    the number of the checkpoint in its graph. Graphs without marks are left alone.
    """

    def run(self, graph: fx.Graph) -> None:
        marked_here = []
        for node in graph.nodes:
            if "recompute" in node.meta or not _is_forward(node) or not _may_be_marked(node):
                continue
            marked = [n for n in node.all_input_nodes if "recompute" in n.meta]
            if marked:
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                node.meta["ac_graph_id"] = marked[0].meta["ac_graph_id"]
                marked_here.append(node)
        # A node that no op of the same checkpoint reads is past the end of the checkpoint.
        for node in reversed(marked_here):
            region = node.meta["ac_graph_id"]
            if not any(_is_forward(n) and n.meta.get("ac_graph_id") == region for n in node.users):
                del node.meta["recompute"], node.meta["ac_graph_id"]

    def files(self) -> tuple[str, ...]:
        return (__file__,)


def _may_be_marked(node: fx.Node) -> bool:
    """True for FP8 ops and their outputs, views and casts."""
    source = node.args[0] if node.target is operator.getitem else node
    op = source.target if isinstance(source, fx.Node) else None
    return str(op).startswith("titan_fp8.") or op in _VIEWS_AND_CASTS


def _is_forward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_forward"
