"""The numerics against the oracle: quantizers to the bit, products within a derived tolerance.

Quantizers run as ops and products through `fp8_linear` and `fp8_grouped_mm` with autograd, so these
checks judge what a layer calls. `test_mutations.py` breaks the reference and expects them to fail.
"""

from collections.abc import Callable, Sequence

import numpy as np
import oracle
import torch
from torch.nn import functional as F

from titan_fp8 import fp8_grouped_mm, fp8_linear
from titan_fp8.recipe import get_recipe

RECIPES = ("blockwise", "rowwise", "rowwise_with_gw_hp", "blockwise_pow2")
QUANTIZING = ("blockwise", "rowwise", "blockwise_pow2")
"""One recipe for each way of quantizing."""

DTYPES = (torch.bfloat16, torch.float32)

NAN, INF = float("nan"), float("inf")


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


def offsets(ends: Sequence[int]) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


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
    q, s = get_recipe(recipe).quantize_rows(x)
    expected = oracle.rows(oracle.array(x), recipe)
    assert_codes("rows", q, expected.codes)
    if recipe in oracle.BLOCKWISE:
        assert_scales("rows", s, expected.block_scales, stride_1x128(len(x)))
    else:
        assert_scales("rows", s, expected.block_scales[:, 0], None)


def check_columns(
    recipe: str, x: torch.Tensor, ends: Sequence[int] | None = None, aligned: bool = False
) -> None:
    offs = None if ends is None else offsets(ends)
    blockwise = recipe in oracle.BLOCKWISE
    q, s = get_recipe(recipe).quantize_columns(x, offs, aligned)
    codes, scales = oracle.transposed(oracle.array(x), recipe, ends, aligned)
    assert_codes("columns", q, codes)
    assert_scales("columns", s, scales, stride_1x128(x.shape[1]) if blockwise else None)


def check_both(
    recipe: str, x: torch.Tensor, ends: Sequence[int] | None = None, aligned: bool = False
) -> None:
    """The quantizer of rows and columns in one is those of either."""
    offs = None if ends is None else offsets(ends)
    ops = get_recipe(recipe)
    separate = *ops.quantize_rows(x), *ops.quantize_columns(x, offs, aligned)
    for got, want in zip(ops.quantize_rows_and_columns(x, offs, aligned), separate):
        assert got.stride() == want.stride() and got.dtype == want.dtype
        torch.testing.assert_close(
            got.float(), want.float(), rtol=0, atol=0, equal_nan=True, msg="rows and columns"
        )


def check_weight(recipe: str, w: torch.Tensor) -> None:
    """W in fprop's and, transposed, in dgrad's layout; (N, K) or (E, N, K)."""
    blockwise = recipe in oracle.BLOCKWISE
    q, s = get_recipe(recipe).quantize_weight(w)
    q_t, s_t = get_recipe(recipe).quantize_weight_t(w)
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
    recipe: str,
    x: torch.Tensor,
    w: torch.Tensor,
    g: torch.Tensor,
    gemms: tuple = GEMMS,
    layer: Callable = oracle.layer,
) -> None:
    got = run(x, w, g, recipe=recipe)
    expected = layer(*map(oracle.array, (x, w, g)), recipe)
    for gemm in gemms:
        assert_product(gemm, got[gemm], expected[gemm], x.dtype)


def check_grouped(
    recipe: str,
    x: torch.Tensor,
    w: torch.Tensor,
    g: torch.Tensor,
    ends: Sequence[int],
    aligned: bool = False,
    gemms: tuple = GEMMS,
    layer: Callable = oracle.layer,
) -> None:
    got = run(x, w, g, offsets(ends), recipe=recipe, aligned=aligned)
    expected = layer(*map(oracle.array, (x, w, g)), recipe, np.array(ends))
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


def grouped_case(m: int, ends: Sequence[int], n=48, k=144, dtype=torch.float32):
    """x, w, g; rows past the last group hold NaN."""
    shapes = (m, k), (len(ends), n, k), (m, n)
    x, w, g = (patchwork(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes))
    x[ends[-1] :], g[ends[-1] :] = NAN, NAN
    return x, w, g


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


def check_every_value(recipe: str) -> None:
    """Each e4m3 value, each midpoint of two, and their FP32 neighbors, in a block of scale 1."""
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


def check_bias_gradient(db: torch.Tensor, g: torch.Tensor, dtype: torch.dtype) -> None:
    ones = np.ones((1, len(g)))
    expected = oracle.product(ones, oracle.array(g).astype(np.float64))
    assert_product("bias", db[None], expected, dtype)


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
SPOILT["blockwise_pow2"] = SPOILT["blockwise"]
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


def check_autocast(recipe: str, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    """Inputs are cast, then quantized; gradients get their own dtypes, rounded once from FP32."""
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


F16, F32, F64 = torch.float16, torch.float32, torch.float64
