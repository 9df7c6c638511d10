"""What compiled layers keep for backward with the patch of `recomputation.py`.

The partitioner decides that before Inductor generates code, so most tests do without the code.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.moe.moe import FeedForward
from unpatched import restore

import titan_fp8
from titan_fp8.compile.recomputation import with_recomputable_quantizers
from titan_fp8.layouts import E4M3
from titan_fp8.patches import RECOMPUTABLE_QUANTIZERS
from titan_fp8.torchtitan_0_2.feed_forward import fuse_feed_forwards

PARTITIONED = "aot_eager_decomp_partition"
"""The backend that decomposes and partitions as Inductor does, and runs the graphs as they are."""


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.w1, self.w3 = (nn.Linear(64, 96, bias=False) for _ in range(2))
        self.w2 = nn.Linear(96, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


@pytest.fixture(autouse=True)
def fresh_compiler(fresh_graphs):
    """No graphs from before, and no patch at first."""
    yield
    restore([RECOMPUTABLE_QUANTIZERS])


@pytest.fixture
def installed(fresh_compiler):
    RECOMPUTABLE_QUANTIZERS.apply(with_recomputable_quantizers)


def kept_in_fp8(
    module: nn.Module, x: Tensor, backend: str = PARTITIONED
) -> tuple[list[tuple[int, ...]], list[Tensor]]:
    """The shapes of the FP8 tensors that a compiled module saves, and its gradients."""
    titan_fp8.convert_linears(module, filter_fqns=())
    shapes: list[tuple[int, ...]] = []

    def keep(t: Tensor) -> Tensor:
        if t.dtype == E4M3:
            shapes.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = torch.compile(module, backend=backend, fullgraph=True)(x)
    y.sum().backward()
    return shapes, [p.grad for p in module.parameters()]


def test_inputs_behind_pointwise_products_are_quantized_again(installed):
    module, x = SwiGLU(), torch.randn(32, 64)
    shapes, gradients = kept_in_fp8(module, x)
    assert shapes == []
    module.zero_grad(set_to_none=True)
    module(x).sum().backward()
    for got, p in zip(gradients, module.parameters(), strict=True):
        torch.testing.assert_close(got, p.grad, rtol=0.02, atol=0.02 * float(p.grad.abs().max()))


def test_without_the_patch_they_are_kept():
    shapes, _ = kept_in_fp8(SwiGLU(), torch.randn(32, 64))
    assert sorted(shapes) == [(64, 128), (96, 128)]


def test_a_graphs_own_input_is_kept_in_fp8(installed):
    shapes, _ = kept_in_fp8(nn.Sequential(nn.Linear(64, 96)), torch.randn(32, 64))
    assert shapes == [(64, 128)]


def bytes_kept(module: nn.Module, compiled: bool) -> int:
    """The bytes saved for backward of 256 tokens, without the parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    x = torch.randn(256, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        (torch.compile(module, backend=PARTITIONED, fullgraph=True) if compiled else module)(x)
    return sum(t.untyped_storage().nbytes() for p, t in kept.items() if p not in parameters)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_fused_feed_forward_keeps_no_more_than_an_ordinary_one(installed, compiled):
    sizes = []
    for fuse in (fuse_feed_forwards, lambda module: 1):
        module = nn.Sequential(nn.RMSNorm(64), FeedForward(64, 96)).bfloat16()
        titan_fp8.convert_linears(module)
        assert fuse(module) == 1
        sizes.append(bytes_kept(module, compiled))
    fused, ordinary = sizes
    # Eager, a fused one saves neither silu(a) nor the FP8 copies of h and, for w3, of x once more.
    # The copies have one scale for each 128 tokens.
    spared = 256 * 96 * 2 + (256 + 2 * 4) * 96 + (256 + 2 * 4) * 64
    assert fused == ordinary if compiled else ordinary - fused == spared
