"""What an observer measures of the operands of FP8 products, against the oracle's quantizers."""

import collections
import functools

import numpy as np
import oracle
import pytest
import torch
from count import CountKernels
from numerics import (
    DTYPES,
    INF,
    NAN,
    QUANTIZING,
    RECIPES,
    dense_case,
    grouped_case,
    offsets,
)
from shapes import SMALL_GROUPS
from torch import nn

from titan_fp8 import convert_linears, fp8_grouped_mm, fp8_linear, reference
from titan_fp8.functional.swiglu import fp8_swiglu
from titan_fp8.functional.weights import GatheredWeight
from titan_fp8.health import Layer, Observer, observer, sampling
from titan_fp8.health.observer import OPERANDS
from titan_fp8.health.statistics import Stat
from titan_fp8.ops import observe, registry

KERNELS_PER_LINEAR = 24
"""Those that an observed step launches for each linear, besides those for all of them."""


@pytest.fixture(autouse=True)
def nobody_observes():
    yield
    observe(None)


@pytest.fixture
def all_rows(monkeypatch):
    """Every row is sampled."""
    monkeypatch.setattr(observer, "SAMPLED_ROWS", 1 << 30)


def layer(w: torch.Tensor, name: str = "layer") -> Layer:
    module = nn.Module()
    module.weight = nn.Parameter(w.clone())
    return Layer(name, module, "weight")


def observed(step, *layers: Layer, phase: int = 0):
    """The table (layers, OPERANDS, Stat) of one call of `step`, and the tokens per expert."""
    watching = Observer(layers, phase=phase)
    observe(watching.wrap)
    step()
    observe(None)
    return watching.table()


def product_of(layer: Layer, x, g, *offs, **options):
    product = fp8_grouped_mm if offs else fp8_linear
    y = product(x.detach().requires_grad_(), layer.module.weight, *offs, **options)
    y.backward(g.to(y.dtype))


def parts(x: torch.Tensor, ends: list[int] | None) -> list[np.ndarray]:
    slices = oracle.groups(None if ends is None else np.array(ends), len(x))
    return [oracle.array(x)[rows] for rows in slices]


def expected_operands(x, w, g, recipe: str, ends: list[int] | None = None) -> dict[str, list]:
    """For each operand what is quantized, and the oracle's result, by group."""
    xs, gs = parts(x, ends), parts(g, ends)
    ws = [oracle.array(each) for each in (w if w.dim() == 3 else w[None])]

    def quantized(arrays, quantizer, *args):
        return [(a, quantizer(a, recipe, *args)) for a in arrays]

    found = {
        "x fprop": quantized(xs, oracle.rows),
        "w fprop": quantized(ws, oracle.weight, "fprop"),
        "g dgrad": quantized(gs, oracle.rows),
        "w dgrad": quantized(ws, oracle.weight, "dgrad"),
    }
    if recipe != "rowwise_with_gw_hp":
        found |= {
            "g wgrad": quantized(gs, oracle.columns),
            "x wgrad": quantized(xs, oracle.columns),
        }
    return found


def statistics(groups: list) -> dict[Stat, float]:
    found = collections.Counter()
    scales = []
    for x, q in groups:
        x, codes = x.astype(np.float64), q.codes & 127
        finite = np.isfinite(q.scales)
        nonzero = (x != 0) & finite
        error = np.where(finite, q.values - x, 0)
        found[Stat.NONZERO] += nonzero.sum()
        found[Stat.UNDERFLOW] += (nonzero & (codes == 0)).sum()
        found[Stat.AT_MAX] += (nonzero & (codes == 126)).sum()
        found[Stat.ERROR] += np.square(error).sum()
        found[Stat.SQUARES] += np.square(np.where(finite, x, 0)).sum()
        used = q.block_scales[q.block_scales > 2e-12 / 448]
        scales.append(used[np.isfinite(used)])
    every = np.concatenate([each.ravel() for each in scales])
    if every.size:
        found[Stat.LOG2_MAX], found[Stat.LOG2_MIN] = np.log2(every.max()), -np.log2(every.min())
    return found


def assert_as_expected(table: torch.Tensor, operands: dict[str, list]) -> None:
    for operand, row in zip(OPERANDS, table):
        if operand not in operands:
            assert not row[Stat.BLOCKS], operand
            continue
        want = statistics(operands[operand])
        assert row[Stat.BLOCKS] or not want[Stat.NONZERO]
        for stat in (Stat.NONZERO, Stat.UNDERFLOW, Stat.AT_MAX):
            assert row[stat] == want[stat], (operand, stat.name)
        rounding = 1e-12 * want[Stat.SQUARES]
        assert row[Stat.ERROR].item() == pytest.approx(want[Stat.ERROR], rel=1e-4, abs=rounding)
        for stat in (Stat.SQUARES, Stat.LOG2_MAX, Stat.LOG2_MIN):
            if want[Stat.NONZERO]:
                assert row[stat].item() == pytest.approx(want[stat], rel=1e-4), (operand, stat.name)


# The statistics


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(130, 576, 144), (300, 272, 208), (1, 16, 16)], ids=str)
def test_a_linear(all_rows, recipe, dtype, shape):
    x, w, g = dense_case(*shape, dtype, reach=8)
    x[0, :] = 0  # blocks of zeros
    g[len(g) // 2, ::3] *= 1e-9
    one = layer(w)
    table, _ = observed(lambda: product_of(one, x, g, recipe=recipe), one)
    operands = expected_operands(x, w, g, recipe)
    assert_as_expected(table[0], operands)
    underflow = [statistics(groups)[Stat.UNDERFLOW] for groups in operands.values()]
    assert shape[0] == 1 or max(underflow) > 0


@pytest.mark.parametrize("recipe", QUANTIZING)
@pytest.mark.parametrize("name", ["unaligned", "rows past the end", "end beyond M", "aligned"])
def test_groups(all_rows, recipe, name):
    m, ends, aligned = SMALL_GROUPS[name]
    x, w, g = grouped_case(m, ends)
    one, options = layer(w), {"recipe": recipe, "aligned": aligned}
    table, tokens = observed(lambda: product_of(one, x, g, offsets(ends), **options), one)
    assert_as_expected(table[0], expected_operands(x, w, g, recipe, ends))
    assert not table[..., Stat.NON_FINITE].any()  # rows of no group hold NaN
    assert [each.tolist() for each in tokens[0]] == [np.diff([0, *ends]).tolist()]


def test_experts_without_tokens():
    """Their weights are read, and that they have none is counted."""
    one = layer(torch.randn(2, 128, 128))
    step = functools.partial(product_of, one, torch.empty(0, 128), torch.empty(0, 128))
    table, tokens = observed(lambda: step(offsets([0, 0])), one)
    seen = [name for name, row in zip(OPERANDS, table[0]) if row[Stat.BLOCKS]]
    assert seen == ["w fprop", "w dgrad"] and [each.tolist() for each in tokens[0]] == [[0, 0]]


@pytest.mark.parametrize("ends", [None, [128, 128, 384]], ids=["dense", "grouped"])
def test_a_feed_forward(all_rows, ends):
    shapes = [(144, 96), (96, 144), (144, 96)]
    lead = () if ends is None else (len(ends),)
    weights = [torch.randn(*lead, *shape) for shape in shapes]
    layers = [layer(w, f"w{i + 1}") for i, w in enumerate(weights)]
    x, g = torch.randn(384, 96), torch.randn(384, 96)
    offs = None if ends is None else offsets(ends)

    def step():
        inputs = x.clone().requires_grad_(), *(each.module.weight for each in layers)
        fp8_swiglu(*inputs, offs, aligned=True).backward(g)

    table, _ = observed(step, *layers)
    recipe = "blockwise"
    blocks = parts(x, ends)
    expected = {
        "x fprop": statistics([(each, oracle.rows(each, recipe)) for each in blocks]),
        "x wgrad": statistics([(each, oracle.columns(each, recipe)) for each in blocks]),
    }
    for row, w in enumerate(weights):
        matrices = [oracle.array(each) for each in (w if w.dim() == 3 else w[None])]
        quantized = [(each, oracle.weight(each, recipe, "fprop")) for each in matrices]
        expected["w fprop"] = statistics(quantized)
        for operand, want in expected.items():
            if operand == "w fprop" or row != 1:  # w2 reads h
                got = table[row, OPERANDS.index(operand)]
                assert got[Stat.NONZERO] == want[Stat.NONZERO]
                assert got[Stat.ERROR].item() == pytest.approx(want[Stat.ERROR], rel=1e-4)
    # Of h and the gradients: the error is that of four bits, as it would not be of other places.
    errors = (table[..., Stat.ERROR] / table[..., Stat.SQUARES]).sqrt()
    assert (table[..., Stat.NONZERO] > 0).all()
    assert ((errors > 0.02) & (errors < 0.03)).all(), errors


def test_nan_and_inf_are_counted_and_spoil_nothing_else(all_rows):
    x, w, g = dense_case(256, 256, 256)
    x[3, 5], g[200, 130] = NAN, INF
    one = layer(w)
    table, _ = observed(lambda: product_of(one, x, g), one)
    blocks = table[0, :, Stat.NON_FINITE].tolist()
    assert blocks == [1, 0, 1, 0, 1, 1]
    assert table.isfinite().all()
    assert table[0, 0, Stat.NONZERO] == 256 * 256 - 128


def test_some_rows_are_sampled_and_steps_take_others():
    x, w, g = dense_case(1024, 512, 256)
    seen = set()
    for phase in range(3):
        one = layer(w)
        table, _ = observed(lambda one=one: product_of(one, x, g), one, phase=phase)
        assert table[0, 0, Stat.NONZERO] == observer.SAMPLED_ROWS * 256
        assert table[0, 0, Stat.BLOCKS] == 1024 * 2  # all scales
        seen.add(table[0, 0, Stat.ERROR].item())
    assert len(seen) == 3


def test_what_waits_is_bounded(monkeypatch):
    x, w, g = dense_case(256, 128, 128)
    layers = [layer(w, str(i)) for i in range(4)]

    def step():
        for each in layers:
            product_of(each, x, g)

    expected, _ = observed(step, *layers)
    monkeypatch.setattr(sampling, "PENDING_BYTES", 1000)
    table, _ = observed(step, *layers)
    torch.testing.assert_close(table, expected)


# Whose an operand is


def mlp(recipe: str) -> tuple[nn.Module, list[Layer]]:
    """Layers of like shapes, two of which read one input."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.wq, self.wk, self.wo = (nn.Linear(128, 128, bias=False) for _ in range(3))

        def forward(self, x):
            return x + self.wo(self.wq(x) * self.wk(x))

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    convert_linears(model, recipe=recipe)
    names = {m: n for n, m in model.named_modules()}
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return model, [Layer(names[m], m, "weight") for m in linears]


def train(model, x) -> None:
    model.zero_grad()
    model(x.clone().requires_grad_()).square().mean().backward()


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_layers_that_share_an_input_and_a_shape(all_rows, recipe):
    model, layers = mlp(recipe)
    x = torch.randn(256, 128)
    inputs, gradients = {}, {}
    for name, linear, _ in layers:
        keep = functools.partial(lambda name, _, args, y: inputs.update({name: args[0]}), name)
        linear.register_forward_hook(keep)
        keep = functools.partial(lambda name, _, dx, g: gradients.update({name: g[0]}), name)
        linear.register_full_backward_hook(keep)
    table, _ = observed(lambda: train(model, x), *layers)
    for row, (name, linear, _) in enumerate(layers):
        operands = expected_operands(inputs[name], linear.weight, gradients[name], recipe)
        assert_as_expected(table[row], operands)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", QUANTIZING)
def test_layers_of_equal_weights_under_autocast_are_told_apart(all_rows, recipe, compiled):
    torch._dynamo.reset()
    model, layers = mlp(recipe)
    for block in model:
        block.load_state_dict(model[0].state_dict())
        block.wk.weight = nn.Parameter(block.wq.weight.detach().clone())
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    x = torch.randn(256, 128)
    inputs, gradients, handles = {}, {}, []
    for name, linear, _ in layers:
        keep = functools.partial(lambda name, _, args, y: inputs.update({name: args[0]}), name)
        handles.append(linear.register_forward_hook(keep))
        keep = functools.partial(lambda name, _, dx, g: gradients.update({name: g[0]}), name)
        handles.append(linear.register_full_backward_hook(keep))
    with torch.autocast("cpu", torch.bfloat16):
        train(model, x)
        for handle in handles:
            handle.remove()
        table, _ = observed(lambda: train(run, x), *layers)
    for row, (name, linear, _) in enumerate(layers):
        operands = inputs[name], linear.weight, gradients[name]
        rounded = [each.detach().bfloat16() for each in operands]
        assert_as_expected(table[row], expected_operands(*rounded, recipe))


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_layers_that_share_a_parameter_report_the_same(all_rows, recipe):
    model, layers = mlp(recipe)
    alone, _ = observed(lambda: train(model, torch.randn(256, 128)), *layers[:1])
    model[0].wk.weight = model[0].wq.weight
    table, _ = observed(lambda: train(model, torch.randn(256, 128)), *layers)
    assert (table[..., Stat.NONZERO] > 0).all()
    torch.testing.assert_close(table[0], table[1], rtol=0, atol=0)
    of_w = OPERANDS.index("w fprop"), Stat.BLOCKS
    assert table[0][of_w] == 2 * alone[0][of_w]  # quantized for each of the two


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_compiled_code_is_seen_as_eager_code_is(recipe):
    torch._dynamo.reset()
    model, layers = mlp(recipe)
    x = torch.randn(256, 128)
    expected, _ = observed(lambda: train(model, x), *layers)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(compiled, x)
    table, _ = observed(lambda: train(compiled, x), *layers)
    assert (table[..., Stat.NONZERO] > 0).all()
    torch.testing.assert_close(table, expected, rtol=1e-3, atol=1e-9)


def test_recomputed_layers_are_seen():
    model, layers = mlp("blockwise")
    x = torch.randn(256, 128)
    expected, _ = observed(lambda: train(model, x), *layers)

    def step():
        y = torch.utils.checkpoint.checkpoint(
            model, x.clone().requires_grad_(), use_reentrant=False
        )
        y.square().mean().backward()

    table, _ = observed(step, *layers)
    shares = [t[..., Stat.ERROR] / t[..., Stat.SQUARES] for t in (table, expected)]
    torch.testing.assert_close(*shares)


def test_a_gathered_weight_where_another_was_quantized():
    """Its memory may be that of the FP8 copy of another layer's weight."""
    first, second = (layer(torch.randn(128, 128), name) for name in ("first", "second"))
    x = torch.randn(256, 128)
    copies: list[torch.Tensor] = []

    def step():
        impl = registry.implementation(x, emulate=True)
        w = first.module.weight.detach()
        q, s = impl.quantize_128x128(w)
        a, sa = impl.quantize_1x128(x)
        impl.blockwise_fprop(a, sa, w)
        second.module.weight = nn.Parameter(GatheredWeight(q, s, s.mT, torch.float32))
        b, sb = impl.quantize_1x128(2 * x)
        impl.blockwise_fprop(b, sb, q, w_scale=s)
        copies.extend((q, a, b))

    table, _ = observed(step, first, second)
    blocks = table[:, OPERANDS.index("x fprop"), Stat.BLOCKS].tolist()
    assert blocks == [256, 256]
    largest = table[:, OPERANDS.index("x fprop"), Stat.LOG2_MAX]
    assert (largest[1] - largest[0]).item() == pytest.approx(1)


def test_layers_that_are_not_asked_for_are_left_out():
    model, layers = mlp("blockwise")
    x = torch.randn(256, 128)
    table, _ = observed(lambda: train(model, x), *layers[1:2])
    assert (table[..., Stat.NONZERO] > 0).all()
    table, _ = observed(lambda: train(model, x))
    assert table.shape == (0, len(OPERANDS), len(Stat))
    watching = Observer(layers, observing=lambda: False)
    observe(watching.wrap)
    train(model, x)
    assert not watching.table()[0][..., Stat.BLOCKS].any()


# What it costs


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_launches(recipe):
    model, layers = mlp(recipe)
    model = model.bfloat16()
    x = torch.randn(512, 128, dtype=torch.bfloat16)

    def count(step) -> collections.Counter:
        with CountKernels() as kernels:
            step()
        return kernels.calls

    step = functools.partial(train, model, x)
    before = count(step)
    watching = Observer(layers)
    observe(watching.wrap)
    during = count(step)
    observe(None)
    assert count(step) == before, "nothing must be left of an observer"
    assert 0 < (during - before).total() <= KERNELS_PER_LINEAR * len(layers)
    assert count(watching.table).total() < 200  # for any number of layers of these shapes


def test_memory_of_a_quantizer_that_a_gather_of_rows_reuses_belongs_to_no_layer(monkeypatch):
    x, w = torch.randn(128, 256), torch.randn(1, 256, 256)
    ends, index = offsets([128]), torch.arange(128).int()
    of_weight = layer(w)
    for gathers in (False, True):
        watching = Observer([of_weight])
        ops = watching.wrap(reference)
        q, s, *columns = ops.quantize_1x128_128x1_t(x, ends, True)
        if gathers:
            in_place = lambda *args, **options: (q, s, *columns)  # noqa: E731, B023
            monkeypatch.setattr(reference, "gather_1x128_128x1_t", in_place)
            ops.gather_1x128_128x1_t(q, s, index, ends)
        ops.blockwise_fprop(q, s, of_weight.module.weight, ends, True, x.dtype, x.dtype, None)
        table, _ = watching.table()
        assert bool(table[0, OPERANDS.index("x fprop"), Stat.NONZERO]) != gathers


def test_memory_of_columns_that_experts_without_tokens_reuse_belongs_to_no_layer(monkeypatch):
    """Columns of no tokens have a size where groups are padded, and so an address."""
    g, x, w = torch.randn(128, 256), torch.randn(128, 256), torch.randn(1, 256, 256)
    ends, of_weight = offsets([128]), layer(w)
    for reuses in (False, True):
        watching = Observer([of_weight])
        ops = watching.wrap(reference)
        g_q, g_s, g_t, g_s_t = ops.quantize_1x128_128x1_t(g, ends, True)
        x_t, x_s_t = ops.quantize_128x1_t(x, ends, True)
        if reuses:
            in_place = lambda *args, **options: (x_t, x_s_t)  # noqa: E731, B023
            with monkeypatch.context() as patch:
                patch.setattr(reference, "quantize_128x1_t", in_place)
                watching.wrap(reference).quantize_128x1_t(x[:0], offsets([0]), True)
        weight = of_weight.module.weight
        ops.blockwise_dgrad(g_q, g_s, weight, ends, True, g.dtype, g.dtype, None)
        ops.blockwise_wgrad(g_t, g_s_t, x_t, x_s_t, ends, True, x.dtype)
        table, _ = watching.table()
        assert table[0, OPERANDS.index("g dgrad"), Stat.NONZERO]
        assert bool(table[0, OPERANDS.index("x wgrad"), Stat.NONZERO]) != reuses
