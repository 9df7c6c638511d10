"""Which FP8 copies of inputs torch.compile keeps from forward to backward.

The wgrad of a linear layer reads the transposed FP8 copy of its input, which forward's quantiser
has written. AOTAutograd traces forward and backward into one joint graph, and its min-cut
partitioner chooses what forward saves for backward. It never recomputes a custom op, so it saves
the FP8 copy. Most inputs of a transformer's linears are saved in bf16 anyway, though, or are one
pointwise kernel away from something that is: attention saves its output, the gradient of SwiGLU
reads the factors of its product, the gradient of RMSNorm the normalised values. Quantising such an
input again reads and writes one tensor, and saves a third of what a compiled Llama3 layer keeps.

So this pass over the joint graph sets `node.meta["recompute"] = MUST_RECOMPUTE` on the quantisers
of these inputs, the mark by which activation checkpointing tells the partitioner what to recompute.
Three kinds of quantisers stay unmarked:

- those of any other input. Of an input of the graph, for one, the FP8 copy is the smallest thing
  that could be kept;
- those in graphs that activation checkpointing has marked already;
- those in parts of checkpointed blocks, which are graphs of their own without marks (see
  activation_checkpointing.py). What they keep lives from the block's recomputation to its backward.

The pass also completes the marks of activation checkpointing. Under full checkpointing torch 2.11
leaves the ops of an autograd.Function unmarked, and a block kept the outputs of all its FP8 GEMMs.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from titan_fp8.recipe import RECIPES, op_of

_aten = torch.ops.aten
_QUANTIZERS = {op_of(recipe.rows_and_columns) for recipe in RECIPES.values()}
"""Those that write the copies of an input for fprop and for wgrad in one pass."""

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


@dataclass(frozen=True)
class RecomputeFP8Inputs(CustomGraphPass):
    """The pass, for `torch._inductor.config.joint_custom_pre_pass`."""

    before: tuple[CustomGraphPass, ...] = ()
    """Passes to run first."""
    checkpointed: bool = False
    """Whether all blocks of the model are, so that graphs without marks are parts of blocks."""

    def __call__(self, graph: fx.Graph) -> None:
        for graph_pass in self.before:
            graph_pass(graph)
        if any("recompute" in node.meta for node in graph.nodes):
            complete_checkpoint_marks(graph)
        elif not self.checkpointed:
            mark_cheap_inputs(graph)

    def uuid(self) -> object:
        others = (graph_pass.uuid() for graph_pass in self.before)
        return get_hash_for_files((__file__,)), self.checkpointed, *others


def after(existing: Any, checkpointed: bool = False) -> RecomputeFP8Inputs:
    """The pass to install in place of `existing`, which it runs first: a pass, a list or None."""
    if isinstance(existing, RecomputeFP8Inputs):
        return RecomputeFP8Inputs(existing.before, checkpointed)
    before = existing if isinstance(existing, (list, tuple)) else [existing] if existing else []
    return RecomputeFP8Inputs(tuple(before), checkpointed)


def mark_cheap_inputs(graph: fx.Graph) -> None:
    """Marks the quantisers whose input is cheap to have in backward, with their results."""
    for node in graph.nodes:
        if node.target in _QUANTIZERS and _is_cheap_in_backward(node.args[0]):
            for part in (node, *node.users):
                part.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                part.meta["ac_graph_id"] = 0


def _is_cheap_in_backward(x: Any) -> bool:
    """Whether x is attention's output or a pointwise product: RMSNorm's result, or SwiGLU's."""
    while x.target in _VIEWS_AND_CASTS:
        x = x.args[0]
    return x.target is _aten.mul.Tensor or "attention" in str(x.args[:1]) + str(x.target)


def complete_checkpoint_marks(graph: fx.Graph) -> None:
    """Marks FP8 ops and casts of forward that lie between marked nodes of one checkpoint.

    `ac_graph_id` numbers the checkpoints of a graph.
    """
    marked_here = []
    for node in graph.nodes:
        op = node.args[0].target if node.target is operator.getitem else node.target
        if (
            (str(op).startswith("titan_fp8.") or op in _VIEWS_AND_CASTS)
            and _is_forward(node)
            and "recompute" not in node.meta
        ):
            marked = [n for n in node.all_input_nodes if "recompute" in n.meta]
            if marked:
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                node.meta["ac_graph_id"] = marked[0].meta["ac_graph_id"]
                marked_here.append(node)
    # What no op of the same checkpoint reads lies behind the checkpoint's end.
    for node in reversed(marked_here):
        region = node.meta["ac_graph_id"]
        if not any(_is_forward(n) and n.meta.get("ac_graph_id") == region for n in node.users):
            del node.meta["recompute"], node.meta["ac_graph_id"]


def _is_forward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_forward"
