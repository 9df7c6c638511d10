"""Cases for `fp8_swiglu`, and the composition of three products that it must equal.

The SwiGLU between the products is `reference.swiglu` here, rounded once, so a fused feed-forward
must equal the composition to the bit; F.silu is close to it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_fp8 import fp8_grouped_mm, fp8_linear, reference

E4M3 = torch.float8_e4m3fn

M, K, H, N = 300, 144, 272, 96

LAYOUTS = {
    "dense": (None, False),
    "unaligned": ((5, 5, 133, 290), False),
    "aligned": ((128, 128, 256, 256), True),
}
"""Group ends, of which some are empty and the last is short of M, and whether they are aligned."""


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return reference.swiglu(a, b)

    @staticmethod
    def backward(ctx, dh: Tensor):
        return reference.swiglu_backward(dh, *ctx.saved_tensors)


def silu_and_product(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def composition(
    x, w1, w2, w3, offs=None, *, swiglu=SwiGLU.apply, recipe="blockwise", aligned=False
) -> Tensor:
    """The three products, each by itself."""

    def mm(x: Tensor, w: Tensor) -> Tensor:
        if offs is None:
            return fp8_linear(x, w, recipe=recipe)
        return fp8_grouped_mm(x, w, offs, recipe=recipe, aligned=aligned)

    return mm(swiglu(mm(x, w1), mm(x, w3)), w2)


def operands(groups: int | None = None, dtype=torch.float32, m: int = M) -> tuple[Tensor, ...]:
    """x, w1, w2 and w3; what a row of the weights makes of x is about 1."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float) -> Tensor:
        t = torch.randn(shape, generator=generator) * std
        return t.to(dtype).requires_grad_()

    lead = () if groups is None else (groups,)
    w1, w3 = (normal(*lead, H, K, std=K**-0.5) for _ in range(2))
    return normal(m, K, std=1), w1, normal(*lead, N, H, std=H**-0.5), w3


def case(layout: str, dtype=torch.float32):
    """The operands of a layout, its offs and aligned."""
    ends, aligned = LAYOUTS[layout]
    if ends is None:
        return operands(dtype=dtype), None, aligned
    return operands(len(ends), dtype), torch.tensor(ends, dtype=torch.int32), aligned


def outputs(y: Tensor, leaves) -> list[Tensor]:
    """y and the gradients of the leaves that have one."""
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t.requires_grad], g)]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def saved_by(f, *args) -> list[Tensor]:
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        f(*args)
    return saved
