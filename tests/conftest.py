"""Readies torchtitan for a machine with no accelerator, before any test imports it."""

import torch

from titan_fp8 import cpu_host

if not torch.cuda.is_available():
    cpu_host.prepare()
