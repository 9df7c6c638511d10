"""What compiled layers keep for backward with the patches of `recomputation.py`.

The partitioner decides that before Inductor generates code, so most tests do without the code.
"""

import operator

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import CheckpointPolicy
from torchtitan.models.moe.moe import FeedForward

import titan_fp8
from titan_fp8.layouts import E4M3
from titan_fp8.patches import RECOMPUTABLE_QUANTIZERS, restore
from titan_fp8.recomputation import (
    CompleteMarks,
    with_recomputable_quantizers,
)
from titan_fp8.torchtitan_0_2.feed_forward import fuse_feed_forwards
from titan_fp8.torchtitan_0_2.patches import CHECKPOINT_MARKS

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
    restore([RECOMPUTABLE_QUANTIZERS, CHECKPOINT_MARKS])


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


def test_ops_that_checkpointing_left_unmarked_are_marked():
    """torch 2.11 leaves the ops of an autograd.Function unmarked; those in forward are meant."""
    graph = torch.fx.Graph()
    region = {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 3}

    def node(target, *args, tag="is_forward", **meta):
        made = graph.call_function(target, args)
        made.meta.update(partitioner_tag=tag, **meta)
        return made

    x, w = graph.placeholder("x"), graph.placeholder("w")
    inside = node(torch.ops.aten.mul.Tensor, x, x, **region)
    cast = node(torch.ops.aten._to_copy.default, inside)
    rows = node(torch.ops.titan_fp8.quantize_1x128.default, cast)
    parts = [node(operator.getitem, rows, i) for i in range(2)]
    product = node(torch.ops.titan_fp8.blockwise_fprop.default, *parts, w)
    end = node(torch.ops.aten.mul.Tensor, product, product, **region)
    behind = node(torch.ops.titan_fp8.quantize_1x128.default, end)
    between = node(operator.getitem, behind, 0)
    next_region = region | {"ac_graph_id": 4}
    node(torch.ops.aten.mul.Tensor, between, between, **next_region)
    outside = node(torch.ops.titan_fp8.quantize_1x128.default, x)
    backward = node(torch.ops.titan_fp8.quantize_1x128.default, product, tag="is_backward")
    CompleteMarks()(graph)
    for marked in (cast, rows, *parts, product):
        assert region.items() <= marked.meta.items()
    for left in (behind, between, outside, backward):
        assert "recompute" not in left.meta


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


def test_other_passes_still_run():
    class Other(CustomGraphPass):
        runs = 0

        def __call__(self, graph: torch.fx.Graph) -> None:
            Other.runs += 1

        def uuid(self) -> str:
            return "other"

    with inductor_config.patch(joint_custom_pre_pass=Other()):
        CHECKPOINT_MARKS.apply(CompleteMarks.after)
        CHECKPOINT_MARKS.apply(CompleteMarks.after)
        mine = inductor_config.joint_custom_pre_pass
        assert isinstance(mine, CompleteMarks) and len(mine.before) == 1
        kept_in_fp8(nn.Sequential(nn.Linear(64, 96)), torch.randn(32, 64), "inductor")
    assert Other.runs
