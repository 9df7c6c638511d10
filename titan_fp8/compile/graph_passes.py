"""Fewer and smaller FP8 ops in the graphs that torch.compile has made of forward and backward.

Both passes run after the partitioner, on each graph by itself. They change no result by a bit.

Quantizers. If backward recomputes the quantizer of a layer's input, forward needs its rows alone
and backward its columns alone. Such a quantizer is replaced by one that writes only what is read.

Sequences. Ops that read each other's outputs or the same tensor, such as a quantizer and the GEMMs
after it, become one `sequence` (`ops/sequence.py`), and what only they read is no tensor any more.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import getitem
from typing import Any, cast

import torch._inductor.custom_graph_pass
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._ops import OpOverload

from titan_fp8.ops import sequence
from titan_fp8.ops.registry import OPS, SCHEMAS
from titan_fp8.ops.sequence import Place, Step
from titan_fp8.recipe import RECIPES

_log = logging.getLogger(__name__)

# torch 2.13; in 2.11 no pass is one.
CustomInferenceAwareGraphPass: Any = getattr(
    torch._inductor.custom_graph_pass, "CustomInferenceAwareGraphPass", ()
)

MAX_STEPS = 16
"""Steps of a sequence, few enough for a replay (`MAX_SLOTS` in `kernels/launch.py`)."""

_FP8_OPS = {op.overload for op in OPS.values() if op.is_fp8}

EAGER = "eager_input_vals"
"""The key of a node's meta with the arguments, as tensors without data, that the op has in eager
mode. torch.compile gives its inputs the same strides."""

_BOTH = {
    r.quantize_rows_and_columns.overload: (r.quantize_rows.overload, r.quantize_columns.overload)
    for r in RECIPES.values()
}
"""A quantizer of rows and columns -> that of the rows and that of the columns."""


@dataclass(frozen=True)
class FewerOps(CustomGraphPass):
    """Both passes, after those in `before`: `torch._inductor.config.post_grad_custom_post_pass`."""

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
        merge_ops(graph)

    def uuid(self) -> object:
        """What torch.compile's caches tell versions of the passes by; None: nothing is cached.

        The schemas of the ops are a part of it: cached code calls them, and the caches do not
        notice that they have changed.
        """
        before = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.before]
        files = __file__, sequence.__file__
        return None if None in before else (get_hash_for_files(files), *SCHEMAS, *before)


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


def merge_ops(graph: fx.Graph) -> None:
    """Replaces connected FP8 ops by sequences."""
    for group in _connected(graph):
        steps: list[fx.Node] = []
        for node in group:
            if len(steps) == MAX_STEPS or _is_cyclic([*steps, node]):
                _merge(steps)
                steps = []
            steps.append(node)
        _merge(steps)


def _connected(graph: fx.Graph) -> list[list[fx.Node]]:
    """The FP8 ops, in groups whose ops read each other's outputs or the same tensors."""
    ops = {node: None for node in graph.nodes if _can_be_step(node)}
    parents = {node: node for node in graph.nodes}

    def root(node: fx.Node) -> fx.Node:
        while parents[node] is not node:
            node = parents[node]
        return node

    for node in ops:
        for value in node.all_input_nodes:
            source = value.args[0] if value.target is getitem else value
            if source in ops or value.meta["val"].is_floating_point():
                parents[root(source)] = root(node)
    groups = defaultdict(list)
    for node in ops:
        groups[root(node)].append(node)
    return [*groups.values()]


def _can_be_step(node: fx.Node) -> bool:
    """Whether it is an FP8 op whose arguments are tensors and constants of a `Step`."""
    return (
        node.target in _FP8_OPS
        and not node.kwargs.get("emulate")
        and all(isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes)
        and not any(isinstance(a, (list, tuple)) for a in node.args)
        and not any(isinstance(value, fx.Node) for value in node.kwargs.values())
    )


def _is_cyclic(nodes: Sequence[fx.Node]) -> bool:
    """Whether a node outside reads an output of these and feeds, directly or not, one of them."""
    inside = {*nodes, *(user for node in nodes for user in node.users if user.target is getitem)}
    seen: set[fx.Node] = set()
    left = [value for node in nodes for value in node.all_input_nodes if value not in inside]
    while left:
        node = left.pop()
        if node in inside:
            return True
        if node not in seen:
            seen.add(node)
            left += node.all_input_nodes
    return False


def _merge(nodes: Sequence[fx.Node]) -> None:
    """Replaces the nodes by one sequence, if they are several."""
    if len(nodes) < 2:
        return
    inputs: dict[fx.Node, Tensor] = {}
    places: dict[fx.Node, Place] = {}  # of the outputs
    steps = []
    for number, node in enumerate(nodes, 1):
        eager = node.meta[EAGER][0] if EAGER in node.meta else ()
        arguments: list[Any] = []
        for value, eager_value in zip_longest(node.args, eager[: len(node.args)]):
            if not isinstance(value, fx.Node):
                arguments.append(value)
                continue
            if value not in places and value not in inputs:
                inputs[value] = value.meta["val"] if eager_value is None else eager_value
            arguments.append(places.get(value) or Place(0, [*inputs].index(value)))
        name = cast(OpOverload, node.target)._opname
        steps.append(
            Step(name, tuple(arguments), {k: v for k, v in node.kwargs.items() if k != "emulate"})
        )
        if isinstance(node.meta["val"], Tensor):
            places[node] = Place(number, 0)
        else:
            places |= {user: Place(number, cast(int, user.args[1])) for user in node.users}
    is_read = {place: v for v, place in places.items() if any(u not in nodes for u in v.users)}
    for value, place in places.items():
        if is_read.get(place, value) is not value:  # Two nodes may be the same output.
            value.replace_all_uses_with(is_read[place])
    results = [*is_read.values()]
    _replace(nodes, inputs, sequence.encode(steps, [places[r] for r in results]), results)
    stable_topological_sort(nodes[0].graph)


def _replace(
    nodes: Sequence[fx.Node], inputs: dict[fx.Node, Tensor], steps: str, results: Sequence[fx.Node]
) -> None:
    """Replaces the nodes by the sequence `steps` of `inputs`, which returns `results`."""
    graph = nodes[-1].graph
    with graph.inserting_after(nodes[-1]):
        merged = graph.call_function(sequence.OVERLOAD, ([*inputs], steps))
    merged.meta = nodes[-1].meta | {"val": [result.meta["val"] for result in results]}
    merged.meta[EAGER] = ([*inputs.values()], steps), {}
    last = merged
    for index, result in enumerate(results):
        with graph.inserting_after(last):
            last = graph.call_function(getitem, (merged, index))
        last.meta = result.meta
        result.replace_all_uses_with(last, delete_user_cb=lambda user: user not in nodes)
    for node in reversed(nodes):
        for user in [*node.users]:
            graph.erase_node(user)
        graph.erase_node(node)
