"""The linears, feed-forwards and experts of a rank: torchtitan's own plan, applied to a meta model.

torchtitan's functions for parallelism run on a fake process group, so local shapes are those of a
job. Of two further models one is converted, which tells what is converted and why the rest is not.
"""

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
from torch import Tensor, nn
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

SHARED_INPUTS = (("wq", "wk", "wv", "wkv_a", "wq_a"), ("w1", "w3"))
"""Linears of one module that read one input. In FP8 they quantize it once."""
MAX_GPUS = 1 << 14
UNLISTED = (BF16, "its converter is not listed")


@dataclass(frozen=True)
class Layer:
    """What a rank calls with one input, `count` times per micro-batch."""

    name: str  # with * for the index of the block
    modules: tuple[str, ...]  # those of the first block
    groups: int  # local experts, or 0
    m: int  # tokens, of all local experts together
    k: int  # input features
    products: tuple[tuple[int, int], ...]  # (n, k) of each, as tensor parallelism shards them
    shape: str  # m, n + n, k, or the hidden dimension in place of n; before it the experts
    recipe: str  # "bf16" if it is not converted
    reason: str  # why not
    refused: str  # why training would stop at it, or ""
    gathers_fp8: bool  # whether FSDP2's all-gather brings its weights in FP8
    count: int = 1

    @property
    def flop(self) -> float:
        """Of all of them, forward and backward."""
        return 6.0 * self.count * self.m * sum(n * k for n, k in self.products)


@dataclass(frozen=True)
class Rank:
    """What one rank computes in a micro-batch; in a pipeline, rank 0."""

    config: Any
    dims: ParallelDims
    layers: list[Layer]
    plain: nn.Module  # the whole model on the meta device, before
    converted: nn.Module  # and after conversion
    shapes: dict[str, torch.Size]  # of the rank's parameters, once FSDP2 has gathered them
    dtype: torch.dtype  # in which layers compute
    attention_flop: float  # forward and backward; 0 if its mask may leave more than causality out


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
    recipes, shapes = _convert(config, converted), _local_shapes(config, dims, args, parallel)
    microbatch = config.parallelism.pipeline_parallel_microbatch_size
    sequences = microbatch if dims.pp_enabled else training.local_batch_size
    tokens = sequences * training.seq_len // dims.cp
    rows = tokens * getattr(getattr(args, "moe_args", None), "top_k", 0)
    rows //= dims.tp if dims.ep_enabled and dims.etp == 1 else 1
    blocks = len({name.split(".")[1] for name in shapes if name.startswith("layers.")})
    attention_flop = 0.0
    if getattr(args, "attn_type", "sdpa") == "sdpa":
        width = 2 * (getattr(args, "head_dim", None) or args.dim // args.n_heads)
        if hasattr(args, "qk_nope_head_dim"):
            width = args.qk_nope_head_dim + args.qk_rope_head_dim + args.v_head_dim
        # Forward has 2 s^2 per feature, of which causality leaves half; backward has twice that.
        attention_flop = 3.0 * tokens * training.seq_len * blocks * args.n_heads * width / dims.tp
    mixed = dims.fsdp_enabled or not (dims.tp_enabled or dims.pp_enabled)
    dtype = TORCH_DTYPE_MAP[training.mixed_precision_param if mixed else training.dtype]
    rank = Rank(config, dims, [], plain, converted, shapes, dtype, attention_flop)
    equal: dict[Layer, list[Layer]] = {}
    for names in _units(rank, recipes):
        layer = _layer(rank, names, recipes, tokens, rows, args.dim)
        equal.setdefault(replace(layer, modules=()), []).append(layer)
    return replace(rank, layers=[replace(same[0], count=len(same)) for same in equal.values()])


def pattern(name: str) -> str:
    """The name with * for the index of the block."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _units(rank: Rank, recipes: dict[str, tuple[str, str]]) -> Iterator[tuple[str, ...]]:
    """Names of modules that the rank calls with one input."""
    owners, seen = {name.rpartition(".")[0] for name in rank.shapes}, set()
    for name, module in rank.converted.named_modules():
        linears = [f"{name}.{leaf}" for leaf in ("w1", "w2", "w3")]
        names = [name]
        # Under tensor parallelism the linears of a feed-forward run one by one.
        if isinstance(module, FP8FeedForward) and linears[0] in owners and not rank.dims.tp_enabled:
            seen.update(linears)
        elif name not in owners or name in seen:
            continue
        elif isinstance(module, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            readers = next((group for group in SHARED_INPUTS if leaf in group), (leaf,))
            if recipes.get(name, UNLISTED)[0] != BF16:
                both = (f"{parent}.{each}" for each in readers)
                names = [n for n in both if n in owners and recipes[n] == recipes[name]]
            seen.update(names)
        elif all(parameter.dim() < 3 for parameter in module.parameters(recurse=False)):
            continue
        yield tuple(names)


def _layer(
    rank: Rank, names: tuple[str, ...], recipes: dict[str, Any], tokens: int, rows: int, dim: int
) -> Layer:
    """The layer of these modules; `rows` are the tokens of experts."""
    dims, section, groups = rank.dims, rank.config.quantize.linear, 0
    own = {p: s for n in names for p, s in rank.shapes.items() if p.startswith(f"{n}.")}
    weights = {parameter: shape for parameter, shape in own.items() if len(shape) > 1}
    (first, *_), owner = weights.values(), next(iter(weights)).rpartition(".")[0]
    recipe, reason = recipes.get(owner, UNLISTED)
    ns, k, ranks = tuple(shape[0] for shape in weights.values()), first[-1], dims.dp_shard * dims.cp
    if len(first) == 3:
        # w1 and w3 may be one parameter; the three matrices have hidden x dim elements each.
        groups, elements = first[0], sum(shape.numel() for shape in own.values() if len(shape) == 3)
        ns, k, section = (elements // (3 * groups * dim),), dim, rank.config.quantize.grouped_mm
        ranks = ranks * dims.tp // (dims.ep * dims.etp) if dims.ep_enabled else ranks
    products = [(n, k) for n in ns]
    if groups or owner not in names:  # experts or a feed-forward: w1, w2 and w3
        ns, products = ns[:1], [(ns[0], k), (k, ns[0]), (ns[0], k)]
    odd = ", ".join(str(size) for size in sorted({*ns, k}) if not fits_fp8(size))
    m, lead = (rows, f"{groups}, ") if groups else (tokens, "")
    in_fp8 = recipe != BF16 and section.titan_fp8.fsdp_all_gather and dims.fsdp_enabled
    return Layer(
        name=" ".join((pattern(names[0]), *(name.rpartition(".")[2] for name in names[1:]))),
        modules=names,
        groups=groups,
        m=m,
        k=k,
        products=tuple(products),
        shape=f"{lead}{m}, {'+'.join(map(str, ns))}, {k}",
        recipe=recipe,
        reason=reason,
        refused=f"{odd} on a rank is not a multiple of 16" if odd and recipe != BF16 else "",
        # Of a rowwise weight that one rank has alone, FSDP2 gathers high precision.
        gathers_fp8=in_fp8 and (ranks > 1 or get_recipe(recipe).has_weight_blocks),
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
            raise refusal("model.converters lists", name, ", ".join(_registry_model_converter_cls))
    try:
        args: Any = copy.deepcopy(get_train_spec(model.name).model_args)
    except ValueError as error:
        raise ValueError(f"{error} Models of torchtitan are {sorted(_supported_models)}") from None
    if model.flavor not in args:
        raise refusal("model.flavor", model.flavor, ", ".join(map(repr, args)))
    try:
        args[model.flavor].update_from_config(config)
    except (AssertionError, NotImplementedError) as error:
        raise ValueError(f"torchtitan refuses this plan: {error}") from None
    return args[model.flavor]


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
    for key, degree, what, count in (
        ("tensor_parallel_degree", dims.tp, "n_heads", getattr(args, "n_heads", 0)),
        ("tensor_parallel_degree", dims.tp, "n_kv_heads", getattr(args, "n_kv_heads", 0)),
        ("expert_parallel_degree", dims.ep, "experts", experts),
        ("expert_parallel_degree", dims.ep, "ranks of FSDP, CP and TP", ranks),
        ("pipeline_parallel_microbatch_size", size, "local_batch_size", batch * dims.pp_enabled),
    ):
        if count and (degree < 1 or count % degree):
            raise refusal(f"parallelism.{key}", degree, f"divisors of {what} = {count}")
    if dims.pp_enabled and get_train_spec(config.model.name).pipelining_fn is None:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree = {dims.pp}: allowed is 1, since torchtitan has "
            f"no pipeline for model.name = {config.model.name!r}"
        )


def _convert(config: Any, model: nn.Module) -> dict[str, tuple[str, str]]:
    """Converts as the converters do: name of a module -> recipe, and why it is not converted."""
    linear, grouped = config.quantize.linear.titan_fp8, config.quantize.grouped_mm.titan_fp8
    linears = {"recipe": linear.recipe, "filter_fqns": linear.filter_fqns}
    experts = {"recipe": experts_recipe(config.quantize), "fqns": grouped.fqns}
    converters: Any = {LINEAR: (convert_linears, linears), GROUPED_MM: (convert_experts, experts)}
    found: dict[str, tuple[str, str]] = {}
    for name in (each for each in converters if each in config.model.converters):
        convert, options = converters[name]
        with errors_prefixed(f"[{name}]"):
            report = convert(model, **options)
        found |= {module: (recipe, "") for module, _, recipe in report.converted}
        found |= {module: (BF16, reason) for module, _, reason in report.left}
    fuse_feed_forwards(model)
    return found


def _local_shapes(
    config: Any, dims: ParallelDims, args: Any, model: nn.Module
) -> dict[str, torch.Size]:
    """Shapes of rank 0's parameters, gathered by FSDP2, under torchtitan's own plan."""
    config, spec, parts = copy.deepcopy(config), get_train_spec(config.model.name), [model]
    config.compile.enable = False  # It changes no shape.
    if config.activation_checkpoint.mode == "memory_budget":  # needs the compiler
        config.activation_checkpoint.mode = "none"
    schedule = config.parallelism.pipeline_parallel_schedule
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dims.world_size)
    try:
        # The same shapes, whether this machine has GPUs or not.
        with mock.patch.object(parallel_dims, "device_type", "cpu"):
            if dims.pp_enabled:
                arguments = dims, config, torch.device("cpu"), args, spec.parallelize_fn
                _, parts, *_ = spec.pipelining_fn(model, *arguments, nn.MSELoss())
                if issubclass(get_schedule_class(schedule), PipelineScheduleSingle) and parts[1:]:
                    raise ValueError(f"it would run only the first of {len(parts)} stages")
            else:
                spec.parallelize_fn(model, dims, config)
        named = [p for part in parts for p in part.named_parameters(remove_duplicate=False)]
        return {n.replace("_checkpoint_wrapped_module.", ""): _gathered(p) for n, p in named}
    except Exception as error:
        key = "parallelism.pipeline_parallel"
        pipeline = f" {key}_degree = {dims.pp}, {key}_schedule = {schedule!r}:" * dims.pp_enabled
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"torchtitan refuses this plan:{pipeline} {reason}") from error
    finally:
        dist.destroy_process_group()


def _gathered(parameter: Tensor) -> torch.Size:
    """The shape of a rank's part of a parameter, once FSDP2 has gathered it."""
    if not isinstance(parameter, DTensor):
        return parameter.shape
    sizes, mesh = list(parameter.shape), parameter.device_mesh
    for name, size, placement in zip(
        mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True
    ):
        if name not in ("fsdp", "efsdp") and placement.is_shard():
            dim = placement.dim  # type: ignore[attr-defined]
            sizes[dim] = -(-sizes[dim] // size)
    return torch.Size(sizes)
