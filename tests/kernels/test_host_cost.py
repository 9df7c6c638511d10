"""What a product asks of the host: kernel launches and PyTorch ops, counted so that neither grows.

The products run on CPU tensors with the Hopper kernels; a launch is counted, not run.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import titan_fp8
from titan_fp8.kernels import hopper, launch
from titan_fp8.kernels.hopper import gemm_blockwise
from titan_fp8.ops import gemm, registry, swiglu

M, N, K, E = 256, 128, 384, 2


class Calls(TorchDispatchMode):
    """Counts the ops that reach the dispatcher."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count[op._schema.name] += 1
        return op(*args, **kwargs or {})


def allocations(function) -> tuple[object, int]:
    """The function's result, and how many tensors it allocated."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = function()
    return result, sum(e.name in ("aten::empty", "aten::empty_strided") for e in profile.events())


@pytest.fixture
def launches(monkeypatch):
    """The number of launches by kernel; products on the CPU use the Hopper kernels."""
    count = Counter()

    def count_launch(kernel, grid):
        return lambda *args, **options: count.update([kernel.__name__])

    monkeypatch.setattr(launch.Kernel, "__getitem__", count_launch)
    monkeypatch.setattr(gemm_blockwise, "multiprocessors", lambda device: 132)
    for module in (registry, gemm, swiglu):
        monkeypatch.setattr(module, "implementation", lambda x, emulate: hopper)
    return count


def product(recipe: str, grouped: bool):
    """A product and the gradient of its result."""
    lead = (E,) if grouped else ()
    x, w = (
        torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        for shape in ((M, K), (*lead, N, K))
    )
    if not grouped:
        return (lambda: titan_fp8.fp8_linear(x, w, recipe=recipe)), (x, w)
    offs = torch.tensor([128, M], dtype=torch.int32)
    product = titan_fp8.fp8_grouped_mm
    return (lambda: product(x, w, offs, recipe=recipe, aligned=True)), (x, w)


LAUNCHES = {
    ("blockwise", False): (3, 4),
    ("blockwise", True): (3, 4),
    ("blockwise_pow2", False): (3, 4),
    ("rowwise", False): (4, 6),
    ("rowwise", True): (4, 6),
}
"""(recipe, grouped) -> launches of forward and of backward."""


@pytest.mark.parametrize("recipe, grouped", LAUNCHES)
def test_launches_of_a_product(launches, recipe, grouped):
    forward, inputs = product(recipe, grouped)
    y = forward()
    of_forward = launches.total()
    torch.autograd.grad(y, inputs, torch.ones_like(y))
    got = of_forward, launches.total() - of_forward
    assert got == LAUNCHES[recipe, grouped], dict(launches)


ALLOCATIONS = {"blockwise": (7, 8), "rowwise": (8, 10)}
"""recipe -> allocations of forward and of backward."""


@pytest.mark.parametrize("recipe", ALLOCATIONS)
def test_allocations_of_a_linear(launches, recipe):
    forward, inputs = product(recipe, False)
    y, of_forward = allocations(forward)
    g = torch.ones_like(y)
    _, of_backward = allocations(lambda: torch.autograd.grad(y, inputs, g))
    assert (of_forward, of_backward) == ALLOCATIONS[recipe]


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
def test_ops_of_a_linear(launches, recipe):
    """torch.compile and activation checkpointing see two ops in forward and one in backward."""
    stages = titan_fp8.recipe.get_recipe(recipe)
    ops = stages.quantize_rows_and_columns, stages.fprop.op
    both, fprop = (titan_fp8.recipe.op_of(op)._schema.name for op in ops)
    forward, inputs = product(recipe, False)
    g = torch.ones(M, N, dtype=torch.bfloat16)
    with Calls() as of_forward:
        y = forward()
    with Calls() as of_backward:
        torch.autograd.grad(y, inputs, g)
    assert of_forward.count == {both: 1, fprop: 1, "aten::detach": 1}
    assert of_backward.count == {"titan_fp8::product_backward": 1}
