"""Counts ops as they run."""

import collections
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from titan_fp8.ops import registry


class Count(TorchDispatchMode):
    """Counts the ops of titan_fp8 as they run, and remembers their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, list[tuple]] = {}

    @property
    def calls(self) -> dict[str, int]:
        return {name: len(each) for name, each in self.arguments.items()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "titan_fp8":
            self.arguments.setdefault(func.name().split("::")[1], []).append(args)
        return func(*args, **(kwargs or {}))


class CountKernels(TorchDispatchMode):
    """Counts all ops that compute something, those inside the ops of titan_fp8 instead of these."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter = collections.Counter()
        self.in_ops = mock.patch.object(registry, "needs_dispatcher", lambda args: False)

    def __enter__(self):
        self.in_ops.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.in_ops.stop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        allocates = func.name().startswith(("aten::empty", "aten::new_empty"))
        if not func.is_view and not allocates:
            self.calls[func] += 1
        return func(*args, **(kwargs or {}))
