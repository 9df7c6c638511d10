"""A job loads this instead of titan_fp8.plugin; it prints at exit how often the stream changed.

With INPUT_STREAM=off in the environment, batches stay on the main stream.
"""

import atexit
import os

import torch

from titan_fp8.plugin import JobConfig
from titan_fp8.torchtitan_0_2 import patches

__all__ = ["JobConfig"]

switches: list[torch.cuda.Stream] = []
set_stream = torch.cuda.set_stream


def counted(stream: torch.cuda.Stream) -> None:
    switches.append(stream)
    set_stream(stream)


if os.environ.get("INPUT_STREAM") == "off":
    object.__setattr__(patches.INPUT_STREAM, "apply", lambda *makes: False)
torch.cuda.set_stream = counted
atexit.register(lambda: print(f"switched {len(switches)} times", flush=True))
