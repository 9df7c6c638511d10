"""The quantizers of the reference equal the oracle to the bit."""

import numpy as np
import oracle
import pytest
import torch
from numerics import (
    DTYPES,
    INF,
    NAN,
    QUANTIZING,
    awkward,
    check_both,
    check_columns,
    check_every_value,
    check_reciprocal,
    check_rows,
    check_weight,
    patchwork,
)
from shapes import SMALL_GROUPS, SMALL_QUANTIZE

from titan_fp8 import reference


def test_oracle_rounds_to_the_nearest():
    """The oracle's arithmetic against a search through all the values of e4m3."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(2000) * 2.0 ** rng.uniform(-12, 7, 2000)
    x = np.concatenate([x.clip(-448, 448), (oracle.GRID[1:] + oracle.GRID[:-1]) / 2, [0, -0.0]])
    x = x.astype(np.float32)
    distance = np.abs(np.abs(x.astype(np.float64))[:, None] - oracle.GRID)
    nearest = distance == distance.min(1, keepdims=True)
    even = nearest & (np.arange(127) % 2 == 0)
    nearest = np.where(nearest.sum(1) == 2, even.argmax(1), nearest.argmax(1))
    assert np.array_equal(oracle.encode(x), nearest + 128 * np.signbit(x))
    q = torch.from_numpy(oracle.DECODE.astype(np.float32))
    q = q.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(q[:127], np.arange(127)) and q[127] & 127 == 127


@pytest.mark.parametrize("recipe", QUANTIZING)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SMALL_QUANTIZE, ids=str)
def test_rows_and_columns(recipe, dtype, size):
    x = awkward(*size, dtype)
    check_rows(recipe, x)
    check_columns(recipe, x)
    check_both(recipe, x)


@pytest.mark.parametrize("recipe", QUANTIZING)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL_GROUPS)
def test_columns_of_groups(recipe, dtype, name):
    m, ends, aligned = SMALL_GROUPS[name]
    x = awkward(m, 144, dtype)
    x[ends[-1] :] = NAN
    check_columns(recipe, x, ends, aligned)
    check_both(recipe, x, ends, aligned)


@pytest.mark.parametrize("recipe", QUANTIZING)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(16, 16), (576, 144), (704, 208), (16, 10944), (10944, 16), (512, 512), (512, 640),
     (1, 144, 272), (5, 144, 32), (3, 512, 48), (2, 16, 640)],
    ids=str,
)  # fmt: skip
def test_weights(recipe, dtype, shape):
    w = awkward(int(np.prod(shape[:-1])), shape[-1], dtype).view(shape)
    check_weight(recipe, w)


@pytest.mark.parametrize("recipe", QUANTIZING)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_quantizers_keep_non_finite(recipe, dtype, value):
    x = patchwork(200, 272).to(dtype)
    x[3, 130], x[199, 271] = value, value
    check_rows(recipe, x)
    check_columns(recipe, x)
    check_columns(recipe, x, [60, 140, 200])
    check_weight(recipe, x[:192])
    check_weight(recipe, x[:192].view(2, 96, 272))


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_rounding(recipe):
    check_every_value(recipe)
    check_reciprocal(recipe)


def test_power_of_two_scales_are_kept_and_others_rounded_up():
    """Around powers of two, and at both ends of the range."""
    power = np.float32(2) ** np.arange(-48, 120, dtype=np.float32)
    amax = np.concatenate([448 * power, power, [0, 1e-20, 3e38]]).astype(np.float32)
    amax = np.concatenate([amax, np.nextafter(amax, np.float32(0)), np.nextafter(amax, np.inf)])
    s = reference.scale_of(torch.from_numpy(amax), "ue8m0").numpy()
    exact = np.maximum(amax, np.float32(1e-12)).astype(np.float64) / 448
    assert (s >= exact).all() and (s < 2 * exact).all() and (np.frexp(s)[0] == 0.5).all()
    with pytest.raises(ValueError, match="scale_fmt = 'e8m0': allowed are 'fp32' and 'ue8m0'"):
        reference.scale_of(torch.ones(1), "e8m0")


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_are_rounded_before_they_are_quantized(dtype, to):
    w = torch.randn(3, 144, 272).to(dtype)
    w[0, 5, 7], w[1, 130, 1] = NAN, INF
    got, want = reference.quantize_128x128(w, to), reference.quantize_128x128(w.to(to))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.float().nan_to_num(), b.float().nan_to_num())
        assert torch.equal(a.float().isnan(), b.float().isnan())
