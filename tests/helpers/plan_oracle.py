"""The oracle of a parallel plan: torchtitan's modules in one process, called once for each rank.

Under tensor parallelism every rank reads the whole input of a region and the ranks' outputs are
summed. So `Sliced` calls the module for each share of the tokens once for each rank, with the
slices of the weights that the rank holds, and autograd sums the gradients. Linears quantize their
operands as they get them and multiply in FP32. Nothing here uses DTensor, collectives or titan_fp8.

Sums run in the order of the ranks where that is easy. Elsewhere a sum may differ in its last bit,
which can make a value round to the next number of e4m3, 1/8 away.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from plans import Plan
from torch import Tensor, nn
from torch.func import functional_call

CUT = ({"wq", "wk", "wv", "wkv_b", "w1", "w3", "output"}, {"wo", "w2"})
"""The linears that tensor parallelism shards along N and along K; it replicates the others."""

BLOCKS = {
    # x and g for fprop and dgrad, W for fprop, W for dgrad, x and g for wgrad; None: the whole dim
    "blockwise": ((1, 128), (128, 128), (128, 128), (128, 1)),
    "rowwise": ((1, None), (1, None), (None, 1), (None, 1)),
}


def rounded(x: Tensor, block: tuple[int | None, int | None]) -> Tensor:
    """x (R, C), each block rounded to e4m3 with its own scale."""
    if not x.numel():
        return x
    rows, columns = (size or full for size, full in zip(block, x.shape, strict=True))
    padded = F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / torch.tensor(448.0)
    values = (blocks * (1 / scale)).to(torch.float8_e4m3fn).float() * scale
    return values.flatten(2).flatten(0, 1)[: x.shape[0], : x.shape[1]].contiguous()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.blocks = BLOCKS[recipe]
        of_x, of_w, _, _ = ctx.blocks
        return rounded(x, of_x) @ rounded(w, of_w).T

    @staticmethod
    def backward(ctx, g: Tensor):
        x, w = ctx.saved_tensors
        of_g, _, of_w, of_tokens = ctx.blocks
        dx = rounded(g, of_g) @ rounded(w, of_w)
        return dx, rounded(g, of_tokens).T @ rounded(x, of_tokens), None


def linear(x: Tensor, w: Tensor, recipe: str) -> Tensor:
    """x (..., K) times the transpose of w (N, K), with quantized operands in all three GEMMs."""
    return _Product.apply(x.flatten(0, -2), w, recipe).unflatten(0, x.shape[:-1])


class _SwiGLU(torch.autograd.Function):
    """silu(a) · b of FP32 a and b, in the order of operations of the fused feed-forward.

    F.silu has another order, and another last bit can change how a value is rounded to e4m3.
    """

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * torch.sigmoid(a) * b

    @staticmethod
    def backward(ctx, dh: Tensor):
        a, b = ctx.saved_tensors
        sigma = torch.sigmoid(a)
        return dh * b * (sigma * (1 + a * (1 - sigma))), dh * (a * sigma)


class FeedForward(nn.Module):
    """A feed-forward without tensor parallelism, which is fused for blockwise."""

    def __init__(self, feed_forward: nn.Module):
        super().__init__()
        self.w1, self.w2, self.w3 = feed_forward.w1, feed_forward.w2, feed_forward.w3

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x), self.w1.recipe))


def swiglu(a: Tensor, b: Tensor, recipe: str) -> Tensor:
    return _SwiGLU.apply(a, b) if recipe == "blockwise" else F.silu(a) * b


class Linear(nn.Module):
    def __init__(self, weight: nn.Parameter, recipe: str):
        super().__init__()
        self.weight, self.recipe = weight, recipe

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.recipe)


class Once(nn.Module):
    """A replicated module: computed once for all ranks, whose gradients of its output add up."""

    def __init__(self, module: nn.Module, ranks: int):
        super().__init__()
        self.module, self.ranks, self.readers, self.y = module, ranks, 0, None

    def forward(self, x: Tensor) -> Tensor:
        if self.readers == 0:
            self.readers, self.y = self.ranks, self.module(x)
        self.readers -= 1
        return self.y


class Sliced(nn.Module):
    """A module called for each share of the tokens, with each rank's slices of its weights."""

    def __init__(self, module: nn.Module, shares: int, ranks: int, join: Callable = sum):
        super().__init__()
        self.module, self.shares, self.ranks, self.join = module, shares, ranks, join

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        outputs = []
        for share in x.chunk(self.shares):
            # A copy for each rank, so that each sums its contributions to x's gradient first.
            parts = [
                functional_call(self.module, self.slices(rank), (share.clone(), *args), kwargs)
                for rank in range(self.ranks)
            ]
            outputs.append(self.join(parts))
        return torch.cat(outputs)

    def slices(self, rank: int) -> dict[str, Tensor]:
        weights = dict(self.module.named_parameters(prefix="output" if self.join is cat else ""))
        for name, weight in weights.items():
            for dim, layers in enumerate(CUT):
                if layers.intersection(name.split(".")):
                    weights[name] = weight.chunk(self.ranks, dim)[rank]
        return {name.removeprefix("output."): weight for name, weight in weights.items()}


def cat(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, -1)


class Experts(nn.Module):
    """torchtitan's GroupedExperts, where every share of the tokens has the same routing."""

    def __init__(self, experts: nn.Module, shares: int, ranks: int, recipe: str):
        super().__init__()
        self.w1, self.w2, self.w3 = experts.w1, experts.w2, experts.w3
        self.shares, self.ranks, self.recipe = shares, ranks, recipe

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        groups = x.split(num_tokens_per_expert.int().tolist())
        outputs = []
        for group, w1, w2, w3 in zip(groups, self.w1, self.w2, self.w3, strict=True):
            cut = (w1.chunk(self.ranks), w2.chunk(self.ranks, 1), w3.chunk(self.ranks))
            for share in group.chunk(self.shares):
                outputs.append(
                    sum(self.expert(share.clone(), *ws) for ws in zip(*cut, strict=True))
                )
        return torch.cat(outputs)

    def expert(self, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        a, b = linear(x, w1, self.recipe), linear(x, w3, self.recipe)
        return linear(swiglu(a, b, self.recipe), w2, self.recipe)


def as_on_ranks(model: nn.Module, plan: Plan, microbatches: int, recipe: str) -> None:
    """Changes the unsharded `model` so that it computes what the ranks of `plan` compute."""
    shares = plan.shares * microbatches
    expert_shares, expert_ranks = shares, plan.tp
    if plan.ep > 1:
        # The rank that has an expert gathers its tokens from all ranks of the group.
        expert_shares, expert_ranks = plan.shares * plan.tp // (plan.ep * plan.etp), plan.etp
    for block in model.layers.values():
        quantize_linears(block, recipe)
        if plan.tp > 1:
            own_gradient_first(block.attention_norm)
            own_gradient_first(block.ffn_norm)
        if hasattr(block.attention, "wkv_a"):
            block.attention.wkv_a = Once(block.attention.wkv_a, plan.tp)
            block.attention.kv_norm = Once(block.attention.kv_norm, plan.tp)
            block.attention.n_heads //= plan.tp
        block.attention = Sliced(block.attention, shares, plan.tp)
        dense = FeedForward if plan.tp == 1 else lambda feed_forward: feed_forward
        if hasattr(block, "feed_forward"):
            block.feed_forward = Sliced(dense(block.feed_forward), shares, plan.tp)
        else:
            shared = dense(block.moe.shared_experts)
            block.moe.shared_experts = Sliced(shared, shares, plan.tp)
            block.moe.experts = Experts(block.moe.experts, expert_shares, expert_ranks, recipe)
    if plan.tp > 1:
        own_gradient_first(model.norm)
    model.output = Sliced(model.output, shares, plan.tp, join=cat)


def quantize_linears(block: nn.Module, recipe: str) -> None:
    for name, module in list(block.named_modules()):
        if isinstance(module, nn.Linear) and "router" not in name:
            parent, _, attribute = name.rpartition(".")
            setattr(block.get_submodule(parent), attribute, Linear(module.weight, recipe))


def own_gradient_first(norm: nn.Module) -> None:
    """Sums a norm's gradient of its input before adding the residual's, as with a DTensor."""
    norm.register_forward_pre_hook(lambda module, inputs: (inputs[0].clone(),))
