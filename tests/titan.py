"""torchtitan for the tests: tiny models, their text, a trainer in this process, runs in others.

A subprocess that names this module in `--experimental.custom_import` has the tiny models too.
"""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.llama3 import llama3_args
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

ROOT = Path(__file__).parents[1]
LINEAR = "quantize.linear.titan_fp8"
GROUPED_MM = "quantize.grouped_mm.titan_fp8"
BOTH = (LINEAR, GROUPED_MM)

llama3_args["tiny"] = dataclasses.replace(llama3_args["debugmodel"], dim=128, n_layers=2, n_heads=4)
_moe = deepseekv3_args["debugmodel"]
deepseekv3_args["tiny"] = dataclasses.replace(
    _moe,
    dim=128,
    inter_dim=256,
    moe_inter_dim=128,
    n_layers=3,
    n_heads=2,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    moe_args=dataclasses.replace(_moe.moe_args, num_experts=4, num_shared_experts=1, top_k=2),
)


def toml(model: str, converters: tuple[str, ...] = BOTH, flavor: str = "tiny") -> str:
    """The head of a job's TOML, to which sections may be appended."""
    return f"""
[job]
custom_config_module = "titan_fp8.plugin"

[model]
name = "{model}"
flavor = "{flavor}"
converters = {list(converters)}
"""


def parse(folder: Path, text: str, *flags: object) -> JobConfig:
    """What torchtitan makes of a TOML's text, written into `folder`, and of flags."""
    file = folder / "job.toml"
    file.write_text(text)
    return ConfigManager().parse_args(["--job.config_file", str(file), *map(str, flags)])


def build(config: JobConfig) -> nn.Module:
    """The model of a job before any conversion, on the meta device, as the trainer builds it."""
    spec = get_train_spec(config.model.name)
    args = dataclasses.replace(spec.model_args[config.model.flavor])
    args.update_from_config(config)
    with torch.device("meta"):
        return spec.model_cls(args)


def convert(config: JobConfig, model: nn.Module) -> nn.Module:
    """The model after the job's converters, as the trainer calls them."""
    one_process = ParallelDims(
        dp_shard=1, dp_replicate=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1
    )
    build_model_converters(config, one_process).convert(model)
    return model


def run_module(module: str, *args: object, timeout: float = 120, **env: str):
    """`python -m module args`, with its output and errors as one."""
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
    )
