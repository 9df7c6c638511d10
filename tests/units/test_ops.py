"""The ops as PyTorch sees them: schemas, fakes, functional behaviour, autograd and torch.compile.

For torch.compile a backend of this file keeps the graphs that AOTAutograd gives it, after the
partitioner that Inductor uses, which merges equal calls and decides what is saved for backward.
"""

import contextlib
import functools
import itertools
import re
from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titan_fp8 import convert_linears, fp8_grouped_mm, fp8_linear
from titan_fp8.ops import NAMES
from titan_fp8.swiglu import fp8_swiglu

ops = torch.ops.titan_fp8
E4M3 = torch.float8_e4m3fn
RECIPES = ("blockwise", "rowwise", "rowwise_with_gw_hp")
DTYPES = (torch.bfloat16, torch.float32)


def offsets(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


LAYOUTS = {
    "dense": (None, False),
    "unaligned": (offsets(5, 5, 190), False),
    "aligned": (offsets(128, 128, 256), True),
}
"""offs and aligned; the first two for any M, the last for 256 tokens and more."""


def token_ops():
    return (
        ops.quantize_128x1_t, ops.quantize_1x128_128x1_t, ops.quantize_col_t,
        ops.quantize_row_col_t,
    )  # fmt: skip


PERMUTATION = (
    ops.gather_rows, ops.combine_rows, ops.dot_rows, ops.invert_index, ops.places_of_tokens,
)  # fmt: skip
INTEGERS = (torch.int64, torch.int32)


def calls(tokens=((300, 144), (257, 48), (0, 32)), gemms=((300, 144, 272), (0, 32, 16))):
    """(op, arguments) of every op in all its forms, for these (M, K) and (M, N, K)."""
    yield from index_calls()
    for (m, k), dtype in itertools.product(tokens, DTYPES):
        x = torch.randn(m, k, dtype=dtype)
        yield ops.quantize_1x128, (x,)
        yield ops.quantize_row, (x,)
        for index in ([-1, 7, m - 1, -1, 0, m], []):
            yield from row_calls(x, torch.tensor(index, dtype=torch.int32))
        a, b = torch.randn(2, m, k, dtype=dtype)
        yield ops.swiglu_1x128, (a, b)
        g = torch.randn(m, 80, dtype=dtype)
        for offs, aligned in LAYOUTS.values():
            if m > 256 or not aligned:
                for op in token_ops():
                    yield op, (x, offs, aligned)
                yield ops.quantize_row_col_t_pair, (g, x, offs, aligned)
                yield ops.swiglu_backward_1x128_128x1_t, (x, a, b, offs, aligned)
    for shape in ((272, 144), (512, 640), (1, 16, 16), (3, 144, 272), (2, 512, 48)):
        for op in (ops.quantize_128x128, ops.quantize_row):
            yield op, (torch.randn(shape),)
        for op in (ops.quantize_128x128_t, ops.quantize_weight_col_t):
            yield op, (torch.randn(shape, dtype=torch.bfloat16),)
    for (m, n, k), (offs, aligned), dtype in itertools.product(gemms, LAYOUTS.values(), DTYPES):
        if m > 256 or not aligned:
            yield from gemm_calls(m, n, k, offs, aligned, dtype)


def row_calls(x, index):
    """The ops on rows of x, of an even number of rows or none."""
    pairs = index.view(-1, 2)
    yield ops.gather_rows, (x, index, None)
    yield ops.gather_rows, (x, index, torch.randn(len(x), 3), 3)
    for weight in (None, torch.randn(pairs.shape)):
        yield ops.combine_rows, (x, pairs, weight)
    yield ops.dot_rows, (torch.randn(len(pairs), x.shape[1], dtype=x.dtype), x, pairs)


def index_calls():
    """The ops on indices: four tokens from two ranks for three experts, one of them without any."""
    yield ops.invert_index, (torch.tensor([5, 0, 2]), 6)
    for counts, dtype in itertools.product(([1, 0, 2, 0, 0, 1], [0] * 6), INTEGERS):
        counts = torch.tensor(counts, dtype=dtype)
        yield ops.places_of_tokens, (counts, 3, 2, int(counts.sum()), 64, 16)


def gemm_calls(m, n, k, offs, aligned, dtype):
    x, g = torch.randn(m, k), torch.randn(m, n)
    w = torch.randn(n, k) if offs is None else torch.randn(len(offs), n, k)
    layout = (offs, aligned)
    end = (*layout, dtype)
    yield ops.blockwise_mm, (*ops.quantize_1x128(x), *ops.quantize_128x128(w), *end)
    yield ops.rowwise_mm, (*ops.quantize_row(x), *ops.quantize_row(w), *end)
    yield ops.blockwise_fprop, (*ops.quantize_1x128(x), w, *end)
    yield ops.blockwise_dgrad, (*ops.quantize_1x128(g), w, *end)
    pair = (*ops.quantize_1x128(g), w, *ops.quantize_1x128(2 * g), torch.randn_like(w))
    yield ops.blockwise_dgrad_pair, (*pair, *end)
    left = *ops.quantize_1x128(g), *ops.quantize_128x128_t(w)
    yield ops.blockwise_mm_pair, (*left, *left, *end)
    yield ops.rowwise_fprop, (*ops.quantize_row(x), w, *end)
    yield ops.rowwise_dgrad, (*ops.quantize_row(g), w, *end)
    operands = *ops.quantize_128x1_t(g, *layout), *ops.quantize_128x1_t(x, *layout)
    yield ops.blockwise_wgrad, (*operands, *end)
    operands = *ops.quantize_col_t(g, *layout), *ops.quantize_col_t(x, *layout)
    yield ops.rowwise_wgrad, (*operands, *end)
    yield ops.bf16_wgrad, (g.bfloat16(), x.bfloat16(), *end)
    if offs is not None:
        weights = w, torch.randn(len(offs), 48, n), torch.randn_like(w)
        yield ops.blockwise_swiglu, (x.to(dtype), *weights, *layout)
        kept = *torch.randn(2, m, n), *ops.quantize_128x1_t(x, *layout)
        yield ops.blockwise_swiglu_backward, (torch.randn(m, 48), *kept, *weights, *end)


def outputs(op, args):
    result = op(*args)
    return result if isinstance(result, tuple) else (result,)


def test_every_op_is_called():
    called = {op.__name__ for op, _ in calls()}
    assert called == {name.split("::")[1] for name in registered()} == set(NAMES)


def registered() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {name.split(".")[0] for name in names if name.startswith("titan_fp8::")}


def signature(op, args) -> str:
    """The types and dimensions of the arguments, in words."""
    types = [f"{a.dim()}d" if isinstance(a, torch.Tensor) else str(a) for a in args]
    return ", ".join([op.__name__, *types])


CHECKED = {signature(*call): call for call in calls(tokens=[(257, 48)], gemms=[(257, 32, 48)])}
"""One call of each form."""


@pytest.mark.parametrize("call", CHECKED.values(), ids=CHECKED)
def test_opcheck(call):
    op, args = call
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(isinstance(a, torch.Tensor) and a.dtype == E4M3 for a in args):
        # It compares inputs by allclose, which FP8 lacks; the next test does so for every op.
        tests.append("test_schema")
    keywords = {} if op in PERMUTATION else {"emulate": True}
    torch.library.opcheck(op.default, args, keywords, test_utils=tests)


TAKES_HIGH_PRECISION = [
    call
    for call in CHECKED.values()
    if call[0].__name__.startswith(("quantize", "swiglu", "blockwise_swiglu"))
]


@pytest.mark.parametrize("change", [torch.Tensor.half, torch.Tensor.double, lambda x: x[..., 1:]])
@pytest.mark.parametrize("emulate", [False, True])
def test_what_a_kernel_would_misread_is_refused(change, emulate):
    assert {op.__name__ for op, _ in TAKES_HIGH_PRECISION} > {"quantize_row", "blockwise_swiglu"}
    for op, (x, *args) in TAKES_HIGH_PRECISION:
        x = change(x)
        words = f"titan_fp8::{op.__name__}: an input is {x.dtype} of shape {tuple(x.shape)}: "
        with pytest.raises(ValueError, match=re.escape(words)):
            op(x, *args, emulate=emulate)


def test_inputs_of_one_op_have_one_dtype():
    x, g = torch.randn(32, 48), torch.randn(32, 16, dtype=torch.bfloat16)
    for op in (ops.swiglu_1x128, ops.quantize_row_col_t_pair):
        with pytest.raises(ValueError, match="an input is torch.bfloat16"):
            op(x, g)


def test_outputs_are_as_the_fakes_say_and_inputs_as_they_were():
    for op, args in calls():
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        real = outputs(op, args)
        meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
        fake = outputs(op, meta)
        what = f"{op.__name__} of {tuple(args[0].shape)}"
        for got, said in zip(real, fake, strict=True):
            assert got.shape == said.shape and got.dtype == said.dtype, what
            if not got.numel():
                continue
            assert got.stride() == said.stride(), f"{what}: {got.stride()}, {said.stride()}"
            assert got.untyped_storage().nbytes() >= said.untyped_storage().nbytes(), what
        storages = {t.untyped_storage().data_ptr() for t in real if t.numel()}
        assert len(storages) == sum(t.numel() > 0 for t in real), f"{what}: outputs share memory"
        for arg, copy in zip(args, before, strict=True):
            if isinstance(arg, torch.Tensor):
                assert torch.equal(arg.float(), copy.float()), f"{what}: changed its input"
                assert not arg.numel() or arg.untyped_storage().data_ptr() not in storages, what


def test_non_contiguous_inputs_are_made_contiguous():
    x, a, b = (torch.randn(144, 300).t() for _ in range(3))
    calls = [(op, (x,)) for op in (ops.quantize_1x128, ops.quantize_row, *token_ops())]
    calls += [(ops.swiglu_1x128, (a, b)), (ops.swiglu_backward_1x128_128x1_t, (x, a, b))]
    for op, args in calls:
        contiguous = [t.contiguous() for t in args]
        for got, want in zip(op(*args), op(*contiguous), strict=True):
            assert torch.equal(got.float(), want.float()) and got.stride() == want.stride()
    index = torch.tensor([5, -1, 5, 299, 0])
    assert torch.equal(ops.gather_rows(x, index), ops.gather_rows(x.contiguous(), index))


# torch.compile


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
    """The op that forward quantises x with, where wgrad is to follow."""
    if recipe == "blockwise":
        return "quantize_1x128_128x1_t"
    return "quantize_row_col_t" if recipe == "rowwise" else "quantize_row"


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


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
    width = {"blockwise": 128, "rowwise": 48}
    assert fp8 == ({(144, width[recipe])} if recipe in width else set())
    assert ((40, 144) in high) == (recipe not in width)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("parameters", [True, False])
def test_eager_saves_no_quantised_weight(recipe, parameters):
    run, weights = three_linears(recipe, parameters)
    with saved_tensors() as saved:
        run(torch.randn(40, 144, requires_grad=True), *weights)
    assert_saved(saved, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_eager_grouped_mm_saves_no_quantised_weight(recipe):
    x, w = torch.randn(40, 144, requires_grad=True), torch.randn(2, 64, 144, requires_grad=True)
    with saved_tensors() as saved:
        fp8_grouped_mm(x, w, offsets(8, 40), recipe=recipe)
    # Unaligned: two groups of 40 tokens need 2 x 128 columns.
    assert [tuple(t.shape) for t in saved if t.dtype == E4M3] == (
        [] if recipe == "rowwise_with_gw_hp" else [(144, 256)]
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("parameters", [True, False])
def test_compiled_linears_share_the_quantised_input(recipe, parameters):
    """x quantised once; one frame, compiled once."""
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
    wgrad = {"rowwise_with_gw_hp": "bf16_wgrad"}.get(recipe, f"{recipe}_wgrad")
    backward = {quantizer(recipe): 3, f"{kind}_dgrad": 3, wgrad: 3}
    assert count_ops(graphs.backward[0]) == backward


@pytest.mark.parametrize("recipe", RECIPES)
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


@pytest.mark.parametrize("recipe", RECIPES)
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


def test_an_input_of_inference_mode():
    linear = nn.Linear(144, 32, bias=False)
    convert_linears(linear)
    with torch.inference_mode():
        x = torch.randn(40, 144, requires_grad=True)
        assert torch.equal(linear(x), fp8_linear(x, linear.weight))


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def test_op_level_checkpointing_saves_what_its_list_says():
    """Every GEMM saved, every quantiser recomputed, with an input that two layers share."""
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
