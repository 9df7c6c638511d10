"""The permutation around the experts on one GPU: torchtitan's code and the gathers in its place.

    python scripts/bench_permutation.py [--json FILE]

Shapes are DeepSeek-V3 16B's on 4 ranks of expert parallelism: 4 x 4096 tokens a rank with 6 experts
each, 16 of the 64 experts a rank. permute and unpermute are those of expert parallelism, with what
makes their indices; the layer is a whole MoE layer, router and sorting too, without its experts.
Bytes are an ideal copy's: each row read once and written once, in forward and in backward; the
layer's are those of permute and unpermute together, without their padding. No speed is printed for
what does not compute the same as torchtitan.
"""

import copy as copies
from collections.abc import Callable

import torch
from bench_common import copy_gbps, median_us, parser, report, sets_beyond_l2
from bench_shapes import SEED, uneven_ends
from torch import Tensor, nn
from torchtitan.models.moe import utils as host
from torchtitan.models.moe.moe import MoE, MoEArgs

from titan_fp8 import kernels, reference
from titan_fp8.torchtitan_0_2 import moe, permutation

TOKENS, TOP_K, K = 4 * 4096, 6, 2048
ROWS = TOKENS * TOP_K
EXPERTS, EP = 16, 4
ALIGNMENT = 128
WAYS = {
    "host": (host._permute, host._unpermute),
    "gather": (permutation.permute, permutation.unpermute),
}


def draw(rows: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, K, device="cuda", dtype=dtype)


def token_counts() -> Tensor:
    """Tokens of each source rank for each local expert, uneven, ROWS in all."""
    ends = uneven_ends(EP * EXPERTS, ROWS, 1).long()
    return ends.diff(prepend=ends.new_zeros(1)).cuda()


def steps(way: str, counts: Tensor) -> dict[str, Callable]:
    """Both functions of a way, each forward alone and with backward, on an input and a gradient."""
    permute, unpermute = WAYS[way]
    shape, _, index, _ = permute(draw(ROWS), counts, EP, EXPERTS)

    def permute_both(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        x.requires_grad_()
        _, rows, _, _ = permute(x, counts, EP, EXPERTS)
        return rows, *torch.autograd.grad(rows, x, g)

    def unpermute_both(out: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        out.requires_grad_()
        y = unpermute(out, shape, index)
        return y, *torch.autograd.grad(y, out, g)

    return {
        "permute": lambda x, g: permute(x.detach(), counts, EP, EXPERTS)[1:2],
        "permute, forward + backward": permute_both,
        "unpermute": lambda out, g: (unpermute(out.detach(), shape, index),),
        "unpermute, forward + backward": unpermute_both,
    }


def row_of(what: str, dtype: torch.dtype, gigabytes: float, us: float, copy: float) -> dict:
    gbps = gigabytes / us * 1e6
    row = {"step": what, "dtype": str(dtype).removeprefix("torch."), "us": us}
    return row | {"GB/s": gbps, "% of copy": 100 * gbps / copy}


def measure_gather(dtype: torch.dtype, copy: float) -> dict[str, object]:
    """The op alone: a permutation of all rows."""
    index = torch.randperm(ROWS, device="cuda").int()
    inputs = [draw(ROWS, dtype) for _ in range(sets_beyond_l2(ROWS * K * dtype.itemsize))]
    if not torch.equal(kernels.gather_rows(inputs[0], index), inputs[0][index]):
        raise SystemExit("gather_rows is WRONG")
    us = median_us([lambda x=x: kernels.gather_rows(x, index) for x in inputs])
    return row_of("gather_rows", dtype, 2 * inputs[0].nbytes / 1e9, us, copy)


def measure_steps(copy: float) -> list[dict[str, object]]:
    counts = token_counts()
    ours, theirs = steps("gather", counts), steps("host", counts)
    padded = reference.round_up(ROWS + EXPERTS * ALIGNMENT, ALIGNMENT)
    rows = []
    for what in ours:
        sizes = (ROWS, padded) if what.startswith("permute") else (padded, ROWS)
        inputs = [tuple(draw(size) for size in sizes) for _ in range(2)]
        got, want = ours[what](*inputs[0]), theirs[what](*inputs[0])
        if not all(map(torch.equal, got, want)):
            raise SystemExit(f"{what} is WRONG")
        del got, want
        gigabytes = len(what.split("+")) * sum(t.nbytes for t in inputs[0]) / 1e9
        for way, functions in (("host", theirs), ("gather", ours)):
            us = median_us([lambda i=i, f=functions[what]: f(*i) for i in inputs])
            rows.append(row_of(f"{what}, {way}", torch.bfloat16, gigabytes, us, copy))
    return rows


class NoExperts(nn.Module):
    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        return x


def measure_layer(copy: float) -> list[dict[str, object]]:
    args = MoEArgs(
        num_experts=EXPERTS * EP,
        num_shared_experts=0,
        top_k=TOP_K,
        score_before_experts=False,
        _debug_force_load_balance=True,
    )
    with torch.device("cuda"), torch.no_grad():
        layer = MoE(args, dim=K, hidden_dim=16)
        layer.init_weights(0.02, torch.device("cuda"))
    layer.experts = NoExperts()
    layer.router.gate.bfloat16()
    layers = {"host": layer, "gather": copies.deepcopy(layer)}
    moe.route_by_gathers(layers["gather"])

    def forward(way: str, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (layers[way](x),)

    def both(way: str, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        out = layers[way](x.requires_grad_())
        return out, *torch.autograd.grad(out, (x, *layers[way].parameters()), g)

    rows = []
    inputs = [tuple(draw(TOKENS).view(4, -1, K) for _ in range(2)) for _ in range(3)]
    for what, function in (("layer", forward), ("layer, forward + backward", both)):
        for got, want in zip(function("gather", *inputs[0]), function("host", *inputs[0])):
            # torchtitan rounds to bf16 at each of the summands of a token's gradient.
            if (got - want).float().norm() > 1e-2 * want.float().norm():
                raise SystemExit(f"{what} is WRONG")
        del got, want
        gigabytes = len(what.split("+")) * 4 * ROWS * K * 2 / 1e9
        for way in layers:
            us = median_us([lambda i=i, w=way, f=function: f(w, *i) for i in inputs])
            rows.append(row_of(f"{what}, {way}", torch.bfloat16, gigabytes, us, copy))
    return rows


def main() -> None:
    arguments = parser(__doc__.splitlines()[0]).parse_args()
    host.set_token_group_alignment_size_m(ALIGNMENT)
    copy = copy_gbps()
    print(f"copy: {copy:.0f} GB/s; {ROWS} rows of {K}, {EXPERTS} experts a rank, {EP} ranks")
    print(f"seed of the numbers of tokens: {SEED}")
    rows = [measure_gather(dtype, copy) for dtype in (torch.bfloat16, torch.float32)]
    report(rows + measure_steps(copy) + measure_layer(copy), arguments.json)


if __name__ == "__main__":
    main()
