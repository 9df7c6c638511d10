"""Products and their gradients agree with the oracle, in all dtypes, shapes and with NaN."""

import itertools

import numpy as np
import oracle
import pytest
import torch
from numerics import (
    DTYPES,
    GEMMS,
    INF,
    NAN,
    RECIPES,
    SPOILT,
    assert_product,
    check_autocast,
    check_bias_gradient,
    check_grouped,
    check_linear,
    check_non_finite,
    dense_case,
    grouped_case,
    offsets,
    patchwork,
    run,
)
from shapes import SMALL_GEMM, SMALL_GROUPS

from titan_fp8 import fp8_linear


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL_GEMM)
def test_linear(recipe, dtype, name):
    check_linear(recipe, *dense_case(*SMALL_GEMM[name], dtype))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL_GROUPS)
def test_grouped_mm(recipe, dtype, name):
    m, ends, aligned = SMALL_GROUPS[name]
    check_grouped(recipe, *grouped_case(m, ends, dtype=dtype), ends, aligned)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("n, k", [(576, 16), (16, 704), (10944, 16)])
def test_grouped_mm_of_ragged_weights(recipe, n, k):
    ends = [3, 7]
    check_grouped(recipe, *grouped_case(9, ends, n, k), ends)


@pytest.mark.parametrize("recipe", RECIPES)
def test_wide_magnitudes_outliers_and_zero_blocks(recipe):
    x, w, g = dense_case(140, 272, 400, reach=8)
    for t in (x, w, g):
        t[5, ::7] = 1e4
        t[:130, 128:256] = 0
    check_linear(recipe, x, w, g)
    ends = [3, 133, 140]
    check_grouped(recipe, x, torch.stack([w, -2 * w, w.flip(0)]), g, ends)


@pytest.mark.parametrize("recipe", RECIPES)
def test_aligned_changes_nothing_but_the_layout(recipe):
    m, ends, _ = SMALL_GROUPS["aligned"]
    case = (*grouped_case(m, ends), offsets(ends))
    said, unsaid = (run(*case, recipe=recipe, aligned=aligned) for aligned in (True, False))
    for gemm in GEMMS:
        torch.testing.assert_close(said[gemm], unsaid[gemm], rtol=0, atol=0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias(recipe, dtype):
    x, w, g = dense_case(70, 48, 144, dtype)
    bias = patchwork(1, 48, seed=9)[0].to(dtype)
    got, without = run(x, w, g, bias=bias, recipe=recipe), run(x, w, g, recipe=recipe)
    # The product has y's dtype when the bias is added to it: two roundings, each to the bit.
    assert torch.equal(got["fprop"], without["fprop"] + bias)
    assert torch.equal(got["dgrad"], without["dgrad"])
    assert torch.equal(got["wgrad"], without["wgrad"])
    check_bias_gradient(got["bias"], g, dtype)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 5), (0,), (2, 0)], ids=str)
def test_leading_dimensions(recipe, lead):
    m = int(np.prod(lead))
    x, w, g = dense_case(m, 48, 144)
    bias = patchwork(1, 48)[0]
    flat = run(x, w, g, bias=bias, recipe=recipe)
    got = run(x.view(*lead, 144), w, g.view(*lead, 48), bias=bias, recipe=recipe)
    assert got["fprop"].shape == (*lead, 48) and got["dgrad"].shape == (*lead, 144)
    for name, value in got.items():
        assert torch.equal(value.reshape(flat[name].shape), flat[name]), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_strides(recipe):
    """Transposed, sliced and expanded tensors give what their contiguous copies give."""
    x, w, g = dense_case(130, 48, 144)
    expected = run(x, w, g, recipe=recipe)

    def transposed(t):
        return t.mT.contiguous().mT

    def sliced(t):
        return torch.stack([t, -t], -1).flatten(-2)[..., ::2]

    for way in (transposed, sliced):
        assert not way(x).is_contiguous()
        got = run(way(x), way(w), way(g), recipe=recipe)
        assert all(torch.equal(got[gemm], expected[gemm]) for gemm in GEMMS), way.__name__
    ends = offsets([1, 70, 130])
    w = patchwork(3, 48, 144)
    expected = run(x, w, g, ends, recipe=recipe)
    for way in (transposed, sliced):
        got = run(way(x), way(w), way(g), ends, recipe=recipe)
        assert all(torch.equal(got[gemm], expected[gemm]) for gemm in GEMMS), way.__name__
    expanded = torch.ones(()).expand(130, 48)
    expected = run(x, w, expanded.contiguous(), ends, recipe=recipe)
    got = run(x, w, expanded, ends, recipe=recipe)
    assert all(torch.equal(got[gemm], expected[gemm]) for gemm in GEMMS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_expanded_gradient_of_a_sum(recipe):
    x, w, _ = dense_case(20, 32, 144)
    expected = oracle.layer(*map(oracle.array, (x, w, torch.ones(20, 32))), recipe)
    x.requires_grad_(), w.requires_grad_()
    fp8_linear(x, w, recipe=recipe).sum().backward()
    assert_product("dgrad", x.grad, expected["dgrad"], torch.float32)
    assert_product("wgrad", w.grad, expected["wgrad"], torch.float32)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3))[1:], ids=str)
def test_only_the_gradients_asked_for(recipe, needs):
    x, w, g = dense_case(40, 32, 144)
    leaves = [x, w, patchwork(1, 32)[0]]
    expected = run(x, w, g, bias=leaves[2], recipe=recipe)
    leaves = [t.detach().requires_grad_(need) for t, need in zip(leaves, needs)]
    y = fp8_linear(*leaves, recipe=recipe)
    assert torch.equal(y.detach(), expected["fprop"])
    y.backward(g)
    for name, leaf, need in zip(("dgrad", "wgrad", "bias"), leaves, needs):
        assert torch.equal(leaf.grad, expected[name]) if need else leaf.grad is None, name


def test_no_gradients():
    x, w, g = dense_case(40, 32, 144)
    expected = run(x, w, g)["fprop"]
    with torch.no_grad():
        y = fp8_linear(x, w.requires_grad_())
    assert torch.equal(y, expected) and not y.requires_grad


@pytest.mark.parametrize("recipe", RECIPES)
def test_emulate_is_the_cpu_path(recipe):
    x, w, g = dense_case(40, 32, 144, torch.bfloat16)
    offs = offsets([3, 30])
    for args in ((x, w, g), (x, torch.stack([w, -w]), g, offs)):
        got, expected = (run(*args, recipe=recipe, emulate=emulate) for emulate in (True, False))
        assert all(torch.equal(got[gemm], expected[gemm]) for gemm in GEMMS)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("spot", SPOILT["blockwise"], ids=str)
def test_non_finite(recipe, value, spot):
    check_non_finite(recipe, spot, value)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("x_dtype, w_dtype", list(itertools.product(DTYPES, repeat=2)))
def test_autocast(recipe, x_dtype, w_dtype):
    check_autocast(recipe, x_dtype, w_dtype)


@pytest.mark.parametrize("recipe", RECIPES)
def test_autocast_that_is_off(recipe):
    x, w, g = dense_case(20, 48, 144)
    expected = run(x, w, g, recipe=recipe)
    with torch.autocast("cpu", enabled=False):
        got = run(x, w, g, recipe=recipe)
    assert all(torch.equal(got[gemm], expected[gemm]) for gemm in GEMMS)


def test_settings_of_single_backends_are_kept():
    x, w, _ = dense_case(20, 48, 144)
    expected = fp8_linear(x, w)
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [backend.fp32_precision for backend in backends]
    try:
        for choice in (("tf32", "ieee"), ("ieee", "bf16")):
            for backend, precision in zip(backends, choice):
                backend.fp32_precision = precision
            assert torch.equal(fp8_linear(x, w), expected)
            assert tuple(backend.fp32_precision for backend in backends) == choice
    finally:
        for backend, precision in zip(backends, before):
            backend.fp32_precision = precision


def test_backward_outside_and_inside_autocast_are_the_same():
    x, w, g = dense_case(20, 48, 144)
    x.requires_grad_(), w.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = fp8_linear(x, w)
        inside = torch.autograd.grad(y, (x, w), g.bfloat16(), retain_graph=True)
    outside = torch.autograd.grad(y, (x, w), g.bfloat16())
    assert all(map(torch.equal, inside, outside))
