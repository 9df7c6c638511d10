"""A pass over graphs of torch.compile that leaves the passes of others in place."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files


@dataclass(frozen=True)
class ChainedPass(CustomGraphPass):
    """A graph pass that runs the passes `before` first."""

    before: tuple[CustomGraphPass, ...] = ()

    @classmethod
    def after(cls, existing: Any) -> "ChainedPass":
        """The pass to install in place of `existing`: a pass, a list of passes or None."""
        if isinstance(existing, cls):
            return existing
        several = isinstance(existing, (list, tuple))
        return cls(tuple(existing) if several else (existing,) if existing else ())

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
        """What torch.compile's caches tell versions of the pass by."""
        return get_hash_for_files(self.files()), *(each.uuid() for each in self.before)
