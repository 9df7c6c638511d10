"""torchtitan in tests: tiny models, text to train on, a trainer in this process or in others.

Ranks of torchrun take `--experimental.custom_import titan`, which defines the tiny models.
"""

import contextlib
import dataclasses
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from parsing import parse_args
from plans import BOTH, CONVERTERS, GROUPED_MM, LINEAR  # noqa: F401  (for the tests)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.llama4 import llama4_args
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.train import Trainer

AC = "--activation_checkpoint"
CHECKPOINTING = {
    "full": (f"{AC}.mode", "full"),
    "layer 1": (f"{AC}.mode", "selective", f"{AC}.selective_ac_option", "1"),
    "layer 2": (f"{AC}.mode", "selective", f"{AC}.selective_ac_option", "2"),
    "op": (f"{AC}.mode", "selective", f"{AC}.selective_ac_option", "op"),
    "early stop": (f"{AC}.mode", "full", f"{AC}.early_stop"),
}
"""torchtitan's modes of activation checkpointing, as flags."""
# Traces, decomposes and partitions as Inductor does, without the C++ compiler.
COMPILE = ("--compile.enable", "--compile.backend", "aot_eager")
COMPILE_BLOCKS = (*COMPILE, "--compile.components", "model")
"""Without the loss; test_training_modes.py compiles it, and models with dense blocks, too."""
TRACE_BLOCKS = (*COMPILE_BLOCKS, "--compile.backend", "eager")
"""For tests of what is compiled rather than to what: this takes half the time."""


def _add_tiny(flavors: dict, like: str = "debugmodel", name: str = "tiny", **changes) -> None:
    """Adds a copy of a torchtitan flavor with two layers, four experts and other changes."""
    args = flavors[like]
    if moe_args := getattr(args, "moe_args", None):
        changes["moe_args"] = dataclasses.replace(moe_args, num_experts=4, top_k=2)
    flavors[name] = dataclasses.replace(args, **{"n_layers": 2, **changes})


_add_tiny(llama3_args, dim=128, n_heads=4)
_add_tiny(llama4_args, dim=128, n_heads=4)
_add_tiny(qwen3_args, dim=128, n_heads=2, n_kv_heads=1, head_dim=64, hidden_dim=256)
_add_tiny(
    qwen3_args,
    like="debugmodel_moe",
    name="tiny_moe",
    **{"dim": 128, "n_heads": 2, "n_kv_heads": 1, "head_dim": 64, "moe_inter_dim": 128},
)
_add_tiny(
    deepseekv3_args,
    **{"dim": 128, "inter_dim": 256, "moe_inter_dim": 128, "n_heads": 2, "kv_lora_rank": 64},
    **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
)
_add_tiny(deepseekv3_args, like="tiny", name="one_block", n_layers=1, n_dense_layers=0)
_add_tiny(llama4_args, like="tiny", name="one_block", n_layers=1, interleave_moe_layer_step=1)
ONE_BLOCK = ("--model.flavor", "one_block")
"""A DeepSeekV3 or Llama4 whose only block has experts, to be compiled in half the time."""


def toml(model: str, converters: tuple[str, ...] = BOTH, flavor: str = "tiny") -> str:
    """The first sections of a job's TOML; others may be appended."""
    return f"""
[job]
custom_config_module = "titan_fp8.plugin"

[model]
name = "{model}"
flavor = "{flavor}"
converters = {list(converters)}
"""


def parse(folder: Path, text: str, *flags: object) -> JobConfig:
    """torchtitan's config from the text of a TOML, which is written to `folder`, and from flags.

    A forked rank writes a file of its own, because another one may read its file at that moment.
    """
    forked = multiprocessing.parent_process() is not None
    file = folder / (f"job-{os.getpid()}.toml" if forked else "job.toml")
    file.write_text(text)
    return parse_args(["--job.config_file", file, *flags])


def build(config: JobConfig) -> nn.Module:
    """The model of a job, unconverted, on the meta device, as the trainer builds it."""
    spec = get_train_spec(config.model.name)
    args = dataclasses.replace(spec.model_args[config.model.flavor])
    args.update_from_config(config)
    with torch.device("meta"):
        return spec.model_cls(args)


def convert(config: JobConfig, model: nn.Module, ranks: int | None = None) -> nn.Module:
    """The model after the job's converters, called as by the trainer on one of `ranks` ranks.

    By default these are as many as expert and pipeline parallelism need.
    """
    plan = config.parallelism
    dims = ParallelDims(
        dp_replicate=plan.data_parallel_replicate_degree,
        dp_shard=plan.data_parallel_shard_degree,
        cp=plan.context_parallel_degree,
        tp=plan.tensor_parallel_degree,
        pp=plan.pipeline_parallel_degree,
        ep=plan.expert_parallel_degree,
        etp=plan.expert_tensor_parallel_degree,
        world_size=ranks or plan.expert_parallel_degree * plan.pipeline_parallel_degree,
    )
    build_model_converters(config, dims).convert(model)
    return model


def job(
    folder: Path,
    model: str,
    *flags: object,
    converters: tuple[str, ...] = BOTH,
    flavor: str = "debugmodel",
    body: str = "",
) -> JobConfig:
    """The config of a job; `body` is appended to the TOML."""
    return parse(folder, toml(model, converters, flavor) + body, *flags)


def converted(config: JobConfig) -> nn.Module:
    """The model of a job after its converters."""
    return convert(config, build(config))


def of_type(model: nn.Module, kind: type) -> dict[str, nn.Module]:
    """The modules of a class and its subclasses, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def training(text: Path, folder: Path) -> list[object]:
    """Flags of a small eager training in FP8 on `text`, which writes to `folder`."""
    return [
        *("--job.dump_folder", folder, "--model.hf_assets_path", text),
        *("--training.dataset", "c4_test", "--training.dataset_path", text / "corpus"),
        *("--training.seq_len", 96, "--training.local_batch_size", 2, "--training.steps", 8),
        *("--optimizer.implementation", "foreach", "--lr_scheduler.warmup_steps", 2),
        *("--metrics.log_freq", 1, "--activation_checkpoint.mode", "none", "--debug.seed", 42),
    ]


@contextlib.contextmanager
def one_process(backend: str = "gloo", ranks: int = 1) -> Iterator[None]:
    """Makes this process rank 0, as under torchrun; for more ranks the backend must be "fake"."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=ranks)
    os.environ["LOCAL_RANK"] = "0"
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]
        dist.destroy_process_group()


@contextlib.contextmanager
def trainer(config: JobConfig) -> Iterator[Trainer]:
    """torchtitan's trainer for a job, in the current process group."""
    trainer = Trainer(config)
    try:
        yield trainer
    finally:
        trainer.close()


def batch(trainer: Trainer, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Random tokens and labels in the shape of the job's batches."""
    config, generator = trainer.job_config.training, torch.Generator().manual_seed(seed)
    shape = (config.local_batch_size, config.seq_len + 1)
    tokens = torch.randint(trainer.model_args.vocab_size, shape, generator=generator)
    return {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()


def loss_and_gradients(
    trainer: Trainer, seed: int = 0, tokens: int | None = None
) -> dict[str, Tensor]:
    """The loss on a random batch as "loss", and the local gradient of every parameter by its name.

    The loss is divided by `tokens`, by default the number of tokens in the batch.
    """
    inputs, labels = batch(trainer, seed)
    tokens = labels.numel() if tokens is None else tokens
    trainer.optimizers.zero_grad()
    loss = trainer.forward_backward_step(
        input_dict=inputs, labels=labels, global_valid_tokens=torch.tensor(float(tokens))
    )
    wrappers = ("_checkpoint_wrapped_module.", "_orig_mod.")
    result = {"loss": loss.detach().clone()}
    for name, parameter in trainer.model_parts[0].named_parameters():
        for wrapper in wrappers:
            name = name.replace(wrapper, "")
        grad = parameter.grad
        result[name] = (grad.to_local() if isinstance(grad, DTensor) else grad).clone()
    return result
