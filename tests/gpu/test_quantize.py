"""The quantizer kernels equal the reference, bit for bit.

Equal means the same bytes, strides and dtypes; NaN by position. Every tile of the input has its own
magnitude, so a scale taken from a neighbor shows. Outputs hold NaN before each launch, so an
element that is not written shows.
"""

import pytest
import torch
from gpu_utils import poisoned_outputs
from shapes import LONG_ROWS, ODD_QUANTIZE, ODD_WEIGHTS, QUANTIZE_ENDS
from torch import Tensor

from titan_fp8 import reference
from titan_fp8.layouts import cdiv

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8.kernels import hopper as kernels
from titan_fp8.kernels.hopper.quantize_cast import scale_of
from titan_fp8.kernels.hopper.quantize_rowwise_columns import ROW_AMAX_WORDS

DTYPES = [torch.bfloat16, torch.float32]


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal values, every 128x128 tile of its own magnitude between 1e-4 and 1e4."""
    tiles = [*shape[:-2], *(cdiv(n, 128) for n in shape[-2:])]
    scale = 10 ** (8 * torch.rand(tiles, device="cuda") - 4)
    scale = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
    x = torch.randn(shape, device="cuda") * scale[..., : shape[-2], : shape[-1]]
    return x.to(dtype)


def with_specials(x: Tensor) -> Tensor:
    """x with some NaN, Inf and zeros and a tile of zeros, as far as it is large enough."""
    flat = x.view(-1)
    places = torch.randperm(flat.numel(), device=x.device)[:7]
    values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-30, 1e30]
    flat[places] = torch.tensor(values, device=x.device, dtype=x.dtype)[: places.numel()]
    x[..., 128:256, :128] = 0
    return x


def strides(x: Tensor) -> list[int]:
    """The strides of dimensions longer than 1; the others do not matter."""
    return [
        stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 < x.numel()
    ]


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), i
        assert strides(a) == strides(b), i
        a, b = a.float(), b.float()
        same = (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())
        where = (~same).nonzero()
        assert not len(where), f"output {i}: {len(where)} of {a.numel()}, first at {where[0]}"


def check(name: str, *args) -> None:
    want = getattr(reference, name)(*args)
    with poisoned_outputs():
        got = getattr(kernels, name)(*args)
    assert_same(got, want)


ROWS = ("quantize_1x128", "quantize_row")
BLOCKWISE = ("quantize_128x1_t", "quantize_1x128_128x1_t")
ROWWISE = ("quantize_col_t", "quantize_row_col_t")
WEIGHTS = ("quantize_128x128", "quantize_128x128_t", "quantize_row", "quantize_weight_col_t")
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_dtype
@pytest.mark.parametrize("shape", [*ODD_QUANTIZE, (0, 256)], ids=str)
@pytest.mark.parametrize("op", ROWS + BLOCKWISE + ROWWISE)
def test_dense(op, shape, dtype):
    check(op, inputs(shape, dtype))
    check(op, with_specials(inputs(shape, dtype)) if shape[0] else inputs(shape, dtype))


@every_dtype
@pytest.mark.parametrize("shape", ODD_WEIGHTS)
@pytest.mark.parametrize("op", WEIGHTS)
def test_weights(op, shape, dtype):
    check(op, inputs(shape, dtype))
    check(op, with_specials(inputs(shape, dtype)))


@every_dtype
@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*ODD_WEIGHTS, (9, 1040)], ids=str)
def test_shards(shape, to, dtype):
    for x in (inputs(shape, dtype), with_specials(inputs(shape, dtype))):
        check("quantize_128x128", x, to)


@every_dtype
def test_tall_weights(dtype):
    """Columns of many tiles, of several experts."""
    check("quantize_weight_col_t", with_specials(inputs((2, 67600, 144), dtype)))


@every_dtype
@pytest.mark.parametrize("groups", QUANTIZE_ENDS)
@pytest.mark.parametrize("m", [512, 517, 0])
@pytest.mark.parametrize("op", BLOCKWISE + ROWWISE)
def test_groups(op, m, groups, dtype):
    ends = QUANTIZE_ENDS[groups]
    offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
    x = inputs((m, 576), dtype)
    for aligned in {False, all(end % 128 == 0 for end in ends)}:
        check(op, x, offs, aligned)
    last = min(ends[-1], m)
    x[last:] = float("nan")
    check(op, x, offs, False)
    if last:
        check(op, torch.cat([with_specials(x[:last]), x[last:]]), offs, False)


@every_dtype
@pytest.mark.parametrize("columns", LONG_ROWS)
@pytest.mark.parametrize("op", ["quantize_row", "quantize_row_col_t"])
def test_long_rows(op, columns, dtype):
    check(op, with_specials(inputs((50, columns), dtype)))


@every_dtype
@pytest.mark.parametrize("groups", ["dense", *QUANTIZE_ENDS])
def test_rows_and_columns_are_two_singles(groups, dtype):
    offs = None
    if groups != "dense":
        offs = torch.tensor(QUANTIZE_ENDS[groups], device="cuda", dtype=torch.int32)
    wide = 4 * ROW_AMAX_WORDS // dtype.itemsize + 16
    for k in (704, 2064, wide):
        x = with_specials(inputs((517, k), dtype))
        with poisoned_outputs():
            both = kernels.quantize_row_col_t(x, offs)
        assert_same(both, (*kernels.quantize_row(x), *kernels.quantize_col_t(x, offs)))


def test_beyond_int32():
    """More than 2^31 elements; compares the last rows, whose offsets do not fit into int32."""
    m, k = 131072 + 128, 16384
    x = torch.randn(1, k, device="cuda", dtype=torch.bfloat16).expand(m, k).contiguous()
    x[-128:] = last = inputs((128, k), torch.bfloat16)
    q, s, q_t, s_t = kernels.quantize_1x128_128x1_t(x)
    got = q[-128:], s[-128:], q_t[:, -128:], s_t[:, -1:]
    want = reference.quantize_1x128_128x1_t(last)
    assert_same([t.contiguous() for t in got], [t.contiguous() for t in want])
    q, s = kernels.quantize_row(x)
    assert_same((q[-128:], s[-128:]), reference.quantize_row(last))
    q_t, s_t = kernels.quantize_col_t(x)
    want = reference.cast(last.float(), s_t).t().contiguous()
    assert_same((q_t[:, -128:].contiguous(),), (want,))
    w = x[:-128].view(4, -1, k)
    w = torch.cat([w, inputs((1, *w.shape[1:]), torch.bfloat16)])
    q_t, s_t = kernels.quantize_weight_col_t(w)
    assert_same((q_t[-1], s_t[-1]), reference.quantize_weight_col_t(w[-1]))


@gluon.jit
def scales_kernel(amax, s, r):
    i = gl.program_id(0) * 1024 + gl.arange(0, 1024, gl.BlockedLayout([8], [32], [4], [0]))
    scale, inverse = scale_of(gl.load(amax + i))
    gl.store(s + i, scale)
    gl.store(r + i, inverse)


@pytest.mark.parametrize("exponent", [87, 100, 127, 135, 136, 200, 254, 255])
def test_scales_are_divisions(exponent):
    """For every significand s = amax / 448 and r = 1 / s, each rounded once; Inf and NaN stay."""
    bits = torch.arange(1 << 23, device="cuda", dtype=torch.int32) + (exponent << 23)
    s, r = (torch.empty(bits.shape, device="cuda") for _ in "sr")
    scales_kernel[(1 << 13,)](bits, s, r)
    want = reference.scale_of(bits.view(torch.float32))
    assert_same((s, r), (want, torch.ones_like(s) / want))
