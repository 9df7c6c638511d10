"""The permutation around the experts, torchtitan's and this plugin's with gathers, in the shapes of
DeepSeek-V3 16B with expert parallelism 4: a rank has 4 x 4096 tokens of 2048, each routed to 6
experts, and 16 of the 64 experts.

permute and unpermute are the functions of expert parallelism and include the computation of their
indices. "layer" is a whole MoE layer with router and sorting but without experts.

Bytes are those of an ideal copy: each row is read once and written once, in forward and again in
backward. The layer's bytes are those of permute and unpermute, without padding. A result that
differs from torchtitan's ends the benchmark.
"""

import copy as copies
from collections.abc import Callable, Sequence

import torch
from bench.common import Result, bandwidth, copy_gbps, median_us, sets_beyond_l2
from bench.shapes import EXPERT_RANKS, LOCAL_EXPERTS, ROUTED_DIM, ROUTED_TOKENS, TOP_K, uneven_ends
from tables import Row
from torch import Tensor, nn
from torchtitan.models.moe import utils
from torchtitan.models.moe.moe import MoE, MoEArgs

from titan_fp8 import layouts
from titan_fp8.host.permute import sort_back, sort_by_expert
from titan_fp8.host.torchtitan_0_2 import moe
from titan_fp8.kernels.permute import gather_rows

ROWS = ROUTED_TOKENS * TOP_K
ALIGNMENT = 128
TITLE = "Permutation around the experts"

Steps = dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]]
"""Functions of an input and of a gradient, by name."""


def _permute(x: Tensor, counts: Tensor, ranks: int, _experts: int) -> tuple:
    return x.shape, *sort_by_expert(x, counts, ranks, ALIGNMENT)


WAYS = {
    "torchtitan": (utils._permute, utils._unpermute),
    "gathers": (_permute, lambda y, _shape, index: sort_back(y, index)),
}


def draw(rows: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, ROUTED_DIM, device="cuda", dtype=dtype)


def token_counts() -> Tensor:
    """Tokens from each rank for each local expert: uneven numbers that sum to ROWS."""
    ends = uneven_ends(EXPERT_RANKS * LOCAL_EXPERTS, ROWS, 1).long()
    return ends.diff(prepend=ends.new_zeros(1)).cuda()


class NoExperts(nn.Module):
    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        return x


def moe_layer() -> MoE:
    args = MoEArgs(
        num_experts=LOCAL_EXPERTS * EXPERT_RANKS,
        num_shared_experts=0,
        top_k=TOP_K,
        score_before_experts=False,
        _debug_force_load_balance=True,
    )
    with torch.device("cuda"), torch.no_grad():
        layer = MoE(args, dim=ROUTED_DIM, hidden_dim=16)
        layer.init_weights(0.02, torch.device("cuda"))
    layer.experts = NoExperts()
    layer.router.gate.bfloat16()
    return layer


def both_directions(
    name: str, function: Callable[[Tensor], Tensor], weights: Sequence[Tensor] = ()
) -> Steps:
    """The function, forward alone and with backward."""

    def forward(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (function(x),)

    def both(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        y = function(x.requires_grad_())
        return y, *torch.autograd.grad(y, (x, *weights), g)

    return {name: forward, f"{name}, forward + backward": both}


def steps(way: str, counts: Tensor, layer: MoE) -> Steps:
    permute, unpermute = WAYS[way]
    sizes = counts, EXPERT_RANKS, LOCAL_EXPERTS
    shape, _, index, _ = permute(draw(ROWS), *sizes)
    # A MoE layer takes batches of sequences.
    routed = lambda x: layer(x.view(4, -1, ROUTED_DIM)).flatten(0, 1)  # noqa: E731
    return {
        **both_directions("permute", lambda x: permute(x, *sizes)[1]),
        **both_directions("unpermute", lambda out: unpermute(out, shape, index)),
        **both_directions("layer", routed, tuple(layer.parameters())),
    }


def row_of(what: str, dtype: torch.dtype, gigabytes: float, us: float, copy: float) -> Row:
    row = {"step": what, "dtype": str(dtype).removeprefix("torch."), "us": us}
    return row | bandwidth(gigabytes, us, copy)


def measure_gather(dtype: torch.dtype, copy: float) -> Row:
    """The kernel that gathers rows, alone, on a permutation of all rows."""
    index = torch.randperm(ROWS, device="cuda").int()
    inputs = [draw(ROWS, dtype) for _ in range(sets_beyond_l2(ROWS * ROUTED_DIM * dtype.itemsize))]
    if not torch.equal(gather_rows(inputs[0], index), inputs[0][index]):
        raise SystemExit("gather_rows is wrong")
    us = median_us([lambda x=x: gather_rows(x, index) for x in inputs])
    return row_of("gather_rows", dtype, 2 * inputs[0].nbytes / 1e9, us, copy)


def check_equal(what: str, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Ends the process if results differ."""
    # torchtitan rounds the gradient of a layer's token to bf16 after each of its summands.
    allowed = 1e-2 if what.startswith("layer") else 0.0
    for a, b in zip(got, want, strict=True):
        if not (a - b).float().norm() <= allowed * b.float().norm():
            raise SystemExit(f"{what} is wrong")


def measure() -> Result:
    utils.set_token_group_alignment_size_m(ALIGNMENT)
    copy = copy_gbps()
    rows = [measure_gather(dtype, copy) for dtype in (torch.bfloat16, torch.float32)]
    counts, layer = token_counts(), moe_layer()
    layers = {"torchtitan": layer, "gathers": copies.deepcopy(layer)}
    moe.route_by_gathers(layers["gathers"])
    ways = {way: steps(way, counts, layer) for way, layer in layers.items()}
    padded = layouts.round_up(ROWS + LOCAL_EXPERTS * ALIGNMENT, ALIGNMENT)
    # The rows of the input and of the gradient, and those that a direction reads and writes.
    sizes = {
        "permute": (ROWS, padded, ROWS + padded),
        "unpermute": (padded, ROWS, ROWS + padded),
        "layer": (ROUTED_TOKENS, ROUTED_TOKENS, 4 * ROWS),
    }
    for what in ways["gathers"]:
        name, *both = what.split(", ")
        *of_inputs, moved = sizes[name]
        inputs = [tuple(map(draw, of_inputs)) for _ in range(3)]
        check_equal(what, *(ways[way][what](*inputs[0]) for way in ("gathers", "torchtitan")))
        gigabytes = (1 + len(both)) * moved * ROUTED_DIM * torch.bfloat16.itemsize / 1e9
        for way, functions in ways.items():
            us = median_us([lambda i=i, f=functions[what]: f(*i) for i in inputs])
            rows.append(row_of(f"{what}, {way}", torch.bfloat16, gigabytes, us, copy))
    return rows, {"copy bandwidth": f"{copy:.0f} GB/s"}
