"""Measures whether FP8 pays for a model and a parallel plan; docs/plan.md says how to use it.

`model.py` reads what a rank computes, from torchtitan's own plan on a meta model. `measure.py`
times its layers on this GPU; `bound.py` says without one what a table of GEMM speeds knows;
`train.py` trains the config. Importing the package chooses torchtitan's device.
"""

import torch

from titan_fp8 import cpu_host

if not torch.cuda.is_available():
    cpu_host.prepare()  # Otherwise torchtitan assumes that there are GPUs.
