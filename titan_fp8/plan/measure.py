"""Times the layers of a rank as a model calls them: forward and backward, the CPU's time included.

A layer is a copy of the job's own module, with weights in the shape of the rank, called eagerly in
a loop. bf16 and FP8 take turns, and so do sets of weights and inputs that exceed the L2 cache.
Weights that FSDP2 gathers in FP8 arrive as `GatheredWeight`s; others are quantized in each call.
Not part of it are collectives, the quantization of shards once a step, DTensors of tensor
parallelism, and what torch.compile fuses: the SwiGLU of bf16, and in FP8 the quantizers of linears
that read one input.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.models.moe import utils as moe_utils

from titan_fp8.conversion import revert
from titan_fp8.gathered_weight import GatheredWeight
from titan_fp8.plan.model import Layer, Rank
from titan_fp8.recipe import BF16, get_recipe

Step = Callable[[], object]
Clock = Callable[[list[list[Step]]], list[float]]
BYTES, MOST_SETS = 192 << 20, 32
"""Sets of weights and inputs are as many as exceed three L2 caches of a Hopper GPU."""
ROUNDS, ROUND_S, MOST_S = 5, 0.05, 4.0
"""Of each arm; the seconds of one, and those after which a layer gets no more."""


@dataclass(frozen=True)
class Timed:
    """us of one call of a layer; nan if it does not fit into the GPU's memory."""

    layer: Layer
    groups: str  # of experts: "even", or "uneven", the last with four times the first's tokens
    bf16: float
    fp8: float | None  # None if it is not converted


def call_us(arms: list[list[Step]]) -> list[float]:
    """Median time of one call of each arm in us; an arm has equal calls on different inputs."""

    def seconds(steps: list[Step]) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for step in steps:
            step()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    for arm in arms:
        seconds(arm)  # compiles kernels
    loops = [arm * math.ceil(ROUND_S / seconds(arm)) for arm in arms]
    rounds: list[list[float]] = []
    end = time.perf_counter() + MOST_S
    while not rounds or (len(rounds) < ROUNDS and time.perf_counter() < end):
        rounds.append([seconds(loop) / len(loop) * 1e6 for loop in loops])
    return [statistics.median(times) for times in zip(*rounds)]


def measure(
    rank: Rank, device: str = "cuda", clock: Clock = call_us, progress: Callable = iter
) -> list[Timed]:
    """The time of each layer; `progress` wraps the list of them."""
    ways = {True: ("even", "uneven"), False: ("",)}
    cases = [(layer, way) for layer in rank.layers for way in ways[layer.groups > 1]]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        return [_timed(rank, layer, groups, device, clock) for layer, groups in progress(cases)]
    finally:
        dist.destroy_process_group()


def _timed(rank: Rank, layer: Layer, groups: str, device: str, clock: Clock) -> Timed:
    (n, k), runs_fp8 = layer.products[0], layer.recipe != BF16 and not layer.refused
    size = 2 * (layer.m * k + max(layer.groups, 1) * n * k * len(layer.products))
    for sets in (min(MOST_SETS, max(2, -(-BYTES // size))), 1):
        arms: list[list[Step]] = []
        try:
            for in_fp8 in (False, True)[: 1 + runs_fp8]:
                arms.append([_step(rank, layer, groups, device, in_fp8) for _ in range(sets)])
            times = clock(arms)
            return Timed(layer, groups, times[0], times[1] if runs_fp8 else None)
        except torch.OutOfMemoryError:
            pass
    return Timed(layer, groups, math.nan, math.nan if runs_fp8 else None)


def _step(rank: Rank, layer: Layer, groups: str, device: str, in_fp8: bool) -> Step:
    """One call of the layer with weights and an input of its own."""
    module = _module(rank, layer, device, in_fp8)
    arguments: tuple[Tensor, ...] = ()
    shape: tuple[int, ...] = (1, layer.m, layer.products[0][1])
    unit = get_recipe(layer.recipe).alignment if in_fp8 else 8  # torchtitan's own
    if layer.groups:
        tokens = tokens_of_experts(layer, groups, unit if rank.dims.ep_enabled else 1)
        arguments, shape = (torch.tensor(tokens, device=device),), (sum(tokens), shape[-1])
    x = torch.randn(shape, device=device, dtype=rank.dtype, requires_grad=True)
    inputs = (x, *module.parameters())

    def forward() -> Tensor:
        moe_utils.set_token_group_alignment_size_m(unit)  # as a converter does, for FP8 only
        with torch.autocast(device, rank.autocast, enabled=rank.autocast is not None):
            return module(x, *arguments)

    with torch.no_grad():
        gradient = torch.randn_like(forward())
    return lambda: torch.autograd.grad(forward(), inputs, gradient)


def tokens_of_experts(layer: Layer, groups: str, unit: int) -> list[int]:
    """Tokens of each expert of the rank, padded to multiples of `unit`."""
    spread, each = 0.6 * (groups == "uneven"), layer.m / layer.groups / unit
    middle = (layer.groups - 1) / 2
    shares = (1 + spread * (e / middle - 1) for e in range(layer.groups)) if middle else [1.0]
    return [math.ceil(share * each) * unit for share in shares]


def _module(rank: Rank, layer: Layer, device: str, in_fp8: bool) -> nn.Module:
    """A copy of the first module of the layer, with random weights in the shape of the rank."""
    name = layer.modules[0]
    module = copy.deepcopy(rank.model.get_submodule(name))
    if not in_fp8:
        revert(module)
    for path, _ in list(module.named_parameters()):
        shape = rank.shapes[f"{name}.{path}"]
        weight = torch.randn(shape, device=device, dtype=rank.dtype) / math.sqrt(shape[-1])
        if in_fp8 and layer.gathers_fp8 and weight.dim() > 1:
            weight = gathered(weight, layer.recipe)
        if layer.groups and rank.dims.ep_enabled:
            # Experts ask their mesh whether expert parallelism has padded their groups.
            mesh = DeviceMesh(device, [0], mesh_dim_names=("ep",))
            weight = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False)
        owner, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(weight))
    return module


def gathered(weight: Tensor, recipe: str) -> GatheredWeight:
    """A weight as FSDP2 gathers it in FP8."""
    ops = get_recipe(recipe)
    (q, s), (q_t, s_t) = ops.quantize_weight(weight), ops.quantize_weight_t(weight)
    columns = None if ops.has_weight_blocks else q_t.mT.contiguous()
    return GatheredWeight(q, s, columns, s_t, weight.dtype)
