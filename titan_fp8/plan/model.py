"""The linears, feed-forwards and experts of a rank: torchtitan's own plan, applied to a meta model.

torchtitan's functions for parallelism run on a fake process group, so local shapes are those of a
job. Of two further models one is converted, which tells what is converted and why the rest is not.
"""

import contextlib
import copy
import importlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models import _supported_models
from torchtitan.protocols.model_converter import _registry_model_converter_cls
from torchtitan.protocols.train_spec import get_train_spec

from titan_fp8.checks import fits_fp8
from titan_fp8.conversion import errors_prefixed
from titan_fp8.feed_forward import FP8FeedForward
from titan_fp8.linear import convert_linears
from titan_fp8.recipe import BF16, get_recipe
from titan_fp8.torchtitan_0_2.config import GROUPED_MM, LINEAR, experts_recipe
from titan_fp8.torchtitan_0_2.experts import convert_experts
from titan_fp8.torchtitan_0_2.feed_forward import fuse_feed_forwards

FSDP = ("fsdp", "efsdp")
"""Mesh dimensions along which FSDP2 gathers a weight, so that a rank computes with all of it."""
SHARED_INPUTS = (("wq", "wk", "wv", "wkv_a", "wq_a"), ("w1", "w3"))
"""Linears of one module that read one input. In FP8 they quantize it once."""
MAX_GPUS = 1 << 14
UNLISTED = (BF16, "its converter is not listed")


@dataclass(frozen=True)
class Layer:
    """What a rank calls with one input, `count` times per micro-batch.

    Attributes:
        name, modules: with * for the index of the block; its modules in the first block.
        is_gated: a feed-forward or experts, of three products.
        groups, m: local experts, or 0; tokens, of all local experts together.
        ns, k: output features of each linear, or the hidden dimension; input features. As tensor
            parallelism shards them.
        recipe, reason: "bf16" if it is not converted, and why.
        refused: why training would stop at it, or "".
        gathers_fp8: whether FSDP2's all-gather brings its weights in FP8.
    """

    name: str
    modules: tuple[str, ...]
    is_gated: bool
    groups: int
    m: int
    ns: tuple[int, ...]
    k: int
    recipe: str
    reason: str
    refused: str
    gathers_fp8: bool
    count: int = 1

    @property
    def products(self) -> list[tuple[int, int]]:
        """(n, k) of each product."""
        (n, *_), k = self.ns, self.k
        return [(n, k), (n, k), (k, n)] if self.is_gated else [(each, k) for each in self.ns]

    @property
    def shape(self) -> str:
        lead = f"{self.groups}, " if self.groups else ""
        return f"{lead}{self.m}, {'+'.join(map(str, self.ns))}, {self.k}"

    @property
    def flop(self) -> float:
        """Of all of them, forward and backward."""
        return 6.0 * self.count * self.m * sum(n * k for n, k in self.products)


@dataclass(frozen=True)
class Rank:
    """What one rank computes in a micro-batch; in a pipeline, rank 0.

    Attributes:
        plain, converted: the whole model on the meta device, before and after conversion.
        shapes: {name of a parameter: its shape on the rank, once FSDP2 has gathered it}.
        dtype: in which layers compute.
        attention_flop: of forward and backward; 0 if its mask may leave more than causality out.
        blocks, least_blocks: of the model; the fewest with all kinds of blocks and on all stages.
    """

    config: Any
    dims: ParallelDims
    about: str
    layers: list[Layer]
    plain: nn.Module
    converted: nn.Module
    shapes: dict[str, torch.Size]
    dtype: torch.dtype
    attention_flop: float
    blocks: int
    least_blocks: int


def refusal(key: str, value: object, allowed: object) -> ValueError:
    return ValueError(f"{key} = {value!r}: allowed are {allowed}")


def degrees_of(config: Any, ngpu: int | None) -> ParallelDims:
    """ValueError if the degrees of parallelism do not fit each other or `ngpu`."""
    p = config.parallelism
    degrees = {
        "dp_replicate": p.data_parallel_replicate_degree,
        "dp_shard": p.data_parallel_shard_degree,
        "cp": p.context_parallel_degree,
        "tp": p.tensor_parallel_degree,
        "pp": p.pipeline_parallel_degree,
    }
    if ngpu is None and degrees["dp_shard"] == -1:
        raise ValueError(
            "parallelism.data_parallel_shard_degree = -1 means all remaining ranks: say by --ngpu "
            "how many GPUs the job has"
        )
    world = math.prod(degrees.values()) if ngpu is None else ngpu
    if not 0 < world <= MAX_GPUS:
        what = "--ngpu" if ngpu is not None else "the product of the degrees in [parallelism]"
        raise refusal(what, world, f"1 to {MAX_GPUS} GPUs")
    experts = {"ep": p.expert_parallel_degree, "etp": p.expert_tensor_parallel_degree}
    try:
        return ParallelDims(**degrees, **experts, world_size=world)
    except (AssertionError, ArithmeticError) as error:
        raise ValueError(f"[parallelism] and {world} GPUs: {error}") from None


def read_rank(config: Any, dims: ParallelDims) -> Rank:
    """What a rank computes, of a config that torchtitan's ConfigManager has parsed.

    Raises:
        ValueError: a value is not allowed, or torchtitan refuses the plan.
    """
    args, training = _model_args(config), config.training
    _check_sizes(config, dims, args)
    model_cls: Any = get_train_spec(config.model.name).model_cls
    with torch.device("meta"):
        plain, converted, parallel = (model_cls(args) for _ in range(3))
    if not hasattr(plain, "layers"):
        raise refusal("model.name", config.model.name, "models of transformer blocks")
    recipes = _convert(config, converted)
    with _parallelized(config, dims, args, parallel) as parts:
        named = [item for part in parts for item in part.named_parameters()]
        local = {n.replace("_checkpoint_wrapped_module.", ""): _gathered(p) for n, p in named}
    size = config.parallelism.pipeline_parallel_microbatch_size
    sequences = size if dims.pp_enabled else training.local_batch_size
    tokens = sequences * training.seq_len // dims.cp
    rows = tokens * getattr(getattr(args, "moe_args", None), "top_k", 0)
    rows //= dims.tp if dims.ep_enabled and dims.etp == 1 else 1
    equal: dict[Layer, list[Layer]] = {}
    for names in _units(converted, recipes, local, dims):
        layer = _layer(config, dims, names, recipes, local, (tokens, rows), args.dim)
        equal.setdefault(replace(layer, modules=()), []).append(layer)
    blocks = len({found[0] for name in local if (found := re.match(r"layers\.\d+\.", name))})
    modules = [name for name, _ in plain.named_modules() if re.match(r"layers\.\d+\.", name)]
    first = {pattern(name): int(name.split(".")[1]) for name in reversed(modules)}
    mixed = dims.fsdp_enabled or not (dims.tp_enabled or dims.pp_enabled)
    names_of_degrees = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    plan = ", ".join(f"{n} {d}" for n in names_of_degrees if (d := getattr(dims, n)) > 1)
    return Rank(
        config=config,
        dims=dims,
        about=f"{config.model.name} {config.model.flavor} on {dims.world_size} GPUs "
        f"({plan or 'no parallelism'}): rank 0, {blocks} blocks, {tokens} tokens per micro-batch",
        layers=[replace(same[0], count=len(same)) for same in equal.values()],
        plain=plain,
        converted=converted,
        shapes={name: shape for name, (shape, _, _) in local.items()},
        dtype=TORCH_DTYPE_MAP[training.mixed_precision_param if mixed else training.dtype],
        attention_flop=sequences * blocks * _attention_flop(args, training.seq_len, dims),
        blocks=len(plain.layers),  # type: ignore[arg-type]
        least_blocks=max(1 + max(first.values(), default=0), dims.pp if dims.pp > 1 else 1),
    )


def pattern(name: str) -> str:
    """The name with * for the index of the block."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _units(
    converted: nn.Module, recipes: dict[str, Any], local: dict[str, Any], dims: ParallelDims
) -> Iterator[tuple[str, ...]]:
    """Names of modules that the rank calls with one input."""
    owners, seen = {name.rpartition(".")[0] for name in local}, set()
    for name, module in converted.named_modules():
        parts = [f"{name}.{leaf}" for leaf in ("w1", "w2", "w3")]
        is_linear = isinstance(module, nn.Linear)
        # Under tensor parallelism the linears of a feed-forward run one by one.
        is_fused = isinstance(module, FP8FeedForward) and not dims.tp_enabled
        if is_fused and owners.issuperset(parts):
            seen.update(parts)
            yield (name,)
        elif name not in owners or name in seen:
            continue
        elif is_linear and recipes.get(name, UNLISTED)[0] != BF16:
            parent, _, leaf = name.rpartition(".")
            readers = next((group for group in SHARED_INPUTS if leaf in group), (leaf,))
            names = [n for each in readers if (n := f"{parent}.{each}") in owners]
            names = [n for n in names if recipes[n] == recipes[name]]
            seen.update(names)
            yield tuple(names)
        elif is_linear or any(p.dim() == 3 for p in module.parameters(recurse=False)):
            yield (name,)


def _layer(
    config: Any,
    dims: ParallelDims,
    names: tuple[str, ...],
    recipes: dict[str, tuple[str, str]],
    local: dict[str, tuple[torch.Size, int, bool]],
    tokens_and_rows: tuple[int, int],
    dim: int,
) -> Layer:
    """The layer of these modules. `recipes` is from `_convert`, `local` from `_gathered`."""
    owned = {p: p.rpartition(".")[0] for n in names for p in local if p.startswith(f"{n}.")}
    weights = {p: local[p] for p in owned if len(local[p][0]) > 1}
    owner = owned[next(iter(weights))]
    recipe, reason = recipes.get(owner, UNLISTED)
    shapes = [shape for shape, _, _ in weights.values()]
    stacked = [shape for shape in shapes if len(shape) == 3]
    is_feed_forward = owner not in names
    ns, k = tuple(shape[0] for shape in shapes[:1] if is_feed_forward) or tuple(
        shape[0] for shape in shapes
    ), shapes[0][-1]
    if stacked:
        # w1 and w3 may be one parameter; the three matrices have hidden x dim elements each.
        ns, k = (sum(shape.numel() for shape in stacked) // (3 * stacked[0][0] * dim),), dim
    odd = ", ".join(str(size) for size in sorted({*ns, k}) if not fits_fp8(size))
    section = (config.quantize.grouped_mm if stacked else config.quantize.linear).titan_fp8
    return Layer(
        name=" ".join((pattern(names[0]), *(name.rpartition(".")[2] for name in names[1:]))),
        modules=names,
        is_gated=bool(stacked) or is_feed_forward,
        groups=stacked[0][0] if stacked else 0,
        m=tokens_and_rows[bool(stacked)],
        ns=ns,
        k=k,
        recipe=recipe,
        reason=reason,
        refused=f"{odd} on a rank is not a multiple of 16" if odd and recipe != BF16 else "",
        # Of a rowwise weight that one rank has alone, FSDP2 gathers high precision.
        gathers_fp8=recipe != BF16
        and section.fsdp_all_gather
        and dims.fsdp_enabled
        and all(
            is_fsdp and (ranks > 1 or get_recipe(recipe).has_weight_blocks)
            for _, ranks, is_fsdp in weights.values()
        ),
    )


def _model_args(config: Any) -> Any:
    """The arguments of torchtitan's model; ValueError for unknown names in [model]."""
    model = config.model
    if not {LINEAR, GROUPED_MM} & set(model.converters):
        raise ValueError(
            f"model.converters = {model.converters} lists no converter of titan_fp8: add "
            f"--job.custom_config_module titan_fp8.plugin --model.converters {LINEAR}"
        )
    if config.experimental.custom_import:  # as torchtitan's trainer does
        importlib.import_module(config.experimental.custom_import)
    for name in model.converters:
        if name not in _registry_model_converter_cls:
            allowed = ", ".join(sorted(_registry_model_converter_cls))
            raise ValueError(f"model.converters lists {name!r}: allowed are {allowed}")
    try:
        spec = get_train_spec(model.name)
    except ValueError as error:
        allowed = ", ".join(sorted(map(repr, _supported_models)))
        raise ValueError(f"{error} Models of torchtitan are {allowed}") from None
    if model.flavor not in spec.model_args:
        raise refusal("model.flavor", model.flavor, ", ".join(map(repr, spec.model_args)))
    args: Any = copy.deepcopy(spec.model_args[model.flavor])
    try:
        args.update_from_config(config)
    except (AssertionError, NotImplementedError) as error:
        raise ValueError(f"torchtitan refuses this plan: {error}") from None
    return args


def _check_sizes(config: Any, dims: ParallelDims, args: Any) -> None:
    """ValueError for what torchtitan finds out only when it trains: sizes that do not divide."""
    training, size = config.training, config.parallelism.pipeline_parallel_microbatch_size
    for key in ("local_batch_size", "seq_len"):
        if getattr(training, key) < 1:
            raise refusal(f"training.{key}", getattr(training, key), "positive numbers")
    batch, whole = training.local_batch_size, training.global_batch_size
    step = batch * dims.dp_replicate * dims.dp_shard
    if whole > 0 and whole % step:
        allowed = f"multiples of {step}, training.local_batch_size times data-parallel ranks"
        raise refusal("training.global_batch_size", whole, allowed)
    ranks = dims.dp_shard * dims.cp * dims.tp // dims.etp
    experts = getattr(getattr(args, "moe_args", None), "num_experts", 0)
    divided = [
        ("tensor_parallel_degree", dims.tp, "n_heads", getattr(args, "n_heads", 0)),
        ("tensor_parallel_degree", dims.tp, "n_kv_heads", getattr(args, "n_kv_heads", 0)),
        ("expert_parallel_degree", dims.ep, "experts", experts),
        ("expert_parallel_degree", dims.ep, "ranks of FSDP, CP and TP", ranks),
    ]
    if dims.pp_enabled:
        divided += [("pipeline_parallel_microbatch_size", size, "local_batch_size", batch)]
    for key, size, what, count in divided:
        if size < 1 or (count and count % size):
            raise refusal(f"parallelism.{key}", size, f"divisors of {what} = {count}")
    if dims.pp_enabled and get_train_spec(config.model.name).pipelining_fn is None:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree = {dims.pp}: allowed is 1, since torchtitan has "
            f"no pipeline for model.name = {config.model.name!r}"
        )


def _convert(config: Any, model: nn.Module) -> dict[str, tuple[str, str]]:
    """Converts as the converters do: name of a module -> recipe, and why it is not converted."""
    linear, grouped = config.quantize.linear.titan_fp8, config.quantize.grouped_mm.titan_fp8
    reports = []
    if LINEAR in config.model.converters:
        with errors_prefixed(f"[{LINEAR}]"):
            options = {"recipe": linear.recipe, "filter_fqns": linear.filter_fqns}
            reports.append(convert_linears(model, **options))
        fuse_feed_forwards(model)
    if GROUPED_MM in config.model.converters:
        with errors_prefixed(f"[{GROUPED_MM}]"):
            options = {"recipe": experts_recipe(config.quantize), "fqns": grouped.fqns}
            reports.append(convert_experts(model, **options))
    converted = {name: (recipe, "") for report in reports for name, _, recipe in report.converted}
    return converted | {name: (BF16, why) for report in reports for name, _, why in report.left}


@contextlib.contextmanager
def _parallelized(
    config: Any, dims: ParallelDims, args: Any, model: nn.Module
) -> Iterator[list[nn.Module]]:
    """Rank 0's parts of `model` under torchtitan's own plan, in process groups without traffic."""
    plain, spec = copy.deepcopy(config), get_train_spec(config.model.name)
    plain.compile.enable = False  # It changes no shape.
    if plain.activation_checkpoint.mode == "memory_budget":  # needs the compiler
        plain.activation_checkpoint.mode = "none"
    schedule, parts = config.parallelism.pipeline_parallel_schedule, [model]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dims.world_size)
    try:
        # The same shapes, whether this machine has GPUs or not.
        with mock.patch.object(parallel_dims, "device_type", "cpu"):
            if dims.pp_enabled:
                arguments = dims, plain, torch.device("cpu"), args, spec.parallelize_fn
                _, parts, *_ = spec.pipelining_fn(model, *arguments, nn.MSELoss())
                if issubclass(get_schedule_class(schedule), PipelineScheduleSingle) and parts[1:]:
                    raise ValueError(f"it would run only the first of {len(parts)} stages")
            else:
                spec.parallelize_fn(model, dims, plain)
        yield parts
    except Exception as error:
        key = "parallelism.pipeline_parallel"
        pipeline = f" {key}_degree = {dims.pp}, {key}_schedule = {schedule!r}:" * dims.pp_enabled
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"torchtitan refuses this plan:{pipeline} {reason}") from error
    finally:
        dist.destroy_process_group()


def _gathered(parameter: torch.Tensor) -> tuple[torch.Size, int, bool]:
    """A rank's part of a parameter once FSDP2 has gathered it, FSDP2's ranks, and if it has any."""
    if not isinstance(parameter, DTensor):
        return parameter.shape, 1, False
    sizes, ranks, mesh = list(parameter.shape), 1, parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    for name, size, placement in zip(names, mesh.shape, parameter.placements, strict=True):
        if name in FSDP:
            ranks *= size
        elif placement.is_shard():
            dim = placement.dim  # type: ignore[attr-defined]
            sizes[dim] = -(-sizes[dim] // size)
    return torch.Size(sizes), ranks, not {*FSDP}.isdisjoint(names)


def _attention_flop(args: Any, seq: int, dims: ParallelDims) -> float:
    """Of one sequence and block, forward and backward."""
    if getattr(args, "attn_type", "sdpa") != "sdpa":
        return 0.0
    width = 2 * (getattr(args, "head_dim", None) or args.dim // args.n_heads)
    if hasattr(args, "qk_nope_head_dim"):
        width = args.qk_nope_head_dim + args.qk_rope_head_dim + args.v_head_dim
    # Forward has 2 s^2 per feature, of which a causal mask leaves half; backward has twice that.
    return 3.0 * seq**2 * args.n_heads * width / (dims.cp * dims.tp)
