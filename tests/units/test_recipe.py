"""What the ops of a recipe produce; weights may come in FP8."""

import pytest
import torch
from count import Count

import titan_fp8
from titan_fp8 import reference
from titan_fp8.functional.swiglu import fp8_swiglu
from titan_fp8.layouts import cdiv
from titan_fp8.recipe import RECIPES, Recipe

M, N, K = 300, 144, 272
OFFS = torch.tensor([5, 5, 290], dtype=torch.int32)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_ops_produce_the_scales_that_the_recipe_names(recipe: Recipe):
    x, w = torch.randn(M, K), torch.randn(N, K)
    in_blocks = recipe.has_weight_blocks
    q, s = recipe.quantize_rows(x)
    assert q.shape == x.shape and s.shape == ((M, cdiv(K, 128)) if in_blocks else (M,))
    for quantize, (rows, columns) in (
        (recipe.quantize_weight, (N, K)),
        (recipe.quantize_weight_t, (K, N)),
    ):
        q, s = quantize(w)
        scales = (cdiv(rows, 128), cdiv(columns, 128)) if in_blocks else (rows,)
        assert q.shape == (rows, columns) and s.shape == scales
    operand = (x.bfloat16(),) if recipe.wgrad_in_bf16 else recipe.quantize_columns(x)
    assert recipe.wgrad(*operand, *operand).shape == (K, K)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_rows_and_columns_are_the_two_quantizers(recipe: Recipe):
    x = torch.randn(M, K)
    for offs in (None, OFFS):
        separate = *recipe.quantize_rows(x), *recipe.quantize_columns(x, offs)
        for a, b in zip(recipe.quantize_rows_and_columns(x, offs), separate, strict=True):
            assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_quantized_weight_gives_the_same_bits(recipe: str, grouped: bool, compiled: bool):
    torch.manual_seed(0)
    x = torch.randn(M, K, requires_grad=True)
    w = torch.randn(3, N, K, requires_grad=True) if grouped else torch.randn(N, K)
    quantized = titan_fp8.quantize_weight(w.detach(), recipe=recipe)
    assert quantized.shape == w.shape and not quantized.rows[0].requires_grad

    def multiply(weight):
        if grouped:
            return titan_fp8.fp8_grouped_mm(x, weight, OFFS, recipe=recipe)
        return titan_fp8.fp8_linear(x, weight, recipe=recipe)

    want = multiply(w)
    run = torch.compile(multiply, backend="aot_eager", fullgraph=True) if compiled else multiply
    got = run(quantized)
    g = torch.randn_like(want)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(y, x, g)[0] for y in (got, want)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_dgrad_reads_a_quantized_weight_as_it_lies(recipe: str, monkeypatch):
    """Also where the op is dispatched; its transpose is stored."""
    monkeypatch.setattr(reference, "transpose_fp8", lambda q: pytest.fail("transposed again"))
    x = torch.randn(M, K, requires_grad=True)
    weight = titan_fp8.quantize_weight(torch.randn(N, K), recipe=recipe)
    with Count():
        titan_fp8.fp8_linear(x, weight, recipe=recipe).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_feed_forward_takes_quantized_weights(recipe: str):
    x = torch.randn(40, 64, requires_grad=True)
    w1, w2, w3 = torch.randn(96, 64), torch.randn(32, 96, requires_grad=True), torch.randn(96, 64)
    quantized = [titan_fp8.quantize_weight(w, recipe=recipe) for w in (w1, w3)]
    got = fp8_swiglu(x, quantized[0], w2, quantized[1], recipe=recipe)
    want = fp8_swiglu(x, w1, w2, w3, recipe=recipe)
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05 * float(want.std()))
    got.sum().backward()
    assert x.grad is not None and w2.grad is not None


def test_a_weight_of_another_recipe_is_refused():
    quantized = titan_fp8.quantize_weight(torch.randn(N, K), recipe="blockwise")
    with pytest.raises(ValueError, match="weight was quantized for 'blockwise': the recipe is 'r"):
        titan_fp8.fp8_linear(torch.randn(4, K), quantized, recipe="rowwise")
    with pytest.raises(ValueError, match="weight has shape .* N = 17 and K = 16"):
        titan_fp8.quantize_weight(torch.randn(17, 16))
    for shape in ((16,), (2, 2, 16, 16)):
        with pytest.raises(ValueError, match=r"allowed are \(N, K\) and \(E, N, K\)"):
            titan_fp8.quantize_weight(torch.randn(shape))
    with pytest.raises(ValueError, match="recipe = 'fp8': allowed are 'blockwise'"):
        titan_fp8.quantize_weight(torch.randn(16, 16), recipe="fp8")


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_w1_and_w3_of_a_feed_forward_share_the_quantized_input(recipe: Recipe):
    x = torch.randn(40, 64, requires_grad=True)
    w1, w3 = torch.randn(2, 96, 64, requires_grad=True)
    w2 = torch.randn(32, 96, requires_grad=True)
    stage = recipe.quantize_rows if recipe.wgrad_in_bf16 else recipe.quantize_rows_and_columns
    with Count() as count:
        fp8_swiglu(x, w1, w2, w3, recipe=recipe.name)
    inputs = count.arguments[stage.name]
    assert sum(torch.equal(args[0], x) for args in inputs) == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_quantized_weight_must_have_the_shapes_of_its_recipe(recipe):
    x, w = torch.randn(3, 272), titan_fp8.quantize_weight(torch.randn(144, 272), recipe=recipe)
    (q, s), (q_t, s_t) = w.rows, w.columns
    for bad, message in (
        (w._replace(rows=(q, s[:1])), "weight.rows: scale is .* of shape"),
        (w._replace(rows=(q.view(torch.int8), s)), "weight.rows: q is torch.int8 of shape"),
        (w._replace(columns=(q, s_t)), "weight.columns: q is .* of shape"),
        (w._replace(columns=(q_t, s_t.double())), "weight.columns: scale is torch.float64"),
    ):
        with pytest.raises(ValueError, match=message):
            titan_fp8.fp8_linear(x, bad, recipe=recipe)
