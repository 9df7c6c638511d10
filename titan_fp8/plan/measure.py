"""Times the layers of a rank as a model calls them: forward and backward, the CPU's time included.

A layer is the job's own module, with weights in the shape of the rank. Several copies, which
together exceed the L2 cache, run one after the other, forward and then backward. If torchtitan
compiles the layer, they are one compiled region. docs/plan.md says what is not part of it.
"""

import contextlib
import copy
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.utils.benchmark import Timer
from torchtitan.models.moe import utils as moe_utils

from titan_fp8.functional.weights import GatheredWeight
from titan_fp8.modules.revert import revert
from titan_fp8.plan.model import Layer, Rank, Report, fake_ranks
from titan_fp8.recipe import BF16, get_recipe

Step = Callable[[], Sequence[Tensor]]
Clock = Callable[[list[Step]], list[float]]
BYTES, MOST_COPIES = 192 << 20, 8
"""Copies are as many as exceed three L2 caches of a Hopper GPU."""
ROUNDS, ROUND_S = 3, 0.1


class Timed(NamedTuple):
    """us of one call of a layer."""

    layer: Layer
    groups: str  # of experts: "even", or "uneven", the last with four times the first's tokens
    bf16: float
    fp8: float | None = None  # None if it is not converted


def seconds_of(steps: list[Step]) -> list[float]:
    """The median time of each step, in loops that take turns."""
    for step in steps:
        step()  # compiles
    timers = [Timer("step()", globals={"step": step}) for step in steps]  # waits for the GPU
    counts = [math.ceil(ROUND_S / timer.timeit(1).mean) for timer in timers]
    rounds = [[t.timeit(count).mean for t, count in zip(timers, counts)] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds)]


def measure(rank: Rank, device: str = "cuda", clock: Clock = seconds_of) -> list[Timed]:
    """The time of each layer; says on stderr which it is at."""
    ways = {True: ("even", "uneven"), False: ("",)}
    cases = [(layer, way) for layer in rank.layers for way in ways[layer.groups > 1]]
    timed: list[Timed] = []
    with fake_ranks(1):
        for layer, way in cases:
            does = "compiling and timing" if layer.is_compiled else "timing"
            at = f"{len(timed) + 1} of {len(cases)}: {does} {layer.cells[0]} {way}"
            print(at, file=sys.stderr, flush=True)
            timed.append(_timed(rank, layer, way, device, clock))
    return timed


def _timed(rank: Rank, layer: Layer, groups: str, device: str, clock: Clock) -> Timed:
    arms, (n, k) = (False, True)[: 1 + (layer.recipe != BF16)], layer.products[0]
    size = 2 * (layer.m * (n + k) + sum(shape.numel() for _, shape in layer.shapes))

    def us(copies: int) -> list[float]:
        torch.compiler.reset()
        steps = [_step(rank, layer, groups, device, in_fp8, copies) for in_fp8 in arms]
        return [seconds / copies * 1e6 for seconds in clock(steps)]

    for copies in (min(MOST_COPIES, max(2, -(-BYTES // size))), 1):
        with contextlib.suppress(torch.OutOfMemoryError):
            return Timed(layer, groups, *us(copies))
    raise ValueError(f"{' '.join(layer.cells[:2])}: one call needs more memory than this GPU has")


def _forward(modules: list[nn.Module], inputs: list[Tensor], *others: Tensor) -> list[Tensor]:
    return [module(x, *others) for module, x in zip(modules, inputs)]


def _step(rank: Rank, layer: Layer, groups: str, device: str, in_fp8: bool, copies: int) -> Step:
    """One call of so many copies of the layer, with weights and inputs of their own."""
    modules = [_module(rank, layer, device, in_fp8) for _ in range(copies)]
    others, shape = list[Tensor](), [1, layer.m, layer.products[0][1]]
    unit = get_recipe(layer.recipe).alignment if in_fp8 else 8  # torchtitan's own
    if layer.groups:
        tokens = tokens_of_experts(layer, groups, unit if rank.dims.ep_enabled else 1)
        others, shape = [torch.tensor(tokens, device=device)], [sum(tokens), shape[-1]]
    options: Any = {"device": device, "dtype": rank.dtype, "requires_grad": True}
    inputs = [torch.randn(shape, **options) for _ in modules]
    call, backend = _forward, rank.config.compile.backend
    if layer.is_compiled:
        call = torch.compile(_forward, backend=backend, fullgraph=True, dynamic=False)

    def forward() -> list[Tensor]:
        moe_utils.TOKEN_GROUP_ALIGN_SIZE_M = unit  # which a converter has set, for FP8 only
        return call(modules, inputs, *others)

    variables = [*inputs, *(p for module in modules for p in module.parameters())]
    gradients = [torch.randn_like(y) for y in forward()]
    return lambda: torch.autograd.grad(forward(), variables, gradients)


def tokens_of_experts(layer: Layer, groups: str, unit: int) -> list[int]:
    """Tokens of each expert of the rank, padded to multiples of `unit`."""
    spread, each = 0.6 * (groups == "uneven"), layer.m / layer.groups / unit
    shares = torch.linspace(1 - spread, 1 + spread, layer.groups, dtype=torch.float64)
    return [math.ceil(share * each) * unit for share in shares.tolist()]


def _module(rank: Rank, layer: Layer, device: str, in_fp8: bool) -> nn.Module:
    """A copy of the first module of the layer, with random weights in the shape of the rank."""
    module = copy.deepcopy(rank.model.get_submodule(layer.modules[0]))
    if not in_fp8:
        revert(module)
    for path, shape in layer.shapes:
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


def report(timed: Sequence[Timed]) -> Report:
    """The times of layers, and their sums; of experts, even and uneven groups together decide."""
    rows, gains = [], dict.fromkeys((t.layer for t in timed), 0.0)

    def add(name: str, facts: Sequence[str], bf16: float, fp8: float | None) -> None:
        speed = [f"{fp8:,.0f}", f"{bf16 / fp8:.2f}"] if fp8 else []
        rows.append([name.strip(), *facts, f"{bf16:,.0f}", *speed])

    for t in timed:
        add(f"{t.layer.cells[0]} {t.groups}", t.layer.cells[1:], t.bf16, t.fp8)
        gains[t.layer] += t.bf16 - (t.fp8 or t.bf16)
    for way in ("even", "uneven") if any(t.groups for t in timed) else ("",):
        own = [(len(t.layer.modules), t) for t in timed if t.groups in ("", way)]
        fp8 = sum(count * (t.fp8 or t.bf16) for count, t in own)
        add(f"all {way}", ["", ""], sum(count * t.bf16 for count, t in own), fp8)
    slower = [layer for layer, gain in gains.items() if gain < 0]
    return Report(["bf16 us", "FP8 us", "x bf16"], rows, slower, {})
