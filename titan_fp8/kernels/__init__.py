"""The GPU kernels; the only package that imports triton.

`hopper` has the FP8 kernels, which need a Hopper GPU. Any CUDA GPU runs those of `permute` (token
rows) and `gradients` (sums for FSDP2). `for_device` says which FP8 kernels a device has.
"""

import functools
from types import ModuleType

import torch


@functools.cache
def for_device(device: torch.device) -> ModuleType:
    """The module with the FP8 kernels for a CUDA device: a function for each primitive op.

    Raises:
        RuntimeError: the device is not a Hopper GPU; says what to do instead.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        raise RuntimeError(
            f"titan_fp8: the FP8 kernels need a Hopper GPU (compute capability 9.0), and "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}; "
            "emulate = true computes the same numbers on any device"
        )
    from titan_fp8.kernels import hopper

    return hopper
