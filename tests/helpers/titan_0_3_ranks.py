"""Imported by the server of ranks: prepares the CPU before it imports torchtitan."""

import gc

gc.disable()  # as in rank_server.py

import torch

from titan_fp8 import cpu_host

cpu_host.prepare()
torch.set_num_threads(1)

import scipy.io  # noqa: F401
import titan_0_3  # noqa: F401

gc.freeze()
