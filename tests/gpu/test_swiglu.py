"""The SwiGLU kernels against the reference: h, da and db to one bf16 ulp, all else to the bit.

The kernels return h, da and db only quantized. So each scale must be that of an amax within one ulp
of the reference's, and each q must be between the casts, with that scale, of the bf16 neighbors of
the reference's value. If a block has one value other than zero, its scale determines the value to
the bit. Where σ is exactly 1, nothing is approximated and all outputs equal the reference's.
"""

import pytest
import torch
from gpu_utils import poisoned_outputs
from shapes import ODD_SWIGLU, QUANTIZE_ENDS
from test_quantize import assert_same, inputs, strides, with_specials
from torch import Tensor

from titan_fp8 import reference
from titan_fp8.kernels import hopper as kernels
from titan_fp8.layouts import pad_blocks, pad_groups

BF16 = torch.bfloat16
INF = 0x7F80
"""The bits of Inf in bf16."""
FLIPS = 0.01
"""Share of scales that may differ: an error of 2^-20 changes the rounding of one value in 2^11."""


def swiglu_inputs(shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """dh, a and b. dh and b have a magnitude for each tile; for a, σ takes values from 0 to 1."""
    a = 4 * torch.randn(shape, device="cuda")
    return inputs(shape, BF16), a.to(BF16), inputs(shape, BF16)


def saturated(a: Tensor) -> Tensor:
    """Random values in [20, 90], where σ is exactly 1, in the shape of a."""
    return (20 + 70 * torch.rand(a.shape, device="cuda")).to(BF16)


def neighbor(x: Tensor, step: int) -> Tensor:
    """The bf16 number `step` ulps above x if that is finite, else x."""
    bits = x.view(torch.int16).int()
    rank = torch.where(bits < 0, -(bits & 0x7FFF), bits) + step
    rank = torch.where(rank.abs() < INF, rank, rank - step)
    bits = torch.where(rank < 0, -rank - 0x8000, rank)
    return torch.where(x.isnan() | x.isinf(), x, bits.to(torch.int16).view(BF16))


def assert_close(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], x: Tensor) -> None:
    """`got` is q and s of values within one ulp of x (R, C) bf16; `want` is q and s of x."""
    (q, s), (want_q, want_s) = got, want
    for a, b in ((q, want_q), (s, want_s)):
        assert (a.shape, a.dtype, strides(a)) == (b.shape, b.dtype, strides(b))
    if not x.numel():
        return
    amax = pad_blocks(x, -1).unflatten(-1, (-1, 128)).abs().amax(-1)
    allowed = [reference.scale_of(neighbor(amax, step).float()) for step in (-1, 0, 1)]
    finite = want_s.isfinite()
    assert torch.equal(s.isfinite(), finite) and torch.equal(s.isnan(), want_s.isnan())
    assert torch.stack([s == scale for scale in allowed])[:, finite].any(0).all()
    s = s.repeat_interleave(128, -1)[:, : x.shape[1]]
    low, high = (reference.cast(neighbor(x, step).float(), s).float() for step in (-1, 1))
    q, want_q = q.float(), want_q.float()
    same = (q == want_q) | (q.isnan() & want_q.isnan())
    wrong = ~torch.where(s.isfinite(), (low <= q) & (q <= high), same)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.numel()}, first at {wrong.nonzero()[0]}"


def check(dh: Tensor, a: Tensor, b: Tensor, *layout) -> None:
    """Checks all outputs of both ops; `layout` is offs and aligned."""
    h, (da, db) = reference.swiglu(a, b), reference.swiglu_backward(dh, a, b)
    with poisoned_outputs():
        forward = kernels.swiglu_1x128(a, b)
        backward = kernels.swiglu_backward_1x128_128x1_t(dh, a, b, *layout)
    assert len(backward) == 10
    assert_close(forward, reference.quantize_1x128(h), h)
    for (q, s), x in ((backward[:2], da), (backward[4:6], db)):
        assert_close((q, s), reference.quantize_1x128(x), x)
    for (q, s), x in ((backward[2:4], da), (backward[6:8], db), (backward[8:], h)):
        offs, aligned = layout or (None, False)
        padded = pad_groups(x, offs, aligned, 128)[0].t().contiguous()
        assert_close((q, s), reference.quantize_128x1_t(x, *layout), padded)


def check_exactly(dh: Tensor, a: Tensor, b: Tensor, *layout) -> None:
    want = reference.swiglu_1x128(a, b)
    want += reference.swiglu_backward_1x128_128x1_t(dh, a, b, *layout)
    with poisoned_outputs():
        got = kernels.swiglu_1x128(a, b)
        got += kernels.swiglu_backward_1x128_128x1_t(dh, a, b, *layout)
    assert_same(got, want)


@pytest.mark.parametrize("shape", ODD_SWIGLU, ids=str)
def test_dense(shape):
    dh, a, b = swiglu_inputs(shape)
    check(dh, a, b)
    check_exactly(dh, saturated(a), b)
    if shape[0]:
        check(with_specials(dh), with_specials(a), with_specials(b))
        check_exactly(with_specials(dh), saturated(a), with_specials(b))


@pytest.mark.parametrize("groups", QUANTIZE_ENDS)
@pytest.mark.parametrize("m", [512, 517, 0])
def test_groups(m, groups):
    ends = QUANTIZE_ENDS[groups]
    offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
    dh, a, b = swiglu_inputs((m, 576))
    for aligned in {False, all(end % 128 == 0 for end in ends)}:
        check(dh, a, b, offs, aligned)
        check_exactly(dh, saturated(a), b, offs, aligned)
    last = min(ends[-1], m)
    for x in (dh, a, b):
        x[last:] = float("nan")
    for aligned in {False, all(end % 128 == 0 for end in ends)}:
        check(dh, a, b, offs, aligned)


@pytest.mark.parametrize("exponent", [0, 30, 90])
def test_every_a(exponent):
    """Each finite a is alone in its block, so the scales determine h, da and db to the bit."""
    a = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(BF16)
    a = a[a.isfinite()]
    m = len(a)
    assert m % 128 == 0
    alone = torch.eye(128, device="cuda", dtype=BF16).repeat(m // 128, 1)
    dh, a, b = alone, alone * a[:, None], alone * 2.0**exponent
    check(dh, a, b)
    check(b, a, dh)
    h_s = kernels.swiglu_1x128(a, b)[1]
    _, da_s, _, da_s_t, _, db_s, _, db_s_t, _, h_s_t = kernels.swiglu_backward_1x128_128x1_t(
        dh, a, b
    )
    for rows, columns in ((h_s, h_s_t), (da_s, da_s_t), (db_s, db_s_t)):
        assert torch.equal(rows.view(-1, 128), columns.t()), "rows and columns differ"


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("shape", ODD_SWIGLU, ids=str)
def test_gradients_of_scores(shape, before):
    """To one bf16 ulp of h and da."""
    tensors = *swiglu_inputs(shape), torch.rand(shape[0], device="cuda")
    with poisoned_outputs():
        got = kernels.swiglu_dscores(*tensors, before)
    dh, a, b, scores = (t.double() for t in tensors)
    terms = (dh * reference.swiglu(a, b).double()).abs().sum(1)
    terms += before * (dh * a * b).abs().sum(1)
    error = (got - reference.swiglu_dscores(*tensors, before)).abs()
    assert (error <= 2**-7 * terms / scores).all()
    assert not kernels.swiglu_dscores(*tensors[:3], 0 * tensors[3], before).any()


def test_the_scales_are_nearly_all_the_same():
    """If h, da or db were rounded twice, a tenth of the scales would differ."""
    dh, a, b = swiglu_inputs((8192, 1408))
    got = (*kernels.swiglu_1x128(a, b), *kernels.swiglu_backward_1x128_128x1_t(dh, a, b))
    want = (
        *reference.swiglu_1x128(a, b),
        *reference.swiglu_backward_1x128_128x1_t(dh, a, b),
    )
    for x, y in zip(got[1::2], want[1::2], strict=True):
        assert (x != y).float().mean() < FLIPS


@pytest.mark.parametrize("a", [88.0, 100.0, 3e38, float("inf"), float("nan")])
@pytest.mark.parametrize("b", [1.0, 1e30])
def test_the_ends_of_the_range(a, b):
    a = torch.tensor([a, -a], device="cuda", dtype=BF16)[:, None].expand(2, 128).contiguous()
    b = torch.full_like(a, b)
    check(torch.ones_like(a), a, b)
    for x in kernels.swiglu_1x128(a, b):
        assert bool(x[1].float().isfinite().all()) == bool(a[1].isfinite().all())


def test_fp32_and_mixed_dtypes_are_the_reference_to_the_bit():
    dh, a, b = swiglu_inputs((200, 272))
    offs = torch.tensor([10, 150], device="cuda", dtype=torch.int32)
    for layout in ((), (offs, False)):
        check_exactly(dh.float(), a.float(), b.float(), *layout)
        check_exactly(dh, a, b.float(), *layout)


def test_non_contiguous_inputs():
    """Halves of one tensor, like the output of a GEMM by w1 and w3 in one."""
    dh, a, b = swiglu_inputs((200, 272))
    views = [torch.cat([x, x], 1)[:, 272:] for x in (dh, a, b)]
    assert not any(x.is_contiguous() for x in views)
    got = kernels.swiglu_1x128(*views[1:]), kernels.swiglu_backward_1x128_128x1_t(*views)
    want = kernels.swiglu_1x128(a, b), kernels.swiglu_backward_1x128_128x1_t(dh, a, b)
    for x, y in zip(got, want, strict=True):
        assert_same(x, y)


def test_beyond_int32():
    """More than 2^31 elements; compares the last rows, whose offsets do not fit into int32."""
    m, k = 131072 + 128, 16384
    last = swiglu_inputs((128, k))
    tensors = [torch.empty(m, k, device="cuda", dtype=BF16).copy_(x[:1]) for x in last]
    for x, rows in zip(tensors, last, strict=True):
        x[-128:] = rows
    want = kernels.swiglu_1x128(*last[1:]), kernels.swiglu_backward_1x128_128x1_t(*last)
    got = [t[-128:].contiguous() for t in kernels.swiglu_1x128(*tensors[1:])]
    assert_same(got, [t.contiguous() for t in want[0]])
    got = kernels.swiglu_backward_1x128_128x1_t(*tensors)
    columns = {2: 128, 3: 1, 6: 128, 7: 1, 8: 128, 9: 1}
    got = [t[:, -columns[i] :] if i in columns else t[-128:] for i, t in enumerate(got)]
    assert_same([t.contiguous() for t in got], [t.contiguous() for t in want[1]])
