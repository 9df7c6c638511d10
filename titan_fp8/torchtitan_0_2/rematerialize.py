"""What torch.compile keeps for backward: not the FP8 copy of an input that backward can make again.

A linear layer's wgrad reads the transposed FP8 copy of its input, and the compiler saves it, since
it takes every custom op for expensive. But in a transformer most inputs are there in backward
anyway, or are one pointwise kernel away: attention keeps its output, the gradient of SwiGLU reads
what its product is made of, that of a norm the normalised values. Quantising again costs a read and
a write of one tensor; the copies it spares are a third of what a Llama3 layer would keep. (A fused
feed-forward keeps no copy of w2's input in the first place: a compiled Llama3 layer keeps the same
with or without fusion, an eager one less.)

So a pass over the joint graph marks the quantisation of such inputs as to be recomputed, as
activation checkpointing marks what it recomputes. Inputs of any other origin stay as they are: for
a graph's own input, say, the FP8 copy is the smallest thing to keep. Graphs which activation
checkpointing has marked already are left to it, and so are the parts of MoE blocks, compiled one by
one inside of a checkpoint: what they keep lives from the recomputation of their block to its
backward. But torch 2.11 does not mark what an autograd.Function does, where a whole block is to be
recomputed: with full checkpointing a block kept the outputs of all its FP8 GEMMs. The pass marks
these.
"""

import operator
from collections.abc import Sequence

import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

_aten = torch.ops.aten
_QUANTIZERS = {
    torch.ops.titan_fp8.quantize_1x128_128x1_t.default,
    torch.ops.titan_fp8.quantize_row_col_t.default,
}
_SAME_VALUES = {
    _aten.view.default,
    _aten.reshape.default,
    _aten._unsafe_view.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.clone.default,
    _aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
}


class RecomputeFP8Inputs(CustomGraphPass):
    """The pass, for `torch._inductor.config.joint_custom_pre_pass`; `before` it run the others.

    `checkpointed`: all blocks of the model are, so that graphs without marks are parts of them.
    """

    def __init__(self, before: Sequence[CustomGraphPass] = (), checkpointed: bool = False):
        self.before, self.checkpointed = tuple(before), checkpointed

    def __call__(self, graph: fx.Graph) -> None:
        for graph_pass in self.before:
            graph_pass(graph)
        if any("recompute" in node.meta for node in graph.nodes):
            _complete_marks(graph)
            return
        if self.checkpointed:
            return
        for node in graph.nodes:
            if node.target in _QUANTIZERS and _is_cheap_in_backward(node.args[0]):
                for part in (node, *node.users):
                    part.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                    part.meta["ac_graph_id"] = 0

    def uuid(self) -> object:
        others = (graph_pass.uuid() for graph_pass in self.before)
        return get_hash_for_files((__file__,)), self.checkpointed, *others


def _complete_marks(graph: fx.Graph) -> None:
    """Marks our ops in forward, and casts before them, between marked ones of one checkpoint."""
    marked_here = []
    for node in graph.nodes:
        op = node.args[0].target if node.target is operator.getitem else node.target
        if (
            (str(op).startswith("titan_fp8.") or op in _SAME_VALUES)
            and _is_forward(node)
            and "recompute" not in node.meta
        ):
            marked = [n for n in node.all_input_nodes if "recompute" in n.meta]
            if marked:
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                node.meta["ac_graph_id"] = marked[0].meta["ac_graph_id"]
                marked_here.append(node)
    # What no op of the same checkpoint reads came behind its end.
    for node in reversed(marked_here):
        region = node.meta["ac_graph_id"]
        if not any(_is_forward(n) and n.meta.get("ac_graph_id") == region for n in node.users):
            del node.meta["recompute"], node.meta["ac_graph_id"]


def _is_forward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_forward"


def _is_cheap_in_backward(x: fx.Node) -> bool:
    """Whether x is attention's output or a pointwise product: a norm's result, or SwiGLU's."""
    while x.target in _SAME_VALUES:
        x = x.args[0]
    return x.target is _aten.mul.Tensor or "attention" in str(x.args[:1]) + str(x.target)


def recompute_fp8_inputs(checkpointed: bool = False) -> None:
    """Installs the pass, behind those that are there already; the last call counts."""
    there = inductor_config.joint_custom_pre_pass
    if isinstance(there, RecomputeFP8Inputs):
        before = there.before
    else:
        before = there if isinstance(there, (list, tuple)) else [there] if there else []
    inductor_config.joint_custom_pre_pass = RecomputeFP8Inputs(before, checkpointed)
