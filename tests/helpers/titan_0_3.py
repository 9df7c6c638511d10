"""torchtitan 0.3 in tests: the debug models cut to two layers, trained in this process.

Also a config module for the command line: `--module titan_0_3 --config llama3_blockwise`.
"""

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from health_runs import Recorder
from parsing import parse_args
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.models.deepseek_v3 import config_registry as deepseek_v3
from torchtitan.models.gpt_oss import config_registry as gpt_oss
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.trainer import Trainer

from titan_fp8.torchtitan_0_3 import FP8GroupedExpertsConverter, FP8LinearConverter

MODELS = {
    "llama3": (llama3.llama3_debugmodel, llama3.model_registry),
    "deepseek_v3": (deepseek_v3.deepseek_v3_debugmodel, deepseek_v3.model_registry),
}

ALL = MODELS | {
    "gpt_oss": (
        gpt_oss.gpt_oss_debugmodel_flex,
        partial(gpt_oss.model_registry, attn_backend="flex"),
    )
}

VOCABULARY = 512
"""Twice that of the tokenizer in tests, and a quarter of torchtitan's, which only takes time."""
STEPS = 4


def converters(model: str, **fields: Any) -> list[Any]:
    """The converters of a model, with fields of both."""
    kinds = [FP8LinearConverter, FP8GroupedExpertsConverter]
    return [kind.Config(**fields) for kind in kinds[: 1 if model == "llama3" else 2]]


def small(name: str, converters: list[Any] | None = None, layers: int = 2) -> Trainer.Config:
    """The config of a debug model, cut to its first layers; the second of DeepSeek's is an MoE."""
    make_config, model_registry = ALL[name]
    config = make_config()
    config.model_spec = model_registry("debugmodel")
    model = config.model_spec.model
    del model.layers[layers:]
    model.vocab_size = model.tok_embeddings.num_embeddings = VOCABULARY
    model.lm_head.out_features = config.loss.loss_fn.global_vocab_size = VOCABULARY
    for layer in model.layers:
        narrow(layer)
    for converter in converters or ():
        converter.build().convert(model)
    config.activation_checkpoint = None
    return config


def narrow(layer: Any) -> None:
    """Gives a block narrower experts, and multi-head latent attention four heads.

    On two ranks an expert has a width of 48, which is a multiple of 16, but not of 128.
    """
    if getattr(layer, "moe", None):
        layer.moe.routed_experts.inner_experts.hidden_dim = 96
    attention = layer.attention
    if hasattr(attention, "wkv_b"):
        heads = 4
        for projection in (attention.wq, attention.wkv_b):
            projection.out_features = projection.out_features // attention.n_heads * heads
        attention.wo.in_features = attention.v_head_dim * heads
        attention.n_heads = heads


def __getattr__(name: str) -> Callable[[], Trainer.Config]:
    """The config function MODEL_RECIPE; the recipe "plain" stands for no converters.

    MODEL_RECIPE_observed reports health every STEPS / 2 steps.
    """
    for model in ALL:
        if name.startswith(f"{model}_"):
            recipe = name.removeprefix(f"{model}_")
            fields = {"health_freq": STEPS // 2} if recipe.endswith("_observed") else {}
            fields["recipe"] = recipe.removesuffix("_observed")
            return partial(small, model, None if recipe == "plain" else converters(model, **fields))
    raise AttributeError(name)


def flags(text: Path, folder: Path, *more: object) -> list[str]:
    """A small training on `text`, of STEPS steps, that writes to `folder`."""
    settings = {
        "dump_folder": folder,
        "hf_assets_path": text,
        "dataloader.dataset_path": text / "corpus",
        "training.seq_len": 64,
        "training.local_batch_size": 1,
        "training.steps": STEPS,
        "optimizer.implementation": "foreach",
        "optimizer.param-groups.0.optimizer-kwargs.lr": 2e-3,
        "lr_scheduler.warmup_steps": 2,
        "debug.seed": 42,
        "parallelism.spmd_backend": "partial_dtensor",
    }
    switches = ["--training.disable_cuda_graphs", "--debug.no-enable-structured-logging"]
    pairs = [str(part) for name, value in settings.items() for part in (f"--{name}", value)]
    return [*pairs, *switches, *map(str, more)]


def parse(config: str, *arguments: object) -> Trainer.Config:
    """torchtitan's config of `--module titan_0_3 --config CONFIG` and flags."""
    parsed = parse_args(["--module", "titan_0_3", "--config", config, *arguments])
    if hasattr(parsed, "validator"):
        parsed.validator.enable = False
    return parsed


def initialize(model: nn.Module) -> None:
    """Gives every parameter values that depend on its name alone, however it is sharded.

    DTensor has no random numbers for CPU meshes.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            full = torch.ones(parameter.shape)
            if parameter.dim() > 1:
                full = torch.randn(parameter.shape, generator=generator) * 0.02
            if isinstance(parameter, DTensor):
                full = distribute_tensor(
                    full, parameter.device_mesh, parameter.placements, src_data_rank=None
                ).to_local()
                parameter = parameter.to_local()
            parameter.copy_(full)


@contextlib.contextmanager
def trainer(config: Trainer.Config) -> Iterator[Trainer]:
    """torchtitan's trainer, its model initialized, in the current process group."""
    # As torchtitan's init_distributed does, which finds a process group and returns.
    torch.autograd.set_multithreading_enabled(False)
    built = Trainer(config)
    try:
        for part in built.model_parts:
            initialize(part)
        yield built
    finally:
        built.close()


def train(config: Trainer.Config) -> Recorder:
    """Trains; returns the metrics of each step."""
    recorder = Recorder()
    with trainer(config) as trained:
        trained.metrics_processor.logger = recorder
        data = trained.batch_generator(trained.dataloader)
        for step in range(1, config.training.steps + 1):
            trained.step = step
            trained.train_step(data)
    return recorder


def write_metrics(rank: int, folder: Path, runs: dict[str, tuple[str, list[str]]]) -> None:
    """On each rank: trains each run, (config, flags), and writes its losses and its health."""
    for name, (config, arguments) in runs.items():
        recorder = train(parse(config, *arguments))
        found = {"losses": recorder.losses(), "health": recorder.health()}
        (folder / f"{name}.{rank}.json").write_text(json.dumps(found))


def of_type(model: nn.Module, kind: type) -> dict[str, nn.Module]:
    """The modules of a class and its subclasses, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The local gradient of each parameter by name."""
    local = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        local[name] = grad.to_local() if isinstance(grad, DTensor) else grad
    return local
