"""The definition of the numerics against the oracle: quantisers to the bit, products by tolerance.

The quantisers run as ops and the products through `fp8_linear` and `fp8_grouped_mm` with autograd,
so that what is judged is what a layer calls. The functions `check_*` are shared with
`test_mutations.py`, which breaks the reference and expects them to fail.
"""

import itertools
import re

import numpy as np
import oracle
import pytest
import torch
from torch.nn import functional as F

from titan_fp8 import fp8_grouped_mm, fp8_linear, reference

ops = torch.ops.titan_fp8
RECIPES = ("blockwise", "rowwise", "rowwise_with_gw_hp")
DTYPES = (torch.bfloat16, torch.float32)
NAN, INF = float("nan"), float("inf")

SHAPES = {
    "one tile": (16, 16, 16),
    "one token": (1, 128, 144),
    "ragged tokens": (130, 576, 144),
    "ragged K": (77, 144, 704),
    "ragged N": (9, 704, 48),
    "all ragged": (257, 272, 208),
    "four blocks": (512, 512, 512),
    "long K": (3, 16, 10944),
    "long N": (3, 10944, 16),
    "no token": (0, 32, 48),
}
"""M, N, K of dense products."""

GROUPS = {
    "unaligned": (301, [1, 130, 130, 300, 301], False),
    "rows past the end": (260, [5, 200], False),
    "end beyond M": (150, [100, 1000, 2000], False),
    "all in one": (200, [0, 0, 200, 200], False),
    "none in any": (50, [0, 0], False),
    "one group": (129, [129], False),
    "no token": (0, [0, 0, 0], False),
    "aligned, not said": (384, [128, 128, 384], False),
    "aligned": (384, [128, 128, 384], True),
    "aligned, rows past the end": (300, [0, 128, 256], True),
    "aligned, end beyond M": (200, [128, 256], True),
    "multiples of 16": (90, [16, 48, 48, 80], False),
    "many empty": (140, [0] * 7 + [3] + [140] * 8, False),
}
"""M, group ends, and whether the ops are told that these are aligned."""


def patchwork(*shape: int, seed: int = 0, reach: int = 2) -> torch.Tensor:
    """Gaussian FP32, each 128x128 tile, row and column with its own magnitude, 2^±reach."""
    rng = np.random.default_rng(seed)
    *lead, r, c = shape

    def magnitudes(rows, columns):
        return 2.0 ** rng.uniform(-reach, reach, (*lead, rows, columns))

    tiles = magnitudes(-(-r // 128), -(-c // 128))
    tiles = tiles.repeat(128, -2).repeat(128, -1)[..., :r, :c]
    x = rng.standard_normal(shape) * tiles * magnitudes(r, 1) * magnitudes(1, c)
    return torch.from_numpy(x.astype(np.float32))


def offsets(ends: list[int]) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


# Checks


def assert_codes(name: str, q: torch.Tensor, expected: np.ndarray) -> None:
    """Bit for bit; of NaN the position counts, not the sign."""
    assert q.dtype == torch.float8_e4m3fn and q.is_contiguous(), name
    got = q.view(torch.uint8).numpy()
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
    same = (got == expected) | ((got & 127 == 127) & (expected & 127 == 127))
    assert same.all(), f"{name}: {np.sum(~same)} codes differ, first at {np.argwhere(~same)[0]}"


def assert_scales(name: str, s: torch.Tensor, expected: np.ndarray, stride: tuple | None) -> None:
    """Bit for bit, in a layout of this stride (None: contiguous)."""
    assert s.dtype == torch.float32, name
    got = s.numpy()
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    assert same.all(), f"{name}: {np.sum(~same)} scales differ, first at {np.argwhere(~same)[0]}"
    if stride is None:
        assert s.is_contiguous(), name
    elif s.numel():
        assert s.stride() == stride, f"{name}: scales have stride {s.stride()}, not {stride}"


def stride_1x128(rows: int) -> tuple[int, int]:
    return 1, -(-rows // 4) * 4


def stride_128x128(row_blocks: int, column_blocks: int, lead: int) -> tuple[int, ...]:
    padded = -(-column_blocks // 4) * 4
    return (*[row_blocks * padded] * lead, padded, 1)


def check_rows(recipe: str, x: torch.Tensor) -> None:
    q, s = (ops.quantize_1x128 if recipe == "blockwise" else ops.quantize_row)(x)
    expected = oracle.rows(oracle.array(x), recipe)
    assert_codes("rows", q, expected.codes)
    if recipe == "blockwise":
        assert_scales("rows", s, expected.block_scales, stride_1x128(len(x)))
    else:
        assert_scales("rows", s, expected.block_scales[:, 0], None)


def check_columns(
    recipe: str, x: torch.Tensor, ends: list[int] | None = None, aligned: bool = False
) -> None:
    offs = None if ends is None else offsets(ends)
    blockwise = recipe == "blockwise"
    q, s = (ops.quantize_128x1_t if blockwise else ops.quantize_col_t)(x, offs, aligned)
    codes, scales = oracle.transposed(oracle.array(x), recipe, ends, aligned)
    assert_codes("columns", q, codes)
    assert_scales("columns", s, scales, stride_1x128(x.shape[1]) if blockwise else None)


def check_both(
    recipe: str, x: torch.Tensor, ends: list[int] | None = None, aligned: bool = False
) -> None:
    """The quantiser of rows and columns in one is those of either."""
    offs = None if ends is None else offsets(ends)
    if recipe == "blockwise":
        both, rows, columns = ops.quantize_1x128_128x1_t, ops.quantize_1x128, ops.quantize_128x1_t
    else:
        both, rows, columns = ops.quantize_row_col_t, ops.quantize_row, ops.quantize_col_t
    for got, want in zip(both(x, offs, aligned), (*rows(x), *columns(x, offs, aligned))):
        assert got.stride() == want.stride() and got.dtype == want.dtype
        torch.testing.assert_close(
            got.float(), want.float(), rtol=0, atol=0, equal_nan=True, msg="rows and columns"
        )


def check_weight(recipe: str, w: torch.Tensor) -> None:
    """W in fprop's and, transposed, in dgrad's layout; (N, K) or (E, N, K)."""
    blockwise = recipe == "blockwise"
    q, s = (ops.quantize_128x128 if blockwise else ops.quantize_row)(w)
    q_t, s_t = (ops.quantize_128x128_t if blockwise else ops.quantize_weight_col_t)(w)
    groups = oracle.array(w).reshape(-1, *w.shape[-2:])
    fprop = [oracle.weight(w_e, recipe, "fprop") for w_e in groups]
    dgrad = [oracle.weight(w_e, recipe, "dgrad") for w_e in groups]

    def stack(arrays):
        return np.stack(arrays).reshape(*w.shape[:-2], *arrays[0].shape)

    assert_codes("weight", q, stack([e.codes for e in fprop]))
    assert_codes("weight, transposed", q_t, stack([e.codes.T for e in dgrad]))
    if blockwise:
        n, k = fprop[0].block_scales.shape
        stride, stride_t = stride_128x128(n, k, w.dim() - 2), stride_128x128(k, n, w.dim() - 2)
        assert_scales("weight", s, stack([e.block_scales for e in fprop]), stride)
        assert_scales("weight, transposed", s_t, stack([e.block_scales.T for e in dgrad]), stride_t)
    else:
        assert_scales("weight", s, stack([e.block_scales[:, 0] for e in fprop]), None)
        assert_scales("weight, transposed", s_t, stack([e.block_scales[0] for e in dgrad]), None)


def assert_product(
    name: str, got: torch.Tensor, expected: oracle.Product, dtype: torch.dtype
) -> None:
    """Within the tolerance of the oracle, and non-finite exactly where the oracle is."""
    assert got.dtype == dtype, f"{name} is {got.dtype}, not {dtype}"
    value = got.detach().double().numpy()
    assert value.shape == expected.value.shape, f"{name} has shape {value.shape}"
    finite = np.isfinite(expected.value)
    wrong = np.isfinite(value) != finite
    assert not wrong.any(), f"{name}: {wrong.sum()} elements finite or not against the oracle"
    error = np.abs(value - expected.value)[finite]
    excess = error > expected.tolerance(dtype)[finite]
    assert not excess.any(), f"{name}: {excess.sum()} of {excess.size} elements beyond tolerance"


def run(x, w, g, *offs, bias=None, **options) -> dict[str, torch.Tensor]:
    """y and the gradients of fp8_linear or, with offs, of fp8_grouped_mm, named by GEMM."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    leaves = {"dgrad": x, "wgrad": w}
    if offs:
        y = fp8_grouped_mm(x, w, *offs, **options)
    else:
        if bias is not None:
            leaves["bias"] = bias = bias.detach().requires_grad_()
        y = fp8_linear(x, w, bias, **options)
    y.backward(g.to(y.dtype))
    return {"fprop": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


GEMMS = ("fprop", "dgrad", "wgrad")


def check_linear(
    recipe: str, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, gemms: tuple = GEMMS
) -> None:
    got = run(x, w, g, recipe=recipe)
    expected = oracle.layer(*map(oracle.array, (x, w, g)), recipe)
    for gemm in gemms:
        assert_product(gemm, got[gemm], expected[gemm], x.dtype)


def check_grouped(
    recipe: str,
    x: torch.Tensor,
    w: torch.Tensor,
    g: torch.Tensor,
    ends: list[int],
    aligned: bool = False,
    gemms: tuple = GEMMS,
) -> None:
    got = run(x, w, g, offsets(ends), recipe=recipe, aligned=aligned)
    expected = oracle.layer(*map(oracle.array, (x, w, g)), recipe, np.array(ends))
    for gemm in gemms:
        assert_product(gemm, got[gemm], expected[gemm], x.dtype)
    past = min(ends[-1], len(x))
    for gemm in set(gemms) & {"fprop", "dgrad"}:
        assert not got[gemm][past:].any(), f"{gemm}: rows past the last group are not zero"


def dense_case(m: int, n: int, k: int, dtype=torch.float32, reach: int = 2):
    x, w, g = (
        patchwork(*shape, seed=i, reach=reach) for i, shape in enumerate([(m, k), (n, k), (m, n)])
    )
    return x.to(dtype), w.to(dtype), g.to(dtype)


def grouped_case(m: int, ends: list[int], n=48, k=144, dtype=torch.float32):
    """x, w, g; rows past the last group hold NaN."""
    shapes = (m, k), (len(ends), n, k), (m, n)
    x, w, g = (patchwork(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes))
    x[ends[-1] :], g[ends[-1] :] = NAN, NAN
    return x, w, g


# Quantisers


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


def awkward(r: int, c: int, dtype: torch.dtype) -> torch.Tensor:
    """Wide magnitudes, outliers of 1e4, blocks of zeros of either sign, tiny and huge values."""
    x = patchwork(r, c, reach=12)
    if r and c >= 16:
        x[0, :] = 0
        x[-1, ::5] *= 1e4
        x[r // 2 :, c // 2] = -0.0
        x[:, 3] = 0
        x[r // 3] *= 1e-20
        x[r // 4, : c // 3] = 1e30
    return x.to(dtype)


SIZES = [(1, 16), (5, 128), (130, 144), (3, 10944), (260, 48), (512, 32), (0, 64), (128, 576)]


@pytest.mark.parametrize("recipe", RECIPES[:2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows_and_columns(recipe, dtype, size):
    x = awkward(*size, dtype)
    check_rows(recipe, x)
    check_columns(recipe, x)
    check_both(recipe, x)


@pytest.mark.parametrize("recipe", RECIPES[:2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GROUPS)
def test_columns_of_groups(recipe, dtype, name):
    m, ends, aligned = GROUPS[name]
    x = awkward(m, 144, dtype)
    x[ends[-1] :] = NAN
    check_columns(recipe, x, ends, aligned)
    check_both(recipe, x, ends, aligned)


@pytest.mark.parametrize("recipe", RECIPES[:2])
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


@pytest.mark.parametrize("recipe", RECIPES[:2])
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


def check_every_value(recipe: str) -> None:
    """Each e4m3 value, each midpoint of two, and their FP32 neighbours, in a block of scale 1."""
    midpoints = (oracle.GRID[1:] + oracle.GRID[:-1]) / 2
    x = np.concatenate([oracle.GRID, midpoints]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(448))])
    x = np.concatenate([x, -x])
    x = np.pad(x, (0, -len(x) % 127)).reshape(-1, 127)
    x = np.concatenate([x, np.full((len(x), 1), 448, np.float32)], 1)
    check_rows(recipe, torch.from_numpy(x))


def check_reciprocal(recipe: str) -> None:
    """Values on which x · (1/s), x / s and x · (448/amax) round to different codes."""
    rng = np.random.default_rng(1)
    amax = rng.uniform(1, 2, (4000, 1)).astype(np.float32)
    s = oracle.scale(amax)
    midpoints = ((oracle.GRID[1:] + oracle.GRID[:-1]) / 2).astype(np.float32)
    x = np.concatenate([amax, amax, midpoints * s], 1)
    code = oracle.encode(x * (np.float32(1) / s))
    others = oracle.encode(x / s), oracle.encode(x * (np.float32(448) / amax))
    tell = [np.any(code != other, 1) for other in others]
    assert min(t.sum() for t in tell) > 10
    check_rows(recipe, torch.from_numpy(x[tell[0] | tell[1]]))


@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_rounding(recipe):
    check_every_value(recipe)
    check_reciprocal(recipe)


# Products


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_linear(recipe, dtype, name):
    check_linear(recipe, *dense_case(*SHAPES[name], dtype))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GROUPS)
def test_grouped_mm(recipe, dtype, name):
    m, ends, aligned = GROUPS[name]
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
    m, ends, _ = GROUPS["aligned"]
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


def check_bias_gradient(db: torch.Tensor, g: torch.Tensor, dtype: torch.dtype) -> None:
    ones = np.ones((1, len(g)))
    expected = oracle.product(ones, oracle.array(g).astype(np.float64))
    assert_product("bias", db[None], expected, dtype)


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


# NaN and Inf

SPOILT = {
    "blockwise": {
        ("x", 3, 200): {"fprop": np.s_[3], "wgrad": np.s_[:, 200]},
        ("w", 5, 130): {"fprop": np.s_[:, :128], "dgrad": np.s_[:, 128:256]},
        ("g", 139, 20): {"dgrad": np.s_[139], "wgrad": np.s_[20]},
    },
    "rowwise": {
        ("x", 3, 200): {"fprop": np.s_[3], "wgrad": np.s_[:, 200]},
        ("w", 5, 130): {"fprop": np.s_[:, 5], "dgrad": np.s_[:, 130]},
        ("g", 139, 20): {"dgrad": np.s_[139], "wgrad": np.s_[20]},
    },
}
SPOILT["rowwise_with_gw_hp"] = SPOILT["rowwise"]
"""Where a NaN stands, and which elements of which output depend on a block that holds it."""


def check_non_finite(recipe: str, spot: tuple, value: float, gemms: tuple = GEMMS) -> None:
    """Dense, and as the second of three groups; nothing but what depends on the block is spoilt."""
    name, row, column = spot
    dense = dict(zip("xwg", dense_case(140, 144, 272)))
    grouped = {
        "x": torch.cat([dense["x"]] * 3),
        "w": torch.stack([dense["w"]] * 3),
        "g": torch.cat([dense["g"]] * 3),
    }
    dense[name][row, column] = value
    if name == "w":
        grouped["w"][1, row, column] = value
    else:
        grouped[name][140 + row, column] = value
    got = run(**dense, recipe=recipe)
    got_grouped = run(*grouped.values(), offsets([140, 280, 420]), recipe=recipe)
    for gemm in gemms:
        spoilt = np.zeros(got[gemm].shape, bool)
        if gemm in SPOILT[recipe][spot]:
            spoilt[SPOILT[recipe][spot][gemm]] = True
        assert np.array_equal(~np.isfinite(got[gemm].numpy()), spoilt), f"{gemm}: non-finite"
        middle = np.stack([np.zeros_like(spoilt), spoilt, np.zeros_like(spoilt)])
        result = got_grouped[gemm].numpy().reshape(middle.shape)
        assert np.array_equal(~np.isfinite(result), middle), f"{gemm}: non-finite, grouped"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("spot", SPOILT["blockwise"], ids=str)
def test_non_finite(recipe, value, spot):
    check_non_finite(recipe, spot, value)


# Dtypes


def check_autocast(recipe: str, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    """Inputs are cast, then quantised; gradients get their own dtypes, rounded once from FP32."""
    x, w, g = dense_case(140, 48, 144)
    x, w, g, bias = x.to(x_dtype), w.to(w_dtype), g.bfloat16(), patchwork(1, 48)[0].to(w_dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert fp8_linear(x, w, recipe=recipe).dtype == F.linear(x, w).dtype == torch.bfloat16
        got = run(x, w, g, recipe=recipe)
        with_bias = run(x, w, g, bias=bias, recipe=recipe)
        grouped = run(x, w[None], g, offsets([140]), recipe=recipe)
    expected = oracle.layer(*(oracle.bf16(oracle.array(t)) for t in (x, w, g)), recipe)
    for gemm, dtype in zip(GEMMS, (torch.bfloat16, x_dtype, w_dtype)):
        assert_product(gemm, got[gemm], expected[gemm], dtype)
        assert_product(gemm, grouped[gemm].view(got[gemm].shape), expected[gemm], dtype)
    assert torch.equal(with_bias["fprop"], got["fprop"] + bias.bfloat16())
    check_bias_gradient(with_bias["bias"], g, w_dtype)


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


# SwiGLU


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
    m, ends, aligned = GROUPS[name]
    dh, a, b = (t[:m].repeat(2, 1)[:m] for t in swiglu_case(dtype))
    h, (da, db) = reference.swiglu(a, b), reference.swiglu_backward(dh, a, b)
    assert_codes_equal(ops.swiglu_1x128(a, b), ops.quantize_1x128(h))
    for layout in ((), (offsets(ends), aligned)):
        both = [ops.quantize_1x128_128x1_t(t, *layout) for t in (da, db)]
        want = *both[0], *both[1], *ops.quantize_128x1_t(h, *layout)
        assert_codes_equal(ops.swiglu_backward_1x128_128x1_t(dh, a, b, *layout), want)


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


# Errors


def linear(x=(4, 32), w=(16, 32), bias=None, dtypes=(torch.float32,) * 3, **options):
    tensors = [None if s is None else torch.ones(s, dtype=d) for s, d in zip((x, w, bias), dtypes)]
    return lambda: fp8_linear(*tensors, **options)


def grouped(x=(4, 32), w=(2, 16, 32), offs=(2,), offs_dtype=torch.int32, **options):
    offs = torch.zeros(offs, dtype=offs_dtype)
    return lambda: fp8_grouped_mm(torch.ones(x), torch.ones(w), offs, **options)


def under_autocast(call):
    def run():
        with torch.autocast("cpu", torch.float16):
            call()

    return run


def weight_elsewhere():
    return fp8_linear(torch.ones(4, 32), torch.ones(16, 32, device="meta"))


def offs_elsewhere():
    offs = torch.zeros(2, dtype=torch.int32)
    return fp8_grouped_mm(
        torch.ones(4, 32, device="meta"), torch.ones(2, 16, 32, device="meta"), offs
    )


ALLOWED = "allowed are 'blockwise', 'rowwise', 'rowwise_with_gw_hp'"
MULTIPLES = "FP8 GEMMs need N = {} and K = {} to be positive multiples of 16"
F16, F32, F64 = torch.float16, torch.float32, torch.float64
ERRORS = [
    (linear(recipe="fp8"), f"recipe = 'fp8': {ALLOWED}"),
    (linear(recipe="bf16"), f"recipe = 'bf16': {ALLOWED}"),
    (linear(recipe=None), f"recipe = None: {ALLOWED}"),
    (linear(emulate=None), "emulate = None: allowed are true and false"),
    (grouped(emulate=1), "emulate = 1: allowed are true and false"),
    (grouped(aligned="no"), "aligned = 'no': allowed are true and false"),
    (grouped(recipe="tensorwise"), f"recipe = 'tensorwise': {ALLOWED}"),
    (linear(x=()), "x has shape () and weight (16, 32): allowed are (..., K) and (N, K)"),
    (linear(x=(4, 16)), "x has shape (4, 16) and weight (16, 32): allowed are (..., K) and (N, K)"),
    (linear(w=(2, 16, 32)), "weight (2, 16, 32): allowed are (..., K) and (N, K)"),
    (linear(bias=(32,)), "bias has shape (32,): allowed is (16,)"),
    (linear(bias=(1, 16)), "bias has shape (1, 16): allowed is (16,)"),
    (linear(w=(24, 32)), "weight has shape (24, 32): " + MULTIPLES.format(24, 32)),
    (linear(x=(4, 8), w=(16, 8)), "weight has shape (16, 8): " + MULTIPLES.format(16, 8)),
    (linear(w=(0, 32)), "weight has shape (0, 32): " + MULTIPLES.format(0, 32)),
    (linear(dtypes=(F16, F32, F32)), "x is torch.float16: allowed are torch.bfloat16 and"),
    (linear(dtypes=(F32, F64, F32)), "weight is torch.float64: allowed are torch.bfloat16 and"),
    (linear(bias=(16,), dtypes=(F32, F32, F16)), "bias is torch.float16: allowed are"),
    (linear(dtypes=(F32, torch.bfloat16, F32)), "dtypes differ outside autocast: {'x': torch.fl"),
    (linear(bias=(16,), dtypes=(F32, F32, torch.bfloat16)), "'bias': torch.bfloat16}"),
    (under_autocast(linear()), "autocast to torch.float16: allowed are torch.bfloat16 and"),
    (grouped(x=(4, 16)), "x has shape (4, 16) and weight (2, 16, 32): allowed are (M, K)"),
    (grouped(x=(1, 4, 32)), "x has shape (1, 4, 32) and weight (2, 16, 32): allowed are (M, K)"),
    (grouped(w=(16, 32)), "weight (16, 32): allowed are (M, K) and (E, N, K)"),
    (grouped(offs=(3,)), "offs is torch.int32 of shape (3,): allowed is torch.int32 of shape (2,)"),
    (grouped(offs_dtype=torch.int64), "offs is torch.int64 of shape (2,): allowed is torch.int32"),
    (lambda: fp8_grouped_mm(torch.ones(4, 32), torch.ones(1, 16, 32), [4]), "offs is [4]: allowed"),
    (grouped(w=(0, 16, 32), offs=(0,)), "weights of 0 groups: at least one is needed"),
    (grouped(w=(2, 17, 32)), "weight has shape (2, 17, 32): " + MULTIPLES.format(17, 32)),
    (weight_elsewhere, "weight is on meta and x on cpu: must be the same"),
    (offs_elsewhere, "offs is on cpu and x on meta: must be the same"),
]  # fmt: skip


@pytest.mark.parametrize("call, message", ERRORS, ids=[message[:60] for _, message in ERRORS])
def test_errors(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
