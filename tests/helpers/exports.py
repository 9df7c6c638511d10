"""Small models to export, their checkpoints, and what an export of them must hold.

`--experimental.custom_import exports` defines the models in another process.
"""

import dataclasses
import functools
import shutil
from pathlib import Path

import titan
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torchtitan.config import JobConfig
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.qwen3 import qwen3_args

from titan_fp8.export.exporter import export
from titan_fp8.export.run import Run
from titan_fp8.reference import dequantize_128x128, quantize_128x128

llama3_args["export"] = dataclasses.replace(llama3_args["tiny"], dim=256, n_kv_heads=2)
llama3_args["export_ragged"] = dataclasses.replace(llama3_args["tiny"], dim=320)
qwen3_args["export"] = dataclasses.replace(qwen3_args["tiny"], head_dim=128)
qwen3_args["export_moe"] = dataclasses.replace(qwen3_args["tiny_moe"])
# What DeepSeek-V3 has, and torchtitan's debug model has not: sigmoid scores, groups of experts, a
# LoRA of the queries, whole blocks. With 96 tokens, YaRN, too.
deepseekv3_args["export"] = dataclasses.replace(
    deepseekv3_args["tiny"],
    **{"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128},
    **{"qk_rope_head_dim": 128, "v_head_dim": 128, "original_seq_len": 64},
    moe_args=dataclasses.replace(
        deepseekv3_args["tiny"].moe_args,
        **{"score_func": "sigmoid", "route_norm": True, "route_scale": 2.5},
        **{"num_expert_groups": 2, "num_limited_groups": 1},
    ),
)

MODELS = {
    "llama3": ("llama3", "export"),
    "qwen3": ("qwen3", "export"),
    "qwen3_moe": ("qwen3", "export_moe"),
    "deepseek_v3": ("deepseek_v3", "export"),
}
"""torchtitan's name and flavor of each model."""

SHARD_BYTES = 300_000
"""Several files for each model, several experts to a file."""


def toml(model: str) -> str:
    name, flavor = MODELS[model]
    has_experts = name == "deepseek_v3" or flavor == "export_moe"
    return titan.toml(name, titan.BOTH if has_experts else titan.BOTH[:1], flavor)


def config_of(model: str, folder: Path, text: Path, *flags: object) -> JobConfig:
    """The config of a run that writes to `folder`."""
    folder.mkdir(exist_ok=True)
    return titan.parse(
        folder, toml(model), *titan.training(text, folder), "--checkpoint.enable", *flags
    )


def write_checkpoint(folder: Path, config: JobConfig, seed: int = 0) -> Path:
    """A DCP checkpoint of random values, with a tensor of an optimizer beside those of the model.

    Tied tensors are equal, and the biases of experts are zero in models that do not train them.
    """
    run = Run(config)
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: torch.randn(meta.shape, generator=generator) * 0.05
        for name, meta in run.state.items()
    }
    if run.tied:
        state["output.weight"] = state["tok_embeddings.weight"]
    if run.name == "qwen3":
        state = {k: v.zero_() if k.endswith("expert_bias") else v for k, v in state.items()}
    dcp.save(state | {"optimizer.state.norm.weight.exp_avg": torch.ones(8)}, checkpoint_id=folder)
    return folder


def exported(folder: Path, model: str, text: Path, *flags: object) -> tuple[Run, Path, Path]:
    """The run, a checkpoint of random values, and its export, in `folder`."""
    config = config_of(model, folder, text, *flags)
    shutil.copytree(_exported(model, text, *flags), folder, dirs_exist_ok=True)
    return Run(config), folder / "step-1", folder / "out"


@functools.cache
def _exported(model: str, text: Path, *flags: object) -> Path:
    """A folder with the checkpoint and the export of a model, for all tests of a process."""
    name = "-".join(map(str, (model, *flags))).replace("/", "-")
    (folder := text / "exports" / name).mkdir(parents=True)
    config = config_of(model, folder / "job", text, *flags)
    checkpoint = write_checkpoint(folder / "step-1", config)
    export(checkpoint, folder / "out", config, shard_bytes=SHARD_BYTES, log=lambda line: None)
    shutil.rmtree(folder / "job")
    return folder


def read(checkpoint: Path, run: Run, name: str) -> Tensor:
    """A tensor of a checkpoint, by DCP's own planner."""
    state = {name: torch.empty_like(run.state[name], device="cpu")}
    dcp.load(state, checkpoint_id=checkpoint)
    return state[name]


def expected_tensors(run: Run, checkpoint: Path, quantized: set[str]) -> dict[str, Tensor]:
    """All tensors that an export must hold, from the checkpoint.

    `quantized` are names of weights in the checkpoint.
    """
    result = {}
    for source in run.state:
        value = read(checkpoint, run, source)
        for name, tensor in run.to_hf(source, value).items():
            if source in quantized:
                q, s = quantize_128x128(tensor.to(run.dtype), scale_fmt=run.scale_fmt)
                result |= {name: q, f"{name}_scale_inv": s}
            else:
                result[name] = tensor.to(run.dtype if "bias" not in name else torch.float32)
    return result


def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights with their scales multiplied in, all in FP32."""
    return {
        name: dequantize_128x128(tensor, scale)
        if (scale := tensors.get(f"{name}_scale_inv")) is not None
        else tensor.float()
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }


def fp8_weights(run: Run) -> set[str]:
    """The weights in the checkpoint that a default export quantizes, by their names alone."""
    left = ("output", "router.gate", "tok_embeddings", "norm", "bias")
    return {name for name in run.state if not any(part in name for part in left)}
