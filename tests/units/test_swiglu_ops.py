"""The SwiGLU ops: their values against FP64, and their outputs against the quantizers'."""

import numpy as np
import pytest
import torch
from numerics import DTYPES, INF, NAN, offsets
from shapes import SMALL_GROUPS
from torch.nn import functional as F

from titan_fp8 import reference

ops = torch.ops.titan_fp8


def swiglu_case(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """dh, a and b (300, 272): every range of a, the zero of the gradient at -1.278 among them."""
    dh, a, b = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 300, 272)))
    a *= torch.tensor([0.1, 1, 10, 100]).repeat(68)
    a[:100] = torch.linspace(-1.4, -1.2, 272)
    return dh.to(dtype), a.to(dtype), b.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_and_its_gradient_are_those_of_fp64(dtype):
    """To 2^-19 of the terms that each is the sum of, and half an ulp of a bf16 result."""
    dh, a, b = swiglu_case(dtype)
    a64, b64 = a.double().requires_grad_(), b.double().requires_grad_()
    h = F.silu(a64) * b64
    da, db = torch.autograd.grad(h, (a64, b64), dh.double())
    sigma = torch.sigmoid(a.double())
    terms = dh.double() * b.double() * sigma * (1 + a.double().abs() * (1 - sigma))
    got = reference.swiglu(a, b), *reference.swiglu_backward(dh, a, b)
    half_ulp = 2**-8 if dtype == torch.bfloat16 else 0
    for x, want, size in zip(got, (h, da, db), (h, terms, db), strict=True):
        assert x.dtype == dtype
        error = (x.double() - want.detach()).abs()
        assert (error <= 2**-19 * size.abs() + half_ulp * want.abs() + 1e-36).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["unaligned", "aligned", "no token"])
def test_swiglu_ops_are_their_parts(name, dtype):
    m, ends, aligned = SMALL_GROUPS[name]
    dh, a, b = (t[:m].repeat(2, 1)[:m] for t in swiglu_case(dtype))
    h, (da, db) = reference.swiglu(a, b), reference.swiglu_backward(dh, a, b)
    assert_codes_equal(ops.swiglu_1x128(a, b), ops.quantize_1x128(h))
    for layout in ((), (offsets(ends), aligned)):
        both = [ops.quantize_1x128_128x1_t(t, *layout) for t in (da, db)]
        want = *both[0], *both[1], *ops.quantize_128x1_t(h, *layout)
        assert_codes_equal(ops.swiglu_backward_1x128_128x1_t(dh, a, b, *layout), want)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_scores_are_those_of_fp64(before, dtype):
    """To the rounding of operands, h and da; the gradient of a score of zero is zero."""
    g, a, b = (t.double() for t in swiglu_case(dtype))
    scores = 0.5 + torch.rand(len(a), dtype=torch.float64)
    factor = scores[:, None].requires_grad_()
    rows = (a * factor, b * factor) if before else (a, b)
    h = F.silu(rows[0]) * rows[1]
    (want,) = torch.autograd.grad(h if before else h * factor, factor, g)
    dh = g if before else g * factor
    operands = [t.detach().to(dtype) for t in (dh, *rows)]
    terms = (dh * h).abs().sum(1) + before * (dh * rows[0] * rows[1]).abs().sum(1)
    got = ops.swiglu_dscores(*operands, scores.float(), before)
    assert got.dtype == torch.float32
    unit = 2**-6 if dtype == torch.bfloat16 else 2**-19
    assert ((got - want[:, 0]).abs() <= unit * terms / scores).all()
    assert not ops.swiglu_dscores(*operands, 0 * scores.float(), before).any()


def assert_codes_equal(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape and torch.equal(x.float(), y.float())


@pytest.mark.parametrize("a", [NAN, INF, -INF, 3e38, -3e38, 100.0, -100.0, 88.0, -88.0, 0.0])
def test_swiglu_of_the_ends_of_the_range(a):
    """NaN where silu is NaN; no NaN where σ is 0 or smaller than a normal number."""
    x = torch.tensor([[a] * 16], dtype=torch.bfloat16)
    one = torch.ones_like(x)
    h, (da, db) = reference.swiglu(x, one), reference.swiglu_backward(one, x, one)
    silu = F.silu(x.double())
    assert torch.equal(h.isnan(), silu.isnan()) and torch.equal(db.isnan(), silu.isnan())
    assert bool(da.isnan().all()) == (not np.isfinite(a))
    if np.isfinite(a):
        # Beyond -88.7 e^-a is Inf in FP32.
        assert torch.equal(h, silu.bfloat16() if a > -88.7 else torch.zeros_like(h))
