"""Counts the ops of titan_fp8 as they run."""

from torch.utils._python_dispatch import TorchDispatchMode


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
