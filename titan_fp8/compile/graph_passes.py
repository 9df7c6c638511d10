"""Smaller quantizers in the graphs that torch.compile has made of forward and backward.

If backward recomputes the quantizer of a layer's input, forward needs its rows alone and backward
its columns alone. The pass runs after the partitioner, on each graph by itself, and replaces such a
quantizer by one that writes only what is read. It changes no result by a bit.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch._inductor.custom_graph_pass
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import OpOverload

from titan_fp8.ops.registry import SCHEMAS
from titan_fp8.recipe import RECIPES

_log = logging.getLogger(__name__)

# torch 2.13; in 2.11 no pass is one.
CustomInferenceAwareGraphPass: Any = getattr(
    torch._inductor.custom_graph_pass, "CustomInferenceAwareGraphPass", ()
)

EAGER = "eager_input_vals"
"""The key of a node's meta with the arguments, as tensors without data, that the op has in eager
mode. torch.compile gives its inputs the same strides."""

_BOTH = {
    r.quantize_rows_and_columns.overload: (r.quantize_rows.overload, r.quantize_columns.overload)
    for r in RECIPES.values()
}
"""A quantizer of rows and columns -> that of the rows and that of the columns."""


@dataclass(frozen=True)
class SmallerQuantizers(CustomGraphPass):
    """The pass, after those in `before`: `torch._inductor.config.post_grad_custom_post_pass`."""

    before: tuple[Callable[[fx.Graph], None], ...] = ()

    @classmethod
    def after(cls, existing: Any) -> Any:
        """What to install in place of `existing`: a pass, a list of passes or None.

        That is `existing` itself, with a warning, if it has a pass that takes more than a graph.
        """
        if isinstance(existing, cls):
            return existing
        several = isinstance(existing, (list, tuple))
        before = tuple(existing) if several else (existing,) if existing else ()
        if any(isinstance(each, CustomInferenceAwareGraphPass) for each in before):
            _log.warning("titan_fp8: %s is left out: it cannot follow %r", cls.__name__, existing)
            return existing
        return cls(before)

    def __call__(self, graph: fx.Graph) -> None:
        for graph_pass in self.before:
            graph_pass(graph)
        narrow_quantizers(graph)

    def uuid(self) -> object:
        """What torch.compile's caches tell versions of the pass by; None: nothing is cached.

        The schemas of the ops are a part of it: cached code calls them, and the caches do not
        notice that they have changed.
        """
        before = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.before]
        return None if None in before else (get_hash_for_files((__file__,)), *SCHEMAS, *before)


def narrow_quantizers(graph: fx.Graph) -> None:
    """Replaces quantizers of which only the rows or only the columns are read."""
    for node in [n for n in graph.nodes if n.target in _BOTH]:
        rows, columns = _BOTH[node.target]
        read = {user.args[1] for user in node.users}
        if read <= {0, 1}:
            _replace_quantizer(node, rows, 0)
        elif read <= {2, 3}:
            _replace_quantizer(node, columns, 2)


def _replace_quantizer(node: fx.Node, op: OpOverload, first: int) -> None:
    """Replaces the node by `op`, whose outputs are those of the node from `first` on."""

    def arguments(args: Any, options: Any) -> tuple[Any, Any]:
        if first:
            return args, options
        # A quantizer of rows has no use for `offs` and `aligned`.
        return args[:1], {k: v for k, v in options.items() if k not in ("offs", "aligned")}

    with node.graph.inserting_before(node):
        narrow = node.graph.call_function(op, *arguments(node.args, node.kwargs))
    narrow.meta = node.meta | {"val": node.meta["val"][first : first + 2]}
    if EAGER in narrow.meta:
        narrow.meta[EAGER] = arguments(*narrow.meta[EAGER])
    for output in [*node.users]:
        output.args = narrow, cast(int, output.args[1]) - first
    node.graph.erase_node(node)
