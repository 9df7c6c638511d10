"""What a rank computes: its linears, feed-forwards and experts, on a model without storage.

The job's converters convert the model. torchtitan parallelizes and compiles a second one, without
FP8, on a fake process group: its parameters have a rank's shapes, and names say what is compiled.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.tools import utils

from titan_fp8.fsdp.sharded_weight import marks
from titan_fp8.functional.checks import fits_fp8
from titan_fp8.modules.feed_forward import FP8FeedForward
from titan_fp8.recipe import BF16, get_recipe
from titan_fp8.torchtitan_0_2.config import GROUPED_MM, LINEAR, model_of
from titan_fp8.torchtitan_0_2.experts import is_grouped_experts

KINDS = ["data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel"]
KINDS += ["pipeline_parallel", "expert_parallel", "expert_tensor_parallel"]
MAX_GPUS = 1 << 14


@dataclass(frozen=True)
class Layer:
    """Modules of one local shape. A micro-batch calls each once."""

    modules: tuple[str, ...]
    m: int  # tokens, of all local experts together
    groups: int  # local experts, or 0
    shapes: tuple[torch.Size, ...]  # of the rank's parameters, gathered
    products: tuple[tuple[int, int], ...]  # (n, k) of each GEMM of forward
    recipe: str  # "bf16" if it does not run in FP8
    reason: str  # why not
    gathers_fp8: bool  # whether FSDP2's all-gather brings its weights in FP8
    is_compiled: bool  # whether it is in a region that torchtitan compiles

    @property
    def patterns(self) -> list[str]:
        """The names, without the number of the block."""
        return list(dict.fromkeys(re.sub(r"^layers\.\d+\.", "", name) for name in self.modules))

    @property
    def cells(self) -> list[str]:
        """Name, shape and count."""
        sizes = [self.groups] * (self.groups > 0) + [self.m, *self.products[0]]
        return [" ".join(self.patterns), ", ".join(map(str, sizes)), str(len(self.modules))]


@dataclass(frozen=True)
class Rank:
    """What one rank computes in a micro-batch; in a pipeline, rank 0."""

    config: JobConfig
    dims: ParallelDims
    model: nn.Module  # the whole, converted model on the meta device
    dtype: torch.dtype  # in which layers get their inputs and weights
    attention_flop: float  # forward and backward; 0 if its mask may leave more than causality out
    layers: tuple[Layer, ...]


def parse(file: str, flags: Sequence[str]) -> JobConfig:
    """torchtitan's config of a TOML and flags."""
    return ConfigManager().parse_args(["--job.config_file", file, *flags])


def degrees_of(config: JobConfig) -> ParallelDims:
    """An error if the degrees of parallelism do not fit each other."""
    degrees = {f"{kind}_degree": getattr(config.parallelism, f"{kind}_degree") for kind in KINDS}
    world = math.prod([*degrees.values()][:5])
    if not 0 < world <= MAX_GPUS:
        raise ValueError(f"[parallelism] {degrees} = {world} GPUs: allowed are 1 to {MAX_GPUS}")
    return ParallelDims(*degrees.values(), world_size=world)


def read_rank(config: JobConfig) -> Rank:
    """What a rank computes; an error if torchtitan or a converter refuses the parsed config."""
    dims, ours = degrees_of(config), {LINEAR, GROUPED_MM}
    if ours.isdisjoint(config.model.converters) or not hasattr(config.quantize.linear, "titan_fp8"):
        raise ValueError(
            f"model.converters = {config.model.converters} lists no converter of titan_fp8: add "
            f"--job.custom_config_module titan_fp8.plugin --model.converters {LINEAR}"
        )
    config.parallelism.enable_async_tensor_parallel = False  # changes no shape
    model, parts, why_bf16 = _models(config, dims)
    tokens, copies = _tokens(config, dims)
    equal = dict[Layer, list[str]]()
    for name, module, own in _modules(model, parts, dims.tp_enabled):
        m, why = copies if is_grouped_experts(module) else tokens, why_bf16.get(name)
        equal.setdefault(_layer(config, name, module, own, m, why), []).append(name)
    layers = tuple(replace(layer, modules=tuple(names)) for layer, names in equal.items())
    # Without FSDP2 torchtitan computes under TP and PP in the dtype of the parameters.
    is_mixed = dims.fsdp_enabled or not (dims.tp_enabled or dims.pp_enabled)
    dtype = config.training.mixed_precision_param if is_mixed else config.training.dtype
    attention_flop = _attention_flop(config, dims, parts, tokens)
    return Rank(config, dims, model, TORCH_DTYPE_MAP[dtype], attention_flop, layers)


def _models(config: JobConfig, dims: ParallelDims) -> tuple[nn.Module, list[Any], dict[str, str]]:
    """The converted model, torchtitan's parts of the other, and why modules stay in bf16."""
    spec, args = model_of(config)
    # It takes no memory of a GPU, and the shapes are the same whether this machine has any.
    on_cpu = [mock.patch.object(each, "device_type", "cpu") for each in (utils, parallel_dims)]
    with on_cpu[0], on_cpu[1], fake_ranks(dims.world_size):
        converters = build_model_converters(config, dims)  # They refuse sizes that make no model.
        with torch.device("meta"):
            model, plain = (spec.model_cls(args) for _ in range(2))
        if not hasattr(model, "layers"):
            raise ValueError(f"model.name = {config.model.name!r}: allowed are stacks of layers")
        converters.convert(model)
        if dims.pp_enabled:
            arguments = dims, config, torch.device("cpu"), args, spec.parallelize_fn
            _, parts, *_ = spec.pipelining_fn(plain, *arguments, nn.MSELoss())
        else:
            parts = [spec.parallelize_fn(plain, dims, config)]
    reports = [each.report for each in converters.converters if hasattr(each, "report")]
    return model, parts, {name: why for report in reports for name, _, why in report.left}


@contextlib.contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """Rank 0 of so many, without the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _tokens(config: JobConfig, dims: ParallelDims) -> tuple[int, int]:
    """A rank's tokens of a micro-batch, and their copies for its experts."""
    training, size = config.training, config.parallelism.pipeline_parallel_microbatch_size
    tokens = (size if dims.pp_enabled else training.local_batch_size) * training.seq_len // dims.cp
    top_k = getattr(getattr(model_of(config)[1], "moe_args", None), "top_k", 0)
    return tokens, tokens * top_k // (dims.tp if dims.ep_enabled and dims.etp == 1 else 1)


def _attention_flop(config: JobConfig, dims: ParallelDims, parts: list[Any], tokens: int) -> float:
    _, args = model_of(config)
    # Without parameters, torchtitan counts attention alone, and that without causality.
    whole = args.get_nparams_and_flops(nn.Module(), config.training.seq_len)[1] * tokens / 2
    share = sum(len(part.layers) for part in parts) / args.n_layers / dims.tp
    return whole * share * (getattr(args, "attn_type", "sdpa") == "sdpa")


def _modules(model: nn.Module, parts: list[Any], has_tp: bool) -> Iterator[tuple[str, Any, Any]]:
    """Name, converted module, and a rank's parameters by torchtitan's names, of each layer."""
    done = tuple[str, ...]()
    for raw, plain in (pair for part in parts for pair in part.named_modules()):
        name = re.sub(r"\.(_orig_mod|_checkpoint_wrapped_module)\b", "", raw)
        module = model.get_submodule(name)
        # Under tensor parallelism the linears of a feed-forward run one by one.
        is_fused = isinstance(module, FP8FeedForward) and not has_tp
        is_layer = is_fused or is_grouped_experts(module) or isinstance(module, nn.Linear)
        if is_layer and not f"{name}.".startswith(done):
            done += (f"{name}.",)
            yield name, module, dict(plain.named_parameters(raw))


def _layer(config: JobConfig, name: str, module: Any, own: Any, m: int, why: str | None) -> Layer:
    """That of one module. `own` are a rank's parameters; `why` says why it is in bf16, if known."""
    first = module.w1 if isinstance(module, FP8FeedForward) else module
    recipe = getattr(first, "recipe", BF16)
    why = (why or "its converter is not listed") if recipe == BF16 else ""
    sizes, ranks = zip(*map(_gathered, own.values()))
    weights = [size for size in sizes if len(size) == max(map(len, sizes))]  # no biases
    products = tuple((n, k) for *_, n, k in weights)
    odd = {n for product in products for n in product if not fits_fp8(n)}
    if recipe != BF16 and odd:
        raise ValueError(
            f"{name}: sizes {sorted(odd)} on a rank are no multiples of 16, and training would "
            "stop: choose another degree of parallelism, or leave it out by filter_fqns or fqns"
        )
    # Of a rowwise weight that one rank has alone, FSDP2 gathers high precision.
    fewest = 1 if recipe == BF16 or get_recipe(recipe).has_weight_blocks else 2
    in_fp8 = bool(marks(first)) and not config.training.enable_cpu_offload and min(ranks) >= fewest
    groups = weights[0][0] if is_grouped_experts(module) else 0
    return Layer((), m, groups, sizes, products, recipe, why, in_fp8, "_orig_mod" in [*own][0])


def _gathered(parameter: torch.Tensor) -> tuple[torch.Size, int]:
    """The shape of a rank's part, gathered by FSDP2, and from how many ranks; 0: it does not."""
    sizes, ranks = list(parameter.shape), 0
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        for name, size, placement in zip(mesh.mesh_dim_names or (), mesh.shape, placements):
            if name in ("fsdp", "efsdp"):
                ranks = size
            elif isinstance(placement, Shard):
                sizes[placement.dim] = -(-sizes[placement.dim] // size)
    return torch.Size(sizes), ranks
