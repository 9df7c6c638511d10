"""The recipes on the kernels: power-of-two scales to the bit, quantized weights, every recipe."""

import pytest
import torch
from shapes import ODD_QUANTIZE

import titan_fp8
from titan_fp8 import reference
from titan_fp8.recipe import RECIPES

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from titan_fp8.kernels import hopper

DTYPES = (torch.bfloat16, torch.float32)
OFFS = torch.tensor([5, 5, 100], dtype=torch.int32)


def wide(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random magnitudes over the whole range, powers of two times 448, NaN and Inf."""
    x = torch.randn(shape, device="cuda") * 2.0 ** torch.randint(-60, 60, shape, device="cuda")
    x[::7] = 448 * 2.0 ** torch.randint(-20, 20, x[::7].shape, device="cuda")
    x[-1, -1], x[0, 0] = torch.nan, torch.inf
    return x.to(dtype)


def assert_same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a.float().nan_to_num(1e30), b.float().nan_to_num(1e30))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ODD_QUANTIZE, ids=str)
def test_power_of_two_scales_equal_the_reference(shape, dtype):
    x, options = wide(*shape, dtype=dtype), {"scale_fmt": "ue8m0"}
    for name in ("quantize_1x128", "quantize_128x128", "quantize_128x128_t"):
        assert_same(getattr(hopper, name)(x, **options), getattr(reference, name)(x, **options))
    for name in ("quantize_128x1_t", "quantize_1x128_128x1_t"):
        for layout in ((None, False), (OFFS.cuda(), False)):
            got = getattr(hopper, name)(x, *layout, **options)
            assert_same(got, getattr(reference, name)(x, *layout, **options))


def test_every_power_of_two_and_its_neighbors():
    """The kernel's 1 / s is an approximation that is exact for powers of two: each is tried."""
    power = 2.0 ** torch.arange(-40, 128, device="cuda", dtype=torch.float64)
    amax = torch.cat([power, 1.75 * power, 1.3 * power, 1.9 * power])
    amax = amax[amax < torch.finfo(torch.float32).max].float()
    amax = torch.cat([amax, amax.nextafter(amax.new_zeros(1)), amax.nextafter(amax + amax)])
    amax = amax[amax.isfinite()]
    x = torch.rand(len(amax), 128, device="cuda") * amax[:, None]
    x[:, 5] = amax
    want = reference.quantize_1x128(x, scale_fmt="ue8m0")
    assert_same(hopper.quantize_1x128(x, scale_fmt="ue8m0"), want)


def test_power_of_two_scales_of_swiglu():
    """The same h, da and db as with FP32 scales, so each scale is the next power of two."""
    dh, a, b = torch.randn(3, 384, 272, device="cuda", dtype=torch.bfloat16)
    got = hopper.swiglu_backward_1x128_128x1_t(dh, a, b, scale_fmt="ue8m0")
    got += hopper.swiglu_1x128(a, b, scale_fmt="ue8m0")
    exact = hopper.swiglu_backward_1x128_128x1_t(dh, a, b) + hopper.swiglu_1x128(a, b)
    for s, s_exact in zip(got[1::2], exact[1::2], strict=True):
        significand, exponent = torch.frexp(s_exact.cpu())
        exponent -= (significand == 0.5).int()
        assert torch.equal(s.cpu(), torch.ldexp(torch.ones(()), exponent))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("grouped", [False, True])
def test_every_recipe_is_its_emulation_and_takes_quantized_weights(recipe, grouped):
    m, n, k = 640, 272, 400
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    shape = (3, n, k) if grouped else (n, k)
    w = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    offs = torch.tensor([100, 300, 640], device="cuda", dtype=torch.int32)

    def step(weight, leaves, **options):
        if grouped:
            y = titan_fp8.fp8_grouped_mm(x, weight, offs, recipe=recipe, **options)
        else:
            y = titan_fp8.fp8_linear(x, weight, recipe=recipe, **options)
        return y.detach(), *torch.autograd.grad(y, leaves, g)

    kernels, emulated = step(w, (x, w)), step(w, (x, w), emulate=True)
    # Rowwise fprop and dgrad accumulate in about 14 bits.
    bound = 4e-3 if RECIPES[recipe].has_weight_blocks else 8e-3
    for got, want in zip(kernels, emulated, strict=True):
        error = (got.double() - want.double()).norm() / want.double().norm()
        assert error < bound
    quantized = titan_fp8.quantize_weight(w.detach(), recipe=recipe)
    assert all(map(torch.equal, step(quantized, (x,)), kernels[:2]))
