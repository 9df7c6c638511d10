"""What a rank computes: torchtitan's own parallelization, applied to a model without storage.

torchtitan's `parallelize_fn` runs on the meta device with a fake process group (`FakeStore`), so
the local shapes follow torchtitan's own rules, for every model that it has. A second copy of the
model is converted, to find out which modules are converted and why the others are not.
"""

import contextlib
import copy
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.models import _supported_models
from torchtitan.protocols.model_converter import _registry_model_converter_cls
from torchtitan.protocols.train_spec import get_train_spec

from titan_fp8.checks import ConversionReport, permutation_of, why_no_fp8_gemm
from titan_fp8.feed_forward import FP8FeedForward
from titan_fp8.linear import convert_linears
from titan_fp8.plan.batches import Batches, check_divisible, read_batches
from titan_fp8.plan.checkpointing import block_of, repeated_shares, with_repeats
from titan_fp8.plan.run import Layer, Run, sharing_inputs
from titan_fp8.recipe import BF16, get_recipe
from titan_fp8.torchtitan_0_2.config import GROUPED_MM, LINEAR, experts_recipe
from titan_fp8.torchtitan_0_2.experts import convert_experts
from titan_fp8.torchtitan_0_2.feed_forward import fuse_feed_forwards

DATA_PARALLEL = ("dp_replicate", "fsdp", "efsdp")
"""Mesh dimensions along which every rank uses the whole weight, copied or gathered by FSDP2."""


def parallel_dims(config: Any, ngpu: int | None) -> ParallelDims:
    """The degrees of parallelism of the config.

    Raises:
        ValueError: they do not fit each other or `ngpu`; or `ngpu` is needed and None.
    """
    p = config.parallelism
    degrees = {
        "dp_replicate": p.data_parallel_replicate_degree,
        "dp_shard": p.data_parallel_shard_degree,
        "cp": p.context_parallel_degree,
        "tp": p.tensor_parallel_degree,
        "pp": p.pipeline_parallel_degree,
    }
    world = ngpu
    if world is None:
        if degrees["dp_shard"] == -1:
            raise ValueError(
                "parallelism.data_parallel_shard_degree = -1 means all remaining ranks: say by "
                "--ngpu how many GPUs the job has"
            )
        world = 1
        for degree in degrees.values():
            world *= degree
    try:
        return ParallelDims(
            **degrees,
            ep=p.expert_parallel_degree,
            etp=p.expert_tensor_parallel_degree,
            world_size=world,
        )
    except AssertionError as error:
        raise ValueError(f"[parallelism] and {world} GPUs: {error}") from None


def read_run(config: Any, dims: ParallelDims) -> Run:
    """The run of a config that torchtitan's ConfigManager has parsed.

    Raises:
        ValueError: a value is not allowed, torchtitan refuses the plan, or no converter of ours is
            listed.
    """
    args, batches, converted, parallel = _models(config, dims)
    conversions = _convert(config, converted)
    with _parallelized(config, dims, parallel):
        parameters = _parameters(parallel)
        shapes = list(_shapes(parallel, args.dim))
    blocks = [block for _, block in converted.layers.named_children()]
    moe_blocks = sum(getattr(block, "moe_enabled", False) for block in blocks)
    training = config.training
    tokens = batches.sequences * training.seq_len // dims.cp
    rows = _rows(args, tokens, dims) if moe_blocks else 0
    layers = []
    for name, shape, ranks in shapes:
        conversion = conversions.get(name, (BF16, "its converter is not listed"))
        m = rows if len(shape) == 3 else tokens
        layers.append(_layer(config, dims, converted, name, shape, ranks, m, conversion))
    compiled = config.compile.enable and "model" in config.compile.components
    attention, rest = repeated_shares(config.activation_checkpoint)
    return Run(
        description=_describe(config, dims),
        layers=_folded(with_repeats(layers, config.activation_checkpoint, compiled)),
        dims=dims,
        blocks=len(blocks),
        moe_blocks=moe_blocks,
        dim=args.dim,
        tokens=tokens,
        rows=rows,
        attention_flop=_attention_flop(
            args, len(blocks), batches.sequences, training.seq_len, dims
        ),
        batches=batches,
        parameters=parameters,
        dtype=training.dtype,
        mixed_precision_param=training.mixed_precision_param,
        reduce_bytes=TORCH_DTYPE_MAP[training.mixed_precision_reduce].itemsize,
        compiled=compiled,
        repeated_attention=attention,
        repeated_rest=rest,
        reshards=_reshards(config, dims),
        permutation=_permutation(config),
        log_freq=max(config.metrics.log_freq, 1),
        filter_fqns=tuple(config.quantize.linear.titan_fp8.filter_fqns),
    )


def _models(config: Any, dims: ParallelDims) -> tuple[Any, Batches, Any, Any]:
    """Args of torchtitan's model, batches, and two meta models: to convert, and to parallelize.

    Raises:
        ValueError: the config has no converter of ours or a value that is not allowed.
    """
    if LINEAR not in config.model.converters and GROUPED_MM not in config.model.converters:
        raise ValueError(
            f"model.converters = {config.model.converters} lists no converter of titan_fp8: add "
            f"--job.custom_config_module titan_fp8.plugin --model.converters {LINEAR}"
        )
    if config.experimental.custom_import:  # as torchtitan's trainer does
        importlib.import_module(config.experimental.custom_import)
    for name in config.model.converters:
        if name not in _registry_model_converter_cls:
            allowed = ", ".join(sorted(_registry_model_converter_cls))
            raise ValueError(f"model.converters lists {name!r}: allowed are {allowed}")
    args = _model_args(config)
    batches = read_batches(config, dims, args)
    check_divisible(args, dims)
    model_cls: Any = get_train_spec(config.model.name).model_cls
    with torch.device("meta"):
        models = model_cls(args), model_cls(args)
    if not hasattr(models[0], "layers"):
        raise ValueError(
            f"model.name = {config.model.name!r}: the plan reads only models of transformer blocks"
        )
    return args, batches, *models


def _rows(args: Any, tokens: int, dims: ParallelDims) -> int:
    """`Run.rows` of a model with experts."""
    top_k = getattr(getattr(args, "moe_args", None), "top_k", 0)
    return tokens * top_k // (dims.tp if dims.ep_enabled and dims.etp == 1 else 1)


def _parameters(parallel: nn.Module) -> dict[int, int]:
    """`Run.parameters` of a parallelized model."""
    parameters: dict[int, int] = defaultdict(int)
    for parameter in parallel.parameters():
        gathered, ranks = _gathered_shape(parameter)
        parameters[ranks] += gathered.numel()
    return dict(parameters)


def _layer(
    config: Any,
    dims: ParallelDims,
    converted: nn.Module,
    name: str,
    shape: torch.Size,
    ranks: int,
    m: int,
    conversion: tuple[str, str],
) -> Layer:
    """A linear (n, k) or experts (E, n, k), as they are on a rank.

    Args:
        converted: the model that tells which feed-forwards are fused.
        name, shape, ranks: from `_shapes`.
        m: `Layer.m`.
        conversion: from `_convert`.
    """
    recipe, reason = conversion
    is_experts = len(shape) == 3
    section = config.quantize.grouped_mm if is_experts else config.quantize.linear
    return Layer(
        name=re.sub(r"\.\d+\.", ".*.", name),
        fqns=(name,),
        groups=shape[0] if is_experts else 0,
        m=m,
        n=shape[-2],
        k=shape[-1],
        recipe=recipe,
        reason=reason,
        fits=why_no_fp8_gemm(shape[-2], shape[-1]) is None,
        share=1.0,
        fused=_is_fused(converted, name, recipe, is_experts, dims),
        in_moe=_in_moe_block(converted, name),
        repeats=0.0,
        ranks=ranks,
        gathers_fp8=section.titan_fp8.fsdp_all_gather and recipe != BF16 and ranks > 1,
    )


def _permutation(config: Any) -> str:
    if GROUPED_MM not in config.model.converters:
        return "host"
    permutation = config.quantize.grouped_mm.titan_fp8.permutation
    return permutation_of(permutation, experts_recipe(config.quantize))


def _shapes(model: nn.Module, dim: int) -> Iterator[tuple[str, torch.Size, int]]:
    """Name, shape and FSDP2's ranks of every linear (n, k) and every group of experts (E, n, k)."""
    for name, module in model.named_modules():
        stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3]
        if stacked:
            parts, (ranks, *_) = zip(*map(_gathered_shape, stacked))
            # w1 and w3 may be one parameter; the three matrices have hidden x dim elements each.
            groups = parts[0][0]
            hidden = sum(part.numel() for part in parts) // (3 * groups * dim)
            yield name, torch.Size((groups, hidden, dim)), ranks
        elif isinstance(module, nn.Linear):
            yield name, *_gathered_shape(module.weight)


def _model_args(config: Any) -> Any:
    try:
        spec = get_train_spec(config.model.name)
    except ValueError as error:
        allowed = ", ".join(sorted(map(repr, _supported_models)))
        raise ValueError(f"{error} Models of torchtitan are {allowed}") from None
    if config.model.flavor not in spec.model_args:
        allowed = ", ".join(map(repr, spec.model_args))
        raise ValueError(f"model.flavor = {config.model.flavor!r}: allowed are {allowed}")
    args: Any = copy.deepcopy(spec.model_args[config.model.flavor])
    try:
        args.update_from_config(config)
    except (AssertionError, NotImplementedError) as error:
        raise ValueError(f"torchtitan refuses this plan: {error}") from None
    return args


def _convert(config: Any, model: nn.Module) -> dict[str, tuple[str, str]]:
    """Converts as the converters do: name of a module -> recipe, and why it is not converted."""
    report = ConversionReport()
    linear, grouped = config.quantize.linear.titan_fp8, config.quantize.grouped_mm.titan_fp8
    if LINEAR in config.model.converters:
        done = convert_linears(model, recipe=linear.recipe, filter_fqns=linear.filter_fqns)
        report.converted += done.converted
        report.left += done.left
        fuse_feed_forwards(model)
    if GROUPED_MM in config.model.converters:
        recipe = experts_recipe(config.quantize)
        done = convert_experts(model, recipe=recipe, fqns=grouped.fqns)
        report.converted += done.converted
        report.left += done.left
    return {name: (recipe, "") for name, _, recipe in report.converted} | {
        name: (BF16, reason) for name, _, reason in report.left
    }


@contextlib.contextmanager
def _parallelized(config: Any, dims: ParallelDims, model: nn.Module) -> Iterator[None]:
    """Parallelizes `model` by torchtitan's own rules, on process groups that do not communicate."""
    plain = copy.deepcopy(config)
    # Both wrap modules, and neither changes a shape.
    plain.activation_checkpoint.mode, plain.compile.enable = "none", False
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dims.world_size)
    try:
        parallelize = get_train_spec(config.model.name).parallelize_fn
        parallelize(model, dims, plain)
        yield
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"torchtitan refuses this plan: {' '.join(str(error).split())}") from error
    finally:
        dist.destroy_process_group()


def _gathered_shape(parameter: Tensor) -> tuple[torch.Size, int]:
    """The shape of a rank's part of a parameter that FSDP2 has gathered, and FSDP2's ranks."""
    if not isinstance(parameter, DTensor):
        return parameter.shape, 1
    sizes, ranks = list(parameter.shape), 1
    mesh = parameter.device_mesh
    for name, size, placement in zip(
        mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True
    ):
        if name in DATA_PARALLEL:
            ranks *= size if name != "dp_replicate" else 1
        elif placement.is_shard():
            dim = placement.dim  # type: ignore[attr-defined]
            sizes[dim] = -(-sizes[dim] // size)
    return torch.Size(sizes), ranks


def _is_fused(
    model: nn.Module, name: str, recipe: str, is_experts: bool, dims: ParallelDims
) -> bool:
    if recipe == BF16:
        return False
    if is_experts:
        return get_recipe(recipe).feed_forward is not None
    parent = model.get_submodule(name.rpartition(".")[0])
    return isinstance(parent, FP8FeedForward) and not dims.tp_enabled


def _in_moe_block(model: nn.Module, name: str) -> bool:
    block = block_of(name)
    return bool(block) and bool(getattr(model.get_submodule(block), "moe_enabled", False))


def _reshards(config: Any, dims: ParallelDims) -> bool:
    policy = config.parallelism.fsdp_reshard_after_forward
    return bool(policy == "always" or (policy == "default" and not dims.pp_enabled))


def _attention_flop(args: Any, blocks: int, batch: int, seq: int, dims: ParallelDims) -> float:
    heads = args.n_heads
    if hasattr(args, "qk_nope_head_dim"):
        width = args.qk_nope_head_dim + args.qk_rope_head_dim + args.v_head_dim
    else:
        width = 2 * (getattr(args, "head_dim", None) or args.dim // heads)
    # A causal mask leaves half of the 4 s^2 d FLOP.
    return batch * seq**2 * heads * width * blocks / (dims.cp * dims.tp)


def _folded(layers: list[Layer]) -> tuple[Layer, ...]:
    """Equal layers as one, in the order of the model."""
    equal: dict[Layer, list[str]] = {}
    for layer in layers:
        equal.setdefault(replace(layer, fqns=()), []).append(layer.fqns[0])
    return sharing_inputs(replace(layer, fqns=tuple(fqns)) for layer, fqns in equal.items())


def _describe(config: Any, dims: ParallelDims) -> str:
    replicated = "HSDP" if dims.dp_shard * dims.cp > 1 else "DDP"
    degrees = {
        replicated: dims.dp_replicate,
        "FSDP": dims.dp_shard,
        "CP": dims.cp,
        "TP": dims.tp,
        "PP": dims.pp,
        "EP": dims.ep,
    }
    plan = ", ".join(f"{name} {size}" for name, size in degrees.items() if size > 1)
    gpus = f"{dims.world_size} GPU{'s' * (dims.world_size > 1)}"
    return f"{config.model.name} {config.model.flavor}, {gpus}" + (f" ({plan})" if plan else "")
