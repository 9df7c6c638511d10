"""Times the layers of a rank as a model calls them: forward and backward, the CPU's time included.

A layer is the job's own module, with weights in the shape of the rank. Several copies, which
together exceed the L2 cache, run one after the other, forward and then backward. If torchtitan
compiles the layer, they are one compiled region. docs/plan.md says what is not part of it.
"""

import copy
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

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
"""As many copies as exceed three L2 caches of a Hopper GPU; one, if a layer does by itself."""
ROUNDS, ROUND_S = 3, 0.1


def seconds_of(steps: list[Step]) -> list[float]:
    """The median time of each step, in loops that take turns."""
    for step in steps:
        step()  # compiles
    timers = [Timer("step()", globals={"step": step}) for step in steps]  # waits for the GPU
    counts = [math.ceil(ROUND_S / timer.timeit(1).mean) for timer in timers]
    rounds = [[t.timeit(count).mean for t, count in zip(timers, counts)] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds)]


def report(rank: Rank, device: str = "cuda", clock: Clock = seconds_of) -> Report:
    """The times of layers and their sums; says on stderr which layer it is at.

    Experts get even groups of tokens, and "uneven" ones, the last four times as large as the first;
    they are slower in FP8 if both together are.
    """
    ways = {True: ("even", "uneven"), False: ("",)}
    cases = [(layer, way) for layer in rank.layers for way in ways[layer.groups > 1]]
    times, rows = dict[tuple[Layer, str], list[float]](), list[list[str]]()
    with fake_ranks(1):
        for i, (layer, way) in enumerate(cases, 1):
            does = "compiling and timing" if layer.is_compiled else "timing"
            at = f"{i} of {len(cases)}: {does} {layer.cells[0]} {way}"
            print(at, file=sys.stderr, flush=True)
            times[layer, way] = us = us_of(rank, layer, way, device, clock)
            rows.append([f"{layer.cells[0]} {way}".strip(), *layer.cells[1:], *_cells(us)])
    for way in sorted({way for _, way in cases if way}) or [""]:
        own = [(len(x.modules), us) for (x, own_way), us in times.items() if own_way in ("", way)]
        total = [sum(count * us[i] for count, us in own) for i in (0, -1)]
        rows.append([f"all {way}".strip(), "", "", *_cells(total)])
    gains = [sum(us[0] - us[-1] for (x, _), us in times.items() if x == y) for y in rank.layers]
    slower = [layer for layer, gain in zip(rank.layers, gains) if gain < 0]
    return Report(["bf16 us", "FP8 us", "x bf16"], rows, slower)


def _cells(us: Sequence[float]) -> list[str]:
    return [*(f"{each:,.0f}" for each in us), *(f"{us[0] / fp8:.2f}" for fp8 in us[1:])]


def us_of(rank: Rank, layer: Layer, groups: str, device: str, clock: Clock) -> list[float]:
    """us of one call of a layer in bf16, and in FP8 if it is converted."""
    arms, (n, k) = (False, True)[: 1 + (layer.recipe != BF16)], layer.products[0]
    size = 2 * (layer.m * (n + k) + sum(shape.numel() for _, shape in layer.shapes))
    copies = min(MOST_COPIES, -(-BYTES // size))
    torch.compiler.reset()
    steps = [_step(rank, layer, groups, device, in_fp8, copies) for in_fp8 in arms]
    return [seconds / copies * 1e6 for seconds in clock(steps)]


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
