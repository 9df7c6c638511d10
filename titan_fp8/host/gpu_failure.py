"""Failures that a GPU reports: a kernel writes what went wrong to the CPU's memory, and traps."""

import logging
import threading
import time
import weakref
from collections.abc import Callable

import torch

_log = logging.getLogger(__name__)
_failures: "weakref.WeakSet[GpuFailure]" = weakref.WeakSet()


class GpuFailure:
    """Two words that kernels write if they fail.

    A thread logs a failure as soon as it happens. PyTorch's own error does not say what it is.

    Args:
        describe: an error message for the two words.

    Attributes:
        words: (2,) int32, pinned; the first is 0 until a kernel fails.
    """

    def __init__(self, describe: Callable[[int, int], str]):
        self.words = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self._describe = describe
        _failures.add(self)
        words, alive = self.words.numpy(), weakref.ref(self)

        def watch() -> None:
            while alive() is not None and not words[0]:
                time.sleep(0.05)
            if (failed := alive()) is not None:
                try:
                    failed.check()
                except RuntimeError as error:
                    _log.error("titan_fp8: %s", error)

        threading.Thread(target=watch, name="titan_fp8 failures", daemon=True).start()

    def check(self) -> None:
        """Raises RuntimeError with the description if a kernel has failed."""
        code, detail = self.words.tolist()
        if code:
            raise RuntimeError(self._describe(code, detail))


def check_all() -> None:
    """`GpuFailure.check` of all there are, for launches that call no method of their owners."""
    for failure in _failures:
        failure.check()
