"""Whether FP8 pays for a model and a plan: docs/plan.md. Importing it sets torchtitan's device."""

import importlib.metadata

import torch

from titan_fp8 import cpu_host

if not (version := importlib.metadata.version("torchtitan")).startswith("0.2."):
    raise ImportError(f"titan_fp8.plan needs torchtitan 0.2.2, and {version} is installed")
if not torch.cuda.is_available():
    cpu_host.prepare()  # Otherwise torchtitan assumes that there are GPUs.
