"""What a job of bench_plans.py loads: titan_fp8.plugin, and production models cut short.

A flavor such as "8B-8-layers" has the layers of the whole model, but fewer of them, so that a plan
fits on few GPUs. The folder of this file must be on PYTHONPATH; bench_plans.py sets it.
"""

import dataclasses

from torchtitan.protocols.train_spec import get_train_spec

from titan_fp8.plugin import JobConfig

__all__ = ["JobConfig"]

LAYERS = {
    "llama3": {"8B": 8, "70B": 6},
    "deepseek_v3": {"16B": 8},
}
"""Model -> flavor -> layers of the flavor that is added, such as "8B-8-layers"."""

for model, flavors in LAYERS.items():
    known = get_train_spec(model).model_args
    for flavor, layers in flavors.items():
        known[f"{flavor}-{layers}-layers"] = dataclasses.replace(known[flavor], n_layers=layers)
