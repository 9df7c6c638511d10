"""What the GPU tests share."""

import contextlib

import torch


@contextlib.contextmanager
def poisoned_outputs():
    """Fresh tensors hold NaN."""
    # cuBLAS, which may run between, would ask for a setting of its own; it may do without.
    torch.use_deterministic_algorithms(True, warn_only=True)
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
