"""The autograd functions: what they save, torch.compile, checkpointing, second derivatives.

A backend of this file keeps the graphs that AOTAutograd returns after the min-cut partitioner,
which merges equal calls and decides what is saved for backward.
"""

import contextlib
import functools
from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from op_calls import DTYPES, E4M3, RECIPES, offsets, ops
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titan_fp8 import convert_linears, fp8_grouped_mm, fp8_linear
from titan_fp8.functional.swiglu import fp8_swiglu
from titan_fp8.host.permute import Permute
from titan_fp8.recipe import RECIPES as STAGES


class Graphs:
    """A backend that keeps the forward and backward graphs and runs them as they are."""

    def __init__(self):
        self.forward, self.backward = [], []
        self.frames = 0

        def keep(graphs):
            def compiler(graph, _):
                graphs.append(graph)
                return make_boxed_func(graph.forward)

            return compiler

        self._aot = aot_autograd(
            fw_compiler=keep(self.forward),
            bw_compiler=keep(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )

    def __call__(self, graph, inputs):
        self.frames += 1
        return self._aot(graph, inputs)


def count_ops(graph) -> Counter:
    targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    names = [str(t) for t in targets if isinstance(t, torch._ops.OpOverload)]
    return Counter(n.split(".")[1] for n in names if n.startswith("titan_fp8."))


@contextlib.contextmanager
def saved_tensors():
    """The tensors that autograd saves for backward in here."""
    saved = []

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield saved


def quantizer(recipe: str) -> str:
    """The op that forward quantizes x with, where wgrad is to follow."""
    if recipe.startswith("blockwise"):
        return "quantize_1x128_128x1_t"
    return "quantize_row_col_t" if recipe == "rowwise" else "quantize_row"


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


DIFFERENT = [recipe for recipe in RECIPES if recipe != "blockwise_pow2"]
"""The recipes that differ to a compiler: one with powers of two has the ops of blockwise."""
SIZES = (64, 32, 16)
"""The outputs of three linears that share an input of 40 tokens and 144 channels."""


def three_linears(recipe: str, parameters: bool):
    """A function of x and three Ws, and these: parameters of linears, or only inputs."""
    linears = nn.ModuleList([nn.Linear(144, n, bias=False) for n in SIZES])
    convert_linears(linears, recipe=recipe)
    weights = [linear.weight for linear in linears]
    if parameters:
        return lambda x, *_: torch.cat([linear(x) for linear in linears], -1), weights
    return lambda x, *ws: torch.cat([fp8_linear(x, w, recipe=recipe) for w in ws], -1), weights


def assert_saved(saved: list[torch.Tensor], recipe: str) -> None:
    """Of x its transposed FP8 copy is kept, for gw_hp x itself; of W nothing but W."""
    fp8 = {tuple(t.shape) for t in saved if t.dtype == E4M3}
    high = {tuple(t.shape) for t in saved if t.dtype in DTYPES and t.dim() == 2}
    width = {"blockwise": 128, "blockwise_pow2": 128, "rowwise": 48}
    assert fp8 == ({(144, width[recipe])} if recipe in width else set())
    assert ((40, 144) in high) == (recipe not in width)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("parameters", [True, False])
def test_eager_saves_no_quantized_weight(recipe, parameters):
    run, weights = three_linears(recipe, parameters)
    with saved_tensors() as saved:
        run(torch.randn(40, 144, requires_grad=True), *weights)
    assert_saved(saved, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_eager_grouped_mm_saves_no_quantized_weight(recipe):
    x, w = torch.randn(40, 144, requires_grad=True), torch.randn(2, 64, 144, requires_grad=True)
    with saved_tensors() as saved:
        fp8_grouped_mm(x, w, offsets(8, 40), recipe=recipe)
    # Unaligned: two groups of 40 tokens need 2 x 128 columns.
    assert [tuple(t.shape) for t in saved if t.dtype == E4M3] == (
        [] if recipe == "rowwise_with_gw_hp" else [(144, 256)]
    )


@pytest.mark.parametrize("recipe", DIFFERENT)
@pytest.mark.parametrize("parameters", [True, False])
def test_compiled_linears_share_the_quantized_input(recipe, parameters):
    """x quantized once; one frame, compiled once."""
    run, weights = three_linears(recipe, parameters)
    leaves = torch.randn(40, 144, requires_grad=True), *weights
    g = torch.randn(40, sum(SIZES))
    expected = run(*leaves)
    expected_gradients = torch.autograd.grad(expected, leaves, g)
    graphs = Graphs()
    compiled = torch.compile(run, backend=graphs, fullgraph=True)
    with saved_tensors() as saved:
        y = compiled(*leaves)
    assert_saved(saved, recipe)
    assert torch.equal(y, expected)
    assert all(map(torch.equal, torch.autograd.grad(y, leaves, g), expected_gradients))
    compiled(torch.randn(40, 144, requires_grad=True), *weights).sum().backward()
    assert graphs.frames == len(graphs.forward) == len(graphs.backward) == 1
    kind = recipe.split("_")[0]
    assert count_ops(graphs.forward[0]) == {quantizer(recipe): 1, f"{kind}_fprop": 3}
    of_g, gemms = quantizer(recipe), (f"{kind}_dgrad", STAGES[recipe].wgrad.name)
    assert count_ops(graphs.backward[0]) == dict.fromkeys((of_g, *gemms), 3)


@pytest.mark.parametrize("recipe", DIFFERENT)
def test_compiled_grouped_mm_takes_any_token_count(recipe):
    """w1 and w3 of experts, compiled as torchtitan does: tokens dynamic, one frame for all."""
    graphs = Graphs()

    def experts(x, w1, w3, offs):
        return fp8_grouped_mm(x, w1, offs, recipe=recipe) * fp8_grouped_mm(
            x, w3, offs, recipe=recipe
        )

    compiled = torch.compile(experts, backend=graphs, fullgraph=True)
    weights = [torch.randn(3, 32, 144, requires_grad=True) for _ in range(2)]
    for m, ends in ((300, (5, 5, 290)), (257, (0, 257, 257)), (40, (40, 40, 40)), (128, (1, 2, 3))):
        x, offs = torch.randn(m, 144, requires_grad=True), offsets(*ends)
        torch._dynamo.mark_dynamic(x, 0)
        with saved_tensors() as saved:
            y = compiled(x, *weights, offs)
        assert all(t.shape[0] == 144 and t.dim() == 2 for t in saved if t.dtype == E4M3)
        g = torch.randn_like(y)
        expected = experts(x, *weights, offs)
        assert torch.equal(y, expected)
        got, want = (torch.autograd.grad(out, (x, *weights), g) for out in (y, expected))
        assert all(map(torch.equal, got, want))
    assert graphs.frames == len(graphs.forward) == len(graphs.backward) == 1
    assert count_ops(graphs.forward[0])[quantizer(recipe)] == 1


@pytest.mark.parametrize("recipe", DIFFERENT)
@pytest.mark.parametrize("compiled, reentrant", [(False, False), (False, True), (True, False)])
def test_gradient_checkpointing(recipe, compiled, reentrant):
    """Recomputed layers have the gradients of layers that were kept, to the bit."""
    layers = nn.Sequential(nn.Linear(144, 32), nn.SiLU(), nn.Linear(32, 144))
    convert_linears(layers, recipe=recipe)
    x = torch.randn(40, 144, requires_grad=True)
    leaves = x, *layers.parameters()

    def run(x):
        return checkpoint(layers, x, use_reentrant=reentrant)

    if compiled:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    gradients = []
    for f in (layers, run):
        f(x).square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
    assert all(map(torch.equal, *gradients))


OFFS = torch.tensor([3, 8], dtype=torch.int32)

DIFFERENTIABLE_ONCE = {
    "fp8_linear": lambda x, w: fp8_linear(x, w[0]),
    "fp8_grouped_mm": lambda x, w: fp8_grouped_mm(x, w, OFFS),
    "fp8_swiglu": lambda x, w: fp8_swiglu(x, w, w, w, OFFS),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE_ONCE)
def test_second_derivatives_are_an_error(name):
    x, w = (torch.randn(shape, requires_grad=True) for shape in [(8, 16), (2, 16, 16)])
    y = DIFFERENTIABLE_ONCE[name](x, w)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_compiled_gathers_of_tokens_refuse_torch_func():
    """Their gradients would be zero."""
    index = torch.arange(8)
    gradient = torch.func.grad(lambda x: Permute.call(x, index, index).sum())
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.compile(gradient, backend="eager")(torch.randn(8, 16))


@pytest.mark.parametrize("name", DIFFERENTIABLE_ONCE)
def test_what_pytorch_cannot_differentiate_is_an_error(name):
    """Without gradients, too, where there is no autograd function."""
    x, w = (torch.randn(shape, requires_grad=True) for shape in [(8, 16), (2, 16, 16)])
    product = DIFFERENTIABLE_ONCE[name]
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode, forward_ad.dual_level():
            assert product(x.detach(), w).isfinite().all()
            with pytest.raises(NotImplementedError, match="jvp"):
                product(forward_ad.make_dual(x.detach(), torch.ones_like(x)), w)
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(RuntimeError, match="setup_context"):
            transform(lambda w: product(x, w).sum())(w)
    compiled = torch.compile(torch.func.grad(lambda x: product(x, w).sum()), backend="eager")
    with pytest.raises(RuntimeError, match="setup_context"):
        compiled(x.detach())
    several = torch.randn(3, 8, 16)
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.autograd.grad(product(x, w), x, several, is_grads_batched=True)


def test_an_input_of_inference_mode():
    linear = nn.Linear(144, 32, bias=False)
    convert_linears(linear)
    with torch.inference_mode():
        x = torch.randn(40, 144, requires_grad=True)
        assert torch.equal(linear(x), fp8_linear(x, linear.weight))


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def test_op_level_checkpointing_saves_what_its_list_says():
    """Every GEMM saved, every quantizer recomputed, with an input that two layers share."""
    linears = nn.ModuleList([nn.Linear(144, n) for n in SIZES])
    convert_linears(linears)
    products = []

    def policy(_, op, *args, **kwargs):
        save = op is ops.blockwise_fprop.default
        products.append(save)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def run(x):
        x = torch.tanh(x)
        return torch.cat([linear(x) for linear in linears], -1)

    x = torch.randn(40, 144, requires_grad=True)
    leaves = x, *linears.parameters()
    g = torch.randn(40, sum(SIZES))
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    y = checkpoint(run, x, use_reentrant=False, context_fn=contexts)
    got = torch.autograd.grad(y, leaves, g)
    assert sum(products) >= len(linears)
    assert all(map(torch.equal, got, torch.autograd.grad(run(x), leaves, g)))
