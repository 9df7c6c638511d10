"""The linears, feed-forwards and experts of a rank, on a model without storage.

The job's own converters convert the model, and say what they leave and why. A copy, turned back, is
parallelized by torchtitan on a fake process group: that gives the shapes that a rank has.
"""

import contextlib
import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models import _supported_models
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools import utils

from titan_fp8.checks import fits_fp8
from titan_fp8.conversion import revert
from titan_fp8.feed_forward import FP8FeedForward
from titan_fp8.recipe import BF16, get_recipe
from titan_fp8.sharded_weight import marks
from titan_fp8.torchtitan_0_2.config import GROUPED_MM, LINEAR, check_sizes
from titan_fp8.torchtitan_0_2.experts import is_grouped_experts

DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")
MAX_GPUS = 1 << 14


@dataclass(frozen=True)
class Layer:
    """Modules of one local shape. A micro-batch calls each once."""

    modules: tuple[str, ...]
    m: int  # tokens, of all local experts together
    groups: int  # local experts, or 0
    products: tuple[tuple[int, int], ...]  # (n, k) of each GEMM of forward
    recipe: str  # "bf16" if it is not converted
    reason: str  # why not
    gathers_fp8: bool  # whether FSDP2's all-gather brings its weights in FP8

    @property
    def patterns(self) -> list[str]:
        """The names, without the number of the block."""
        return list(dict.fromkeys(re.sub(r"^layers\.\d+\.", "", name) for name in self.modules))

    @property
    def cells(self) -> list[str]:
        """Name, shape and count."""
        sizes = [self.groups] * (self.groups > 0) + [self.m, *self.products[0]]
        return [" ".join(self.patterns), ", ".join(map(str, sizes)), str(len(self.modules))]

    @property
    def refused(self) -> str:
        """The sizes at which training would stop."""
        odd = {size for product in self.products for size in product if not fits_fp8(size)}
        return ", ".join(map(str, sorted(odd))) if self.recipe != BF16 else ""

    @property
    def flop(self) -> float:
        """Of all of them, forward and backward."""
        return 6.0 * len(self.modules) * self.m * sum(n * k for n, k in self.products)


@dataclass(frozen=True)
class Rank:
    """What one rank computes in a micro-batch; in a pipeline, rank 0."""

    config: Any
    dims: ParallelDims
    layers: tuple[Layer, ...]
    model: nn.Module  # the whole, converted model on the meta device
    shapes: dict[str, torch.Size]  # of the rank's parameters, once FSDP2 has gathered them
    dtype: torch.dtype  # of the weights that layers read
    autocast: torch.dtype | None
    attention_flop: float  # forward and backward; 0 if its mask may leave more than causality out


def refusal(key: str, value: object, allowed: object) -> ValueError:
    return ValueError(f"{key} = {value!r}: allowed are {allowed}")


def degrees_of(config: Any, ngpu: int | None) -> ParallelDims:
    """ValueError if the degrees of parallelism do not fit each other or `ngpu`."""
    kinds = "data_parallel_replicate data_parallel_shard context_parallel tensor_parallel "
    kinds += "pipeline_parallel expert_parallel expert_tensor_parallel"
    degrees = [getattr(config.parallelism, f"{kind}_degree") for kind in kinds.split()]
    if ngpu is None and degrees[1] == -1:
        key = "parallelism.data_parallel_shard_degree = -1"
        raise ValueError(f"{key}: all remaining ranks; say by --ngpu how many GPUs the job has")
    world = math.prod(degrees[:5]) if ngpu is None else ngpu
    if not 0 < world <= MAX_GPUS:
        what = "--ngpu" if ngpu is not None else "the product of the degrees in [parallelism]"
        raise refusal(what, world, f"1 to {MAX_GPUS} GPUs")
    try:
        return ParallelDims(*degrees, world_size=world)
    except (AssertionError, ArithmeticError) as error:
        raise ValueError(f"[parallelism] and {world} GPUs: {error}") from None


def read_rank(config: Any, dims: ParallelDims) -> Rank:
    """What a rank computes, of a config that torchtitan's ConfigManager has parsed.

    Raises:
        ValueError: a value is not allowed, or torchtitan or a converter refuses the plan.
    """
    config, listed = copy.deepcopy(config), {LINEAR, GROUPED_MM} & {*config.model.converters}
    if not listed or not hasattr(config.quantize.linear, "titan_fp8"):
        raise ValueError(
            f"model.converters = {config.model.converters} lists no converter of titan_fp8: add "
            f"--job.custom_config_module titan_fp8.plugin --model.converters {LINEAR}"
        )
    # These change no shape, and the last two need the compiler.
    config.compile.enable = config.parallelism.enable_async_tensor_parallel = False
    if config.activation_checkpoint.mode == "memory_budget":
        config.activation_checkpoint.mode = "none"
    try:
        spec = get_train_spec(config.model.name)
    except ValueError as error:
        raise ValueError(f"{error} Models of torchtitan are {sorted(_supported_models)}") from None
    if config.model.flavor not in spec.model_args:
        allowed = ", ".join(map(repr, spec.model_args))
        raise refusal("model.flavor", config.model.flavor, allowed)
    args: Any = copy.deepcopy(spec.model_args[config.model.flavor])
    with _torchtitans_errors(config, dims):
        args.update_from_config(config)
    check_sizes(config, dims)  # as converters do, but some models cannot be made of bad sizes
    with torch.device("meta"):
        model: Any = spec.model_cls(args)
    if not hasattr(model, "layers"):
        raise refusal("model.name", config.model.name, "models of transformer blocks")
    with mock.patch.object(utils, "device_type", "cpu"):  # so it takes no memory of a GPU
        converters = build_model_converters(config, dims)
        converters.convert(model)
    reports = [each.report for each in converters.converters if hasattr(each, "report")]
    left = {name: reason for report in reports for name, _, reason in report.left}
    with _torchtitans_errors(config, dims):
        parts = _parallelized(config, dims, args, spec, model)
    named = [each for part in parts for each in part.named_parameters(remove_duplicate=False)]
    gathered = {n.replace("_checkpoint_wrapped_module.", ""): _gathered(p) for n, p in named}
    shapes = {name: shape for name, (shape, _) in gathered.items()}
    training, size = config.training, config.parallelism.pipeline_parallel_microbatch_size
    tokens = (size if dims.pp_enabled else training.local_batch_size) * training.seq_len // dims.cp
    attention = 0.0
    if getattr(args, "attn_type", "sdpa") == "sdpa":
        blocks = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
        width = 2 * (getattr(args, "head_dim", None) or args.dim // args.n_heads)
        if hasattr(args, "qk_nope_head_dim"):
            width = args.qk_nope_head_dim + args.qk_rope_head_dim + args.v_head_dim
        # Forward has 2 s^2 per feature, of which causality leaves half; backward has twice that.
        attention = 3.0 * tokens * training.seq_len * len(blocks) * args.n_heads * width / dims.tp
    layers = tuple(_layers(config, dims, args, model, tokens, left, gathered))
    uses_fsdp = any(isinstance(module, FSDPModule) for part in parts for module in part.modules())
    by_autocast = not (dims.fsdp_enabled or dims.tp_enabled or dims.pp_enabled)
    mixed, plain = (TORCH_DTYPE_MAP[t] for t in (training.mixed_precision_param, training.dtype))
    dtypes = mixed if uses_fsdp else plain, mixed if by_autocast else None
    return Rank(config, dims, layers, model, shapes, *dtypes, attention)


@contextlib.contextmanager
def _torchtitans_errors(config: Any, dims: ParallelDims) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        key, schedule = (
            "parallelism.pipeline_parallel",
            config.parallelism.pipeline_parallel_schedule,
        )
        pipeline = f" {key}_degree = {dims.pp}, {key}_schedule = {schedule!r}:" * dims.pp_enabled
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"torchtitan refuses this plan:{pipeline} {reason}") from error


def _parallelized(
    config: Any, dims: ParallelDims, args: Any, spec: Any, model: nn.Module
) -> list[nn.Module]:
    """Rank 0's parts of a copy of the model, before conversion, under torchtitan's own plan."""
    plain = copy.deepcopy(model)
    revert(plain)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dims.world_size)
    try:
        # The same shapes, whether this machine has GPUs or not.
        with mock.patch.object(parallel_dims, "device_type", "cpu"):
            if not dims.pp_enabled:
                return [spec.parallelize_fn(plain, dims, config)]
            arguments = dims, config, torch.device("cpu"), args, spec.parallelize_fn
            _, parts, *_ = spec.pipelining_fn(plain, *arguments, nn.MSELoss())
        schedule = get_schedule_class(config.parallelism.pipeline_parallel_schedule)
        if issubclass(schedule, PipelineScheduleSingle) and parts[1:]:
            raise ValueError(f"it would run only the first of {len(parts)} stages")
        return parts
    finally:
        dist.destroy_process_group()


def _gathered(parameter: torch.Tensor) -> tuple[torch.Size, int]:
    """The shape of a rank's part once FSDP2 has gathered it, and by how many ranks; 0: by none."""
    if not isinstance(parameter, DTensor):
        return parameter.shape, 0
    sizes, mesh, ranks = list(parameter.shape), parameter.device_mesh, 0
    names = mesh.mesh_dim_names or ()
    for name, size, placement in zip(names, mesh.shape, parameter.placements, strict=True):
        if name in ("fsdp", "efsdp"):
            ranks = size
        elif placement.is_shard():
            dim = placement.dim  # type: ignore[attr-defined]
            sizes[dim] = -(-sizes[dim] // size)
    return torch.Size(sizes), ranks


def _layers(
    config: Any,
    dims: ParallelDims,
    args: Any,
    model: nn.Module,
    tokens: int,
    left: Any,
    params: Any,
) -> Iterator[Layer]:
    """Modules with weights that the rank calls, those of equal shapes together."""
    rows = tokens * getattr(getattr(args, "moe_args", None), "top_k", 0)
    rows //= dims.tp if dims.ep_enabled and dims.etp == 1 else 1
    equal: dict[Layer, list[str]] = {}
    fused: tuple[str, ...] = ()
    for name, module in model.named_modules():
        # Under tensor parallelism the linears of a feed-forward run one by one.
        is_fused = isinstance(module, FP8FeedForward) and not dims.tp_enabled
        is_linear, is_experts = isinstance(module, nn.Linear), is_grouped_experts(module)
        own = [p for n, p in params.items() if n.startswith(f"{name}.") and len(p[0]) > 1]
        if not (is_fused or is_linear or is_experts) or not own or name in fused:
            continue
        groups, products = 0, [(shape[0], shape[1]) for shape, _ in own]
        if is_experts:
            # w1 and w3 may be one parameter; the three matrices have hidden x dim elements each.
            stacked, k = [shape for shape, _ in own if len(shape) == 3], args.dim
            groups = stacked[0][0]
            n = sum(shape.numel() for shape in stacked) // (3 * groups * k)
            products = [(n, k), (k, n), (n, k)]
        if is_fused:
            fused += tuple(f"{name}.{leaf}" for leaf in ("w1", "w2", "w3"))
        first: Any = module.w1 if is_fused else module
        recipe, ranks = getattr(first, "recipe", BF16), own[0][1]
        # Of a rowwise weight that one rank has alone, FSDP2 gathers high precision.
        is_quantized = ranks > 1 or (ranks == 1 and get_recipe(recipe).has_weight_blocks)
        in_fp8 = bool(marks(first)) and not config.training.enable_cpu_offload and is_quantized
        reason = "" if recipe != BF16 else left.get(name, "its converter is not listed")
        m = rows if groups else tokens
        layer = Layer((), m, groups, tuple(products), recipe, reason, in_fp8)
        equal.setdefault(layer, []).append(name)
    for layer, names in equal.items():
        yield replace(layer, modules=tuple(names))
