"""A pass over graphs of torch.compile that leaves the passes of others in place."""

import logging
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch._inductor.custom_graph_pass
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from titan_fp8.ops.registry import SCHEMAS

_log = logging.getLogger(__name__)

# torch 2.13; in 2.11 no pass is one.
CustomInferenceAwareGraphPass: Any = getattr(
    torch._inductor.custom_graph_pass, "CustomInferenceAwareGraphPass", ()
)


@dataclass(frozen=True)
class ChainedPass(CustomGraphPass):
    """A graph pass that runs the passes `before` first."""

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
        self.run(graph)

    @abstractmethod
    def run(self, graph: fx.Graph) -> None:
        """Changes the graph."""

    @abstractmethod
    def files(self) -> tuple[str, ...]:
        """The files whose code decides what `run` does."""

    def uuid(self) -> object:
        """What torch.compile's caches tell versions of the pass by; None: nothing is cached.

        The schemas of the ops are a part of it: cached code calls them, and the caches do not
        notice that they have changed.
        """
        before = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.before]
        return None if None in before else (get_hash_for_files(self.files()), *SCHEMAS, *before)
