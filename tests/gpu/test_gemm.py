"""The GEMM kernels on a Hopper GPU, against the FP64 product of their dequantized operands.

Each test draws fresh inputs. Their rows and columns differ in size by orders of magnitude, so that
a scale read from the wrong place shows. Outputs hold NaN before the launch, so that an element that
is not written shows.

Tolerances: rounding to bf16 changes a value by at most 2^-8. The FP8 tensor cores add with about 14
bits, so a sum of 128 products is off by about 2^-12, and a sum over thousands without promotion to
FP32 (rowwise fprop and dgrad) by up to a few times 2^-9.
"""

import pytest
import torch
from gpu_utils import no_sync, poisoned_outputs
from shapes import ODD_GEMM
from torch import Tensor

from titan_fp8 import layouts, reference

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from titan_fp8.kernels import hopper

TOLERANCE = {torch.bfloat16: 2**-8, torch.float32: 6e-4}
ROWWISE_TOLERANCE = 1e-2
ops = torch.ops.titan_fp8


def uneven(*shape: int) -> Tensor:
    """Normal values whose rows and columns differ in size by up to 2^8."""
    rows, columns = (torch.exp2(8 * torch.rand(n, device="cuda") - 4) for n in shape[-2:])
    return torch.randn(shape, device="cuda") * rows[:, None] * columns


def ends_of(ends: tuple[int, ...] | None) -> Tensor | None:
    return None if ends is None else torch.tensor(ends, dtype=torch.int32, device="cuda")


def groups_of(ends: tuple[int, ...] | None, m: int) -> list[tuple[slice, slice]]:
    """The rows of each group, and its columns in an unaligned transposed copy."""
    if ends is None:
        return [(slice(0, m), slice(None))]
    groups, row, column = [], 0, 0
    for end in ends:
        size = layouts.round_up(min(end, m) - row, 128)
        groups.append((slice(row, min(end, m)), slice(column, column + size)))
        row, column = min(end, m), column + size
    return groups


def dequantize_1x128(q: Tensor, s: Tensor) -> Tensor:
    return q.double() * s.double().repeat_interleave(128, -1)[:, : q.shape[1]]


def dequantize_128x128(q: Tensor, s: Tensor) -> Tensor:
    s = s.double().repeat_interleave(128, -2)[..., : q.shape[-2], :]
    return q.double() * s.repeat_interleave(128, -1)[..., : q.shape[-1]]


def product_by_rows(a: Tensor, b: Tensor, groups: list) -> Tensor:
    """(M, N) in FP64 of dequantized a (M, K) and b (E, N, K)."""
    y = a.new_zeros(a.shape[0], b.shape[1])
    for (rows, _), w in zip(groups, b, strict=True):
        y[rows] = a[rows] @ w.T
    return y


def assert_close(got: Tensor, want: Tensor, tolerance: float):
    """The error is at most `tolerance` of the whole, and twice that of any long row or column."""
    error = got.double() - want
    for dim in (-1, -2):
        if want.shape[dim] >= 128:
            assert (error.norm(dim=dim) <= 2 * tolerance * want.norm(dim=dim)).all()
    assert error.norm() <= tolerance * want.norm()


def blockwise_mm(m: int, n: int, k: int, ends, dtype: torch.dtype):
    """The output of the kernel, and its two operands with their scales."""
    a, sa = reference.quantize_1x128(uneven(m, k))
    b, sb = reference.quantize_128x128(uneven(*([] if ends is None else [len(ends)]), n, k))
    offs = ends_of(ends)
    with poisoned_outputs():
        c = hopper.blockwise_mm(a, sa, b, sb, offs, out_dtype=dtype)
    return c, (a, sa), (b.view(-1, n, k), sb.view(-1, *sb.shape[-2:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", ODD_GEMM, ids=str)
def test_blockwise_mm(shape, dtype):
    m, n, k, ends = shape
    c, a, b = blockwise_mm(m, n, k, ends, dtype)
    want = product_by_rows(dequantize_1x128(*a), dequantize_128x128(*b), groups_of(ends, m))
    assert c.dtype == dtype
    assert_close(c, want, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", ODD_GEMM, ids=str)
def test_blockwise_mm_pair(shape, dtype):
    m, n, k, ends = shape
    operands, want = [], 0
    for _ in range(2):
        a = reference.quantize_1x128(uneven(m, k))
        b = reference.quantize_128x128(uneven(*([] if ends is None else [len(ends)]), n, k))
        operands += [*a, *b]
        right = dequantize_128x128(*b).view(-1, n, k)
        want += product_by_rows(dequantize_1x128(*a), right, groups_of(ends, m))
    offs = ends_of(ends)
    with poisoned_outputs():
        c = hopper.blockwise_mm_pair(*operands, offs, out_dtype=dtype)
    assert c.dtype == dtype
    assert_close(c, want, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", ODD_GEMM, ids=str)
def test_blockwise_wgrad(shape, dtype):
    m, n, k, ends = shape
    offs = ends_of(ends)
    a, sa = reference.quantize_128x1_t(uneven(m, n), offs)
    b, sb = reference.quantize_128x1_t(uneven(m, k), offs)
    with poisoned_outputs():
        c = hopper.blockwise_wgrad(a, sa, b, sb, offs, out_dtype=dtype).view(-1, n, k)
    left, right = dequantize_1x128(a, sa), dequantize_1x128(b, sb)
    for got, (_, columns) in zip(c, groups_of(ends, m), strict=True):
        assert_close(got, left[:, columns] @ right[:, columns].T, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", ODD_GEMM, ids=str)
def test_rowwise_mm(shape, dtype):
    m, n, k, ends = shape
    a, sa = reference.quantize_row(uneven(m, k))
    b, sb = reference.quantize_row(uneven(*([] if ends is None else [len(ends)]), n, k))
    offs = ends_of(ends)
    with poisoned_outputs():
        c = hopper.rowwise_mm(a, sa, b, sb, offs, out_dtype=dtype)
    left, right = (q.double() * s.double().unsqueeze(-1) for q, s in ((a, sa), (b, sb)))
    want = product_by_rows(left, right.view(-1, n, k), groups_of(ends, m))
    assert c.dtype == dtype
    assert_close(c, want, ROWWISE_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", ODD_GEMM, ids=str)
def test_rowwise_wgrad(shape, dtype):
    m, n, k, ends = shape
    offs = ends_of(ends)
    a, sa = reference.quantize_col_t(uneven(m, n), offs)
    b, sb = reference.quantize_col_t(uneven(m, k), offs)
    with poisoned_outputs():
        c = hopper.rowwise_wgrad(a, sa, b, sb, offs, out_dtype=dtype)
    assert c.dtype == dtype
    c = c.view(-1, n, k)
    for e, (_, columns) in enumerate(groups_of(ends, m)):
        left, right = (
            q[:, columns].double() * s.view(-1, q.shape[0])[e].double()[:, None]
            for q, s in ((a, sa), (b, sb))
        )
        assert_close(c[e], left @ right.T, TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [shape[:3] for shape in ODD_GEMM if shape[3] is None], ids=str)
def test_dense_rowwise_equals_scaled_mm(shape):
    """Bit for bit, with fast accumulation and with slow."""
    m, n, k = shape
    x, w = reference.quantize_row(uneven(m, k)), reference.quantize_row(uneven(n, k))
    g_t, x_t = reference.quantize_col_t(uneven(m, n)), reference.quantize_col_t(uneven(m, k))
    for product, fast, left, right in (
        (hopper.rowwise_mm, True, x, w),
        (hopper.rowwise_wgrad, False, g_t, x_t),
    ):
        (a, sa), (b, sb) = left, right
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
        want = torch._scaled_mm(a, b.t(), sa[:, None], sb[None, :], **options)
        assert torch.equal(product(*left, *right), want)


RECIPES = [
    (hopper.blockwise_mm, hopper.blockwise_wgrad)
    + (reference.quantize_1x128, reference.quantize_128x1_t, reference.quantize_128x128),
    (hopper.rowwise_mm, hopper.rowwise_wgrad)
    + (reference.quantize_row, reference.quantize_col_t, reference.quantize_row),
]
"""For blockwise and rowwise: both GEMMs, and the quantizers of rows, columns and weights."""
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=["blockwise", "rowwise"])


@each_recipe
@pytest.mark.parametrize("ends", [(128, 128, 512), (0, 256, 384), (128, 256, 100000)], ids=str)
def test_aligned_groups(recipe, ends):
    mm, wgrad, row, column, weight = recipe
    m, n, k, offs = 640, 272, 528, ends_of(ends)
    x, g, w = uneven(m, k), uneven(m, n), uneven(len(ends), n, k)
    operands = *row(x), *weight(w), offs
    columns = {a: (*column(g, offs, a), *column(x, offs, a)) for a in (True, False)}
    with poisoned_outputs():
        torch.testing.assert_close(mm(*operands, aligned=True), mm(*operands))
        aligned, unaligned = (wgrad(*columns[a], offs, aligned=a) for a in (True, False))
    torch.testing.assert_close(aligned, unaligned)


@each_recipe
@pytest.mark.parametrize("ends", [None, (100, 300)], ids=str)
def test_nan_stays_in_what_depends_on_it(recipe, ends):
    mm, wgrad, row, column, weight = recipe
    m, n, k, offs = 333, 272, 400, ends_of(ends)
    x, g, w = uneven(m, k), uneven(m, n), uneven(*([] if ends is None else [2]), n, k)
    x[150, 390], g[150, 200] = torch.nan, torch.inf
    if ends is not None:
        x[310], g[320] = torch.nan, torch.nan  # rows of no group
    operands = *row(x), *weight(w), offs
    columns = *column(g, offs), *column(x, offs), offs
    with poisoned_outputs():
        y, dw = mm(*operands), wgrad(*columns)
    depends = torch.zeros(m, n, dtype=torch.bool, device="cuda")
    depends[150] = True
    assert torch.equal(~y.isfinite(), depends)
    depends = torch.zeros(dw.shape, dtype=torch.bool, device="cuda")
    last = depends if ends is None else depends[1]
    last[200], last[:, 390] = True, True
    assert torch.equal(~dw.isfinite(), depends)


@pytest.mark.parametrize("ends", [None, (100, 300)], ids=str)
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
def test_fprop_and_dgrad_quantize_their_weight(recipe, ends):
    m, n, k, offs = 333, 272, 400, ends_of(ends)
    w = uneven(*([] if ends is None else [2]), k, n).mT
    row, weight, weight_t = {
        "blockwise": (hopper.quantize_1x128, hopper.quantize_128x128, hopper.quantize_128x128_t),
        "rowwise": (hopper.quantize_row, hopper.quantize_row, hopper.quantize_weight_col_t),
    }[recipe]
    mm = getattr(hopper, f"{recipe}_mm")
    for product, quantize, width in (("fprop", weight, k), ("dgrad", weight_t, n)):
        a = row(uneven(m, width))
        got = getattr(ops, f"{recipe}_{product}")(*a, w, offs)
        assert torch.equal(got, mm(*a, *quantize(w.contiguous()), offs))


@pytest.mark.parametrize("ends", [None, (100, 300)], ids=str)
def test_dgrad_pair_quantizes_its_weights(ends):
    m, n, k, offs = 333, 272, 400, ends_of(ends)
    pair, operands = [], []
    for _ in range(2):
        g, w = uneven(m, n), uneven(*([] if ends is None else [2]), k, n).mT
        if ends is not None:
            g[320] = torch.nan  # a row of no group
        rows = hopper.quantize_1x128(g)
        pair += [*rows, w]
        operands += [*rows, *hopper.quantize_128x128_t(w.contiguous())]
    dx = ops.blockwise_dgrad_pair(*pair, offs)
    assert torch.equal(dx, hopper.blockwise_mm_pair(*operands, offs))
    assert dx.isfinite().all() and (ends is None or not dx[300:].any())


def test_a_nan_in_a_weight_stays_in_its_column():
    m, n, k, offs = 333, 272, 400, ends_of((100, 300))
    x, w = uneven(m, k), uneven(2, n, k)
    w[1, 130, 7] = torch.nan
    y = hopper.rowwise_mm(*reference.quantize_row(x), *reference.quantize_row(w), offs)
    depends = torch.zeros(m, n, dtype=torch.bool, device="cuda")
    depends[100:300, 130] = True
    assert torch.equal(~y.isfinite(), depends)


def test_rowwise_scales_of_empty_groups_are_ignored():
    m, n, k, offs = 300, 272, 400, ends_of((0, 128, 128))
    (g, sg), (x, sx) = (reference.quantize_col_t(uneven(m, size), offs) for size in (n, k))
    sg[0], sx[2] = torch.nan, torch.nan
    dw = hopper.rowwise_wgrad(g, sg, x, sx, offs)
    assert not dw[0].any() and not dw[2].any()
    assert dw[1].any() and dw[1].isfinite().all()


@pytest.mark.parametrize("n, k", [(16, 16), (272, 400), (2048, 1408)])
def test_bf16_wgrad_is_zero_for_empty_groups(n, k):
    ends = (0, 100, 100, 100, 257, 300, 300)
    x, g = uneven(333, k).bfloat16(), uneven(333, n).bfloat16()
    with poisoned_outputs():
        dw = hopper.bf16_wgrad(g, x, ends_of(ends))
    assert dw.shape == (len(ends), n, k)
    for matrix, (rows, _) in zip(dw, groups_of(ends, 333), strict=True):
        want = g[rows].double().T @ x[rows].double()
        assert matrix.any() if rows.stop > rows.start else not matrix.any()
        assert_close(matrix, want, TOLERANCE[torch.bfloat16])


@each_recipe
@pytest.mark.parametrize("ends", [None, (0, 0)], ids=str)
def test_no_tokens(recipe, ends):
    mm, wgrad, row, column, weight = recipe
    n, k, offs = 144, 272, ends_of(ends)
    lead = [] if ends is None else [2]
    x, g, w = (torch.randn(*shape, device="cuda") for shape in ((0, k), (0, n), (*lead, n, k)))
    assert mm(*row(x), *weight(w), offs).shape == (0, n)
    dw = wgrad(*column(g, offs), *column(x, offs), offs)
    assert dw.shape == (*lead, n, k) and not dw.any()


@pytest.mark.parametrize("aligned", [True, False])
def test_no_gemm_waits_for_the_device(aligned):
    n, k, offs = 272, 528, ends_of((128, 384, 512) if aligned else (100, 300, 512))
    x, g, w = uneven(512, k), uneven(512, n), uneven(3, n, k)
    blockwise = *reference.quantize_1x128(x), *reference.quantize_128x128(w)
    rowwise = *reference.quantize_row(x), *reference.quantize_row(w)
    columns = [
        (*quantize(g, offs, aligned), *quantize(x, offs, aligned))
        for quantize in (reference.quantize_128x1_t, reference.quantize_col_t)
    ]
    with no_sync():
        hopper.blockwise_mm(*blockwise, offs, aligned)
        hopper.blockwise_mm_pair(*blockwise, *blockwise, offs, aligned)
        hopper.rowwise_mm(*rowwise, offs, aligned)
        hopper.blockwise_wgrad(*columns[0], offs, aligned)
        hopper.rowwise_wgrad(*columns[1], offs, aligned)
        hopper.bf16_wgrad(g.bfloat16(), x.bfloat16(), offs)


def test_outputs_of_more_than_2_31_elements():
    m, n, k = 2**20 + 100, 2064, 128
    a, sa = reference.quantize_1x128(uneven(m, k))
    b, sb = reference.quantize_128x128(uneven(1, n, k))
    c = hopper.blockwise_mm(a, sa, b, sb, ends_of((m,)))
    rows = torch.tensor([0, 1000, 2**20 - 1, 2**20 + 99], device="cuda")
    want = dequantize_1x128(a[rows], sa[rows]) @ dequantize_128x128(b[0], sb[0]).T
    assert_close(c[rows], want, TOLERANCE[torch.bfloat16])
