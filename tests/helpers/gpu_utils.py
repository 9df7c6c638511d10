"""What the GPU tests share."""

import contextlib

import torch


@contextlib.contextmanager
def poisoned_outputs():
    """Fresh tensors hold NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def no_sync():
    """Waiting for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
