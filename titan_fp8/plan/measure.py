"""Times the layers of a rank as a model calls them: forward and backward, the CPU's time included.

A layer is a copy of the job's own module, with weights in the shape of the rank, called eagerly in
a loop. bf16 and FP8 take turns, and so do sets of weights and inputs that exceed the L2 cache. In
FP8, linears that read one input quantize it each for itself; compiled code does it once. Weights
that FSDP2 gathers in FP8 arrive as `GatheredWeight`s; others are quantized in each call. Not part
of it are collectives, the quantization of shards once a step, DTensors of tensor parallelism, and
what torch.compile fuses in the SwiGLU of bf16.
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

from titan_fp8.gathered_weight import GatheredWeight
from titan_fp8.plan.model import Layer, Rank
from titan_fp8.recipe import BF16, get_recipe

Step = Callable[[], object]
Clock = Callable[[list[list[Step]]], list[float]]
BYTES, MOST_SETS = 192 << 20, 32
"""Sets of weights and inputs are as many as exceed three L2 caches of a Hopper GPU."""
ROUNDS, ROUND_S = 5, 0.02


@dataclass(frozen=True)
class Timed:
    """us of one call of a layer."""

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
        seconds([*arm, *arm])
    loops = [arm * math.ceil(ROUND_S / seconds(arm)) for arm in arms]
    rounds = [[seconds(loop) / len(loop) * 1e6 for loop in loops] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds)]


def measure(
    rank: Rank, device: str = "cuda", clock: Clock = call_us, progress: Callable = iter
) -> list[Timed]:
    """The time of each layer; `progress` wraps the list of them.

    Raises:
        ValueError: a layer does not fit into the GPU's memory.
    """
    torch.autograd.set_multithreading_enabled(False)  # as in FP8 jobs
    ways = {True: ("even", "uneven"), False: ("",)}
    cases = [(layer, way) for layer in rank.layers for way in ways[layer.groups > 1]]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        return [_timed(rank, layer, groups, device, clock) for layer, groups in progress(cases)]
    finally:
        dist.destroy_process_group()


def _timed(rank: Rank, layer: Layer, groups: str, device: str, clock: Clock) -> Timed:
    size = 2 * (layer.m * layer.k + max(layer.groups, 1) * sum(n * k for n, k in layer.products))
    runs_fp8 = layer.recipe != BF16 and not layer.refused
    for sets in (min(MOST_SETS, max(2, -(-BYTES // size))), 1):
        try:
            kinds = (False, True)[: 1 + runs_fp8]
            arms = [[_step(rank, layer, groups, device, k) for _ in range(sets)] for k in kinds]
            times = clock(arms)
            return Timed(layer, groups, times[0], times[1] if runs_fp8 else None)
        except torch.OutOfMemoryError:
            arms = []
    raise ValueError(f"{layer.name} ({layer.shape}) does not fit into the memory of this GPU")


def _step(rank: Rank, layer: Layer, groups: str, device: str, in_fp8: bool) -> Step:
    """One call of the layer with weights and an input of its own."""
    modules = [_module(rank, layer, name, device, in_fp8) for name in layer.modules]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    arguments: tuple[Tensor, ...] = ()
    shape: tuple[int, ...] = (1, layer.m, layer.k)
    if layer.groups:
        tokens = tokens_of_experts(rank, layer, groups, in_fp8)
        arguments, shape = (torch.tensor(tokens, device=device),), (sum(tokens), layer.k)
    x = torch.randn(shape, device=device, dtype=rank.dtype, requires_grad=True)
    with torch.no_grad():
        gradients = [torch.randn_like(module(x, *arguments)) for module in modules]

    def step() -> tuple[Tensor, ...]:
        y = [module(x, *arguments) for module in modules]
        return torch.autograd.grad(y, (x, *parameters), gradients)

    return step


def tokens_of_experts(rank: Rank, layer: Layer, groups: str, in_fp8: bool) -> list[int]:
    """Tokens of each expert of the rank, padded as by expert parallelism."""
    unit = (get_recipe(layer.recipe).alignment if in_fp8 else 8) if rank.dims.ep_enabled else 1
    spread, each = 0.6 * (groups == "uneven"), layer.m / layer.groups / unit
    middle = (layer.groups - 1) / 2
    shares = (1 + spread * (e / middle - 1) for e in range(layer.groups)) if middle else [1.0]
    return [math.ceil(share * each) * unit for share in shares]


def _module(rank: Rank, layer: Layer, name: str, device: str, in_fp8: bool) -> nn.Module:
    """A copy of a module of the model, with random weights in the shape of the rank."""
    module = copy.deepcopy((rank.converted if in_fp8 else rank.plain).get_submodule(name))
    for path, _ in list(module.named_parameters()):
        shape = rank.shapes[f"{name}.{path}"]
        weight = torch.randn(shape, device=device, dtype=rank.dtype) / math.sqrt(shape[-1])
        if in_fp8 and layer.gathers_fp8 and weight.dim() > 1:
            weight = gathered(weight, layer.recipe)
        if layer.groups and rank.dims.ep_enabled:
            # Experts ask their mesh whether expert parallelism has padded their groups.
            mesh = DeviceMesh(device, [0], mesh_dim_names=("ep",))
            weight = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False)
            if in_fp8:
                moe_utils.set_token_group_alignment_size_m(get_recipe(layer.recipe).alignment)
        owner, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(weight))
    return module


def gathered(weight: Tensor, recipe: str) -> GatheredWeight:
    """A weight as FSDP2 gathers it in FP8."""
    ops = get_recipe(recipe)
    (q, s), (q_t, s_t) = ops.quantize_weight(weight), ops.quantize_weight_t(weight)
    columns = None if ops.has_weight_blocks else q_t.mT.contiguous()
    return GatheredWeight(q, s, columns, s_t, weight.dtype)
