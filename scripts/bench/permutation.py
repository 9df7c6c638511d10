"""The permutation around the experts, torchtitan's and this plugin's with gathers.

The shapes are those of DeepSeek-V3 16B with expert parallelism 4: a rank has 4 x 4096 tokens, each
routed to 6 experts, and 16 of the 64 experts. permute and unpermute are the functions of expert
parallelism and include the computation of their indices. "layer" is a whole MoE layer with router
and sorting but without experts.

Bytes are those of an ideal copy: each row is read once and written once, in forward and again in
backward. The layer's bytes are those of permute and unpermute, without padding. A result that
differs from torchtitan's ends the benchmark.
"""

import copy as copies
from collections.abc import Callable

import torch
from bench.common import Result, bandwidth, copy_gbps, median_us, sets_beyond_l2
from bench.shapes import (
    EXPERT_RANKS,
    LOCAL_EXPERTS,
    ROUTED_DIM,
    ROUTED_TOKENS,
    SEED,
    TOP_K,
    uneven_ends,
)
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
ABOUT = (
    f"{ROWS} rows of {ROUTED_DIM}, {LOCAL_EXPERTS} local experts, {EXPERT_RANKS} ranks: the "
    "permutation of torchtitan and that of this plugin."
)


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


def steps(way: str, counts: Tensor) -> dict[str, Callable]:
    """permute and unpermute, forward alone and with backward, of an input and a gradient."""
    permute, unpermute = WAYS[way]
    shape, _, index, _ = permute(draw(ROWS), counts, EXPERT_RANKS, LOCAL_EXPERTS)

    def permute_both(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        x.requires_grad_()
        _, rows, _, _ = permute(x, counts, EXPERT_RANKS, LOCAL_EXPERTS)
        return rows, *torch.autograd.grad(rows, x, g)

    def unpermute_both(out: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        out.requires_grad_()
        y = unpermute(out, shape, index)
        return y, *torch.autograd.grad(y, out, g)

    return {
        "permute": lambda x, g: permute(x.detach(), counts, EXPERT_RANKS, LOCAL_EXPERTS)[1:2],
        "permute, forward + backward": permute_both,
        "unpermute": lambda out, g: (unpermute(out.detach(), shape, index),),
        "unpermute, forward + backward": unpermute_both,
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


def measure_steps(copy: float) -> list[Row]:
    counts = token_counts()
    ours, theirs = steps("gathers", counts), steps("torchtitan", counts)
    padded = layouts.round_up(ROWS + LOCAL_EXPERTS * ALIGNMENT, ALIGNMENT)
    rows = []
    for what in ours:
        sizes = (ROWS, padded) if what.startswith("permute") else (padded, ROWS)
        inputs = [tuple(draw(size) for size in sizes) for _ in range(2)]
        got, want = ours[what](*inputs[0]), theirs[what](*inputs[0])
        if not all(map(torch.equal, got, want)):
            raise SystemExit(f"{what} is wrong")
        del got, want
        gigabytes = len(what.split("+")) * sum(t.nbytes for t in inputs[0]) / 1e9
        for way, functions in (("torchtitan", theirs), ("gathers", ours)):
            us = median_us([lambda i=i, f=functions[what]: f(*i) for i in inputs])
            rows.append(row_of(f"{what}, {way}", torch.bfloat16, gigabytes, us, copy))
    return rows


class NoExperts(nn.Module):
    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        return x


def measure_layer(copy: float) -> list[Row]:
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
    layers = {"torchtitan": layer, "gathers": copies.deepcopy(layer)}
    moe.route_by_gathers(layers["gathers"])

    def forward(way: str, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (layers[way](x),)

    def both(way: str, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        out = layers[way](x.requires_grad_())
        return out, *torch.autograd.grad(out, (x, *layers[way].parameters()), g)

    rows = []
    inputs = [
        tuple(draw(ROUTED_TOKENS).view(4, -1, ROUTED_DIM) for _ in range(2)) for _ in range(3)
    ]
    for what, function in (("layer", forward), ("layer, forward + backward", both)):
        for got, want in zip(function("gathers", *inputs[0]), function("torchtitan", *inputs[0])):
            # torchtitan rounds a token's gradient to bf16 after each of its summands.
            if (got - want).float().norm() > 1e-2 * want.float().norm():
                raise SystemExit(f"{what} is wrong")
        del got, want
        gigabytes = len(what.split("+")) * 4 * ROWS * ROUTED_DIM * 2 / 1e9
        for way in layers:
            us = median_us([lambda i=i, w=way, f=function: f(w, *i) for i in inputs])
            rows.append(row_of(f"{what}, {way}", torch.bfloat16, gigabytes, us, copy))
    return rows


def measure() -> Result:
    utils.set_token_group_alignment_size_m(ALIGNMENT)
    copy = copy_gbps()
    rows = [measure_gather(dtype, copy) for dtype in (torch.bfloat16, torch.float32)]
    rows += measure_steps(copy) + measure_layer(copy)
    return rows, {"copy bandwidth": f"{copy:.0f} GB/s", "seed of the numbers of tokens": SEED}
