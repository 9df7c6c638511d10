"""Times the layers of a rank as a model calls them: forward and backward, the CPU's time included.

Several copies of the job's own module run forward, one after the other, and then backward. If
torchtitan compiles it, they are one compiled region. docs/plan.md says what is not part of it.
"""

import copy
import math
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.utils.benchmark import Timer
from torchtitan.models.moe import utils as moe_utils

from titan_fp8.functional.weights import GatheredWeight
from titan_fp8.modules.revert import revert
from titan_fp8.plan.model import Layer, Rank, fake_ranks
from titan_fp8.recipe import BF16, get_recipe

BYTES, MOST_COPIES = 192 << 20, 8
"""As many copies as exceed three L2 caches of a Hopper GPU; one, if a layer does by itself."""
Report = tuple[list[str], list[list[str]], list[Layer], list[str]]
"""Columns; rows, of the cells of a layer or a sum, and of columns; what is slower in FP8; notes."""


def seconds_of(steps: Sequence[Callable]) -> list[float]:
    """The median time of each step, in three loops of 0.1 s that take turns."""
    # They wait for the GPU, and call a step twice before they time it, which compiles it.
    timers = [Timer("step()", globals={"step": step}) for step in steps]
    counts = [math.ceil(0.1 / timer.timeit(1).mean) for timer in timers]
    rounds = [[t.timeit(count).mean for t, count in zip(timers, counts)] for _ in range(3)]
    return [statistics.median(times) for times in zip(*rounds)]


def report(rank: Rank, device: str = "cuda") -> Report:
    """Times layers. Experts are slower in FP8 if even and uneven groups of tokens together are."""
    times, rows = dict[Layer, dict[str, list[float]]](), list[list[str]]()
    with fake_ranks(1):
        for i, layer in enumerate(rank.layers, 1):
            name, *cells = layer.cells
            print(f"{i} of {len(rank.layers)}: timing {name}", file=sys.stderr, flush=True)
            ways = ("even", "uneven") if layer.groups > 1 else ("",)
            times[layer] = {way: us_of(rank, layer, way, device) for way in ways}
            rows += [[f"{name} {way}".strip(), *cells, *_cells(times[layer][way])] for way in ways]
    for way in sorted({way for by_way in times.values() for way in by_way if way}) or [""]:
        own = [(len(x.modules), by_way.get(way) or by_way[""]) for x, by_way in times.items()]
        total = [sum(number * us[i] for number, us in own) for i in (0, -1)]
        rows.append([f"all {way}".strip(), "", "", *_cells(total)])
    slower = [x for x, by_way in times.items() if sum(us[0] - us[-1] for us in by_way.values()) < 0]
    return ["bf16 us", "FP8 us", "x bf16"], rows, slower, []


def _cells(us: Sequence[float]) -> list[str]:
    return [*(f"{each:,.0f}" for each in us), *(f"{us[0] / fp8:.2f}" for fp8 in us[1:])]


def us_of(rank: Rank, layer: Layer, way: str, device: str) -> list[float]:
    """us of one call of a layer in bf16, and in FP8 if it is converted."""
    arms, (n, k) = (False, True)[: 1 + (layer.recipe != BF16)], layer.products[0]
    size = 2 * (layer.m * (n + k) + sum(shape.numel() for shape in layer.shapes))
    copies = min(MOST_COPIES, -(-BYTES // size))
    torch.compiler.reset()
    steps = [_step(rank, layer, way, device, in_fp8, copies) for in_fp8 in arms]
    return [seconds / copies * 1e6 for seconds in seconds_of(steps)]


def _step(rank: Rank, layer: Layer, way: str, device: str, in_fp8: bool, copies: int) -> Callable:
    """One call of so many copies of the layer, with weights and inputs of their own."""
    modules = [_module(rank, layer, device, in_fp8) for _ in range(copies)]
    others, shape = list[Tensor](), [1, layer.m, layer.products[0][1]]
    unit = get_recipe(layer.recipe).alignment if in_fp8 else 8  # torchtitan's own
    if layer.groups:
        tokens = tokens_of_experts(layer, way, unit if rank.dims.ep_enabled else 1)
        others, shape = [tokens.to(device)], [int(tokens.sum()), shape[-1]]
    xs = [torch.randn(shape, device=device, dtype=rank.dtype, requires_grad=True) for _ in modules]

    def forward() -> list[Tensor]:
        return [module(x, *others) for module, x in zip(modules, xs)]

    def run() -> list[Tensor]:
        moe_utils.TOKEN_GROUP_ALIGN_SIZE_M = unit  # which a converter has set, for FP8 only
        return call()

    call, backend = forward, rank.config.compile.backend
    if layer.is_compiled:
        call = torch.compile(forward, backend=backend, fullgraph=True, dynamic=False)
    variables = [*xs, *(p for module in modules for p in module.parameters())]
    gradients = [torch.randn_like(y) for y in run()]
    return lambda: torch.autograd.grad(run(), variables, gradients)


def tokens_of_experts(layer: Layer, way: str, unit: int) -> Tensor:
    """Tokens (E,), int64, multiples of `unit`; the last uneven group is four times the first."""
    spread, each = 0.6 * (way == "uneven"), layer.m / layer.groups / unit
    shares = torch.linspace(1 - spread, 1 + spread, layer.groups, dtype=torch.float64)
    return (shares * each).ceil().long() * unit


def _module(rank: Rank, layer: Layer, device: str, in_fp8: bool) -> nn.Module:
    """A copy of the first module of the layer, with random weights in the shape of the rank."""
    module = copy.deepcopy(rank.model.get_submodule(layer.modules[0]))
    if not in_fp8:
        revert(module)
    for path, shape in zip([*dict(module.named_parameters())], layer.shapes, strict=True):
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
