"""The permutation kernels equal the reference, and the permutation with them equals torchtitan's.

Gathers are compared bit for bit. Outputs hold NaN before each launch, so that an element that is
not written shows. So does memory that a kernel must not read: rows around x, and padding.
"""

import pytest
import torch
from gpu_utils import no_sync, poisoned_outputs
from shapes import ODD_ROUTING, ODD_ROW_LENGTHS
from torch import Tensor

from titan_fp8 import reference
from titan_fp8.host import permute

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from titan_fp8.kernels.permute import combine_rows, dot_rows, gather_rows

DTYPES = [torch.bfloat16, torch.float32]
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def torchtitan_moe():
    return pytest.importorskip("torchtitan.models.moe.utils")


def random_bits(*shape: int, dtype: torch.dtype) -> Tensor:
    """Any bits at all, NaN of every kind among them."""
    bits = BITS[dtype]
    low, high = torch.iinfo(bits).min, torch.iinfo(bits).max
    return torch.randint(low, high, shape, device="cuda", dtype=bits).view(dtype)


def assert_same(got: Tensor, want: Tensor, what: str = "") -> None:
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride()), what
    bits = BITS.get(got.dtype, got.dtype)
    assert torch.equal(got.view(bits), want.view(bits)), what


@every_dtype
@pytest.mark.parametrize("k", [*ODD_ROW_LENGTHS, 144, 1408, 8, 1])
@pytest.mark.parametrize("r", [1, 517, 4096])
def test_rows_are_copied_bit_for_bit(r, k, dtype):
    m = 300
    memory = random_bits(m + 2, k, dtype=dtype)
    memory[[0, -1]] = float("nan")
    x = memory[1:-1]
    for low, high in ((-1, 0), (0, m), (-3, m + 3)):
        index = torch.randint(low, high, (r,), device="cuda")
        want = reference.gather_rows(x, index)
        for i in (index, index.int()):
            with poisoned_outputs():
                assert_same(gather_rows(x, i), want)


@every_dtype
def test_nothing_to_copy(dtype):
    x = random_bits(64, 256, dtype=dtype)
    index = torch.tensor([3, -1, 0], device="cuda", dtype=torch.int32)
    with poisoned_outputs():
        assert gather_rows(x, index[:0]).shape == (0, 256)
        assert_same(gather_rows(x[:0], index), x.new_zeros(3, 256))
        assert gather_rows(x[:, :0], index).shape == (3, 0)


@every_dtype
@pytest.mark.parametrize("top", [1, 2, 6, 8])
@pytest.mark.parametrize("k", ODD_ROW_LENGTHS)
def test_rows_of_slots_are_weighted_and_once_rounded(k, top, dtype):
    x = torch.randn(300, k, device="cuda").to(dtype)
    slots = torch.randint(-2 * top, 302 * top, (517,), device="cuda")
    for weight in (None, torch.randn(300, top, device="cuda")):
        with poisoned_outputs():
            got = gather_rows(x, slots, weight, top)
        want = reference.gather_rows(x, slots, weight, top)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@every_dtype
@pytest.mark.parametrize("k", ODD_ROW_LENGTHS)
@pytest.mark.parametrize("top", [1, 2, 6, 8])
@pytest.mark.parametrize("t", [0, 1, 133])
def test_rows_are_summed_and_multiplied(t, top, k, dtype):
    y, a = (torch.randn(rows, k, device="cuda").to(dtype) for rows in (300, t))
    weight = torch.randn(t, top, device="cuda")
    index = torch.randint(-1, 300, (t, top), device="cuda")
    index[index == 7] = 300
    y[7] = float("nan")  # which nothing names
    exact, eps = y.double().nan_to_num(), torch.finfo(dtype).eps
    rows = torch.where((index < 300)[..., None], exact[index.clamp(0, 299)], 0.0)
    rows = torch.where((index < 0)[..., None], 0.0, rows)
    for w in (None, weight):
        for i in (index, index.int()):
            with poisoned_outputs():
                got = combine_rows(y, i, w)
            terms = rows if w is None else rows * w.double()[..., None]
            want, size = terms.sum(1), terms.abs().sum(1)
            assert got.dtype == dtype
            # One rounding to dtype, and one in FP32 at each product and sum.
            bound = eps / 2 * want.abs() + 2 * top * 2**-24 * size
            assert ((got.double() - want).abs() <= 1.01 * bound).all()
    with poisoned_outputs():
        got = dot_rows(a, y, index)
    terms = rows * a.double()[:, None]
    assert got.dtype == torch.float32
    error = (got.double() - terms.sum(-1)).abs()
    # Sums of some 70 are taken one after the other, at most, then in a tree.
    assert (error <= 128 * 2**-24 * terms.abs().sum(-1)).all()


@every_dtype
def test_what_is_not_there_is_zero_whatever_it_is_multiplied_by(dtype):
    nan, index = float("nan"), torch.tensor([[-1, 1], [3, 0]], device="cuda")
    x = torch.ones(3, 32, device="cuda", dtype=dtype)
    weight = torch.tensor([[nan], [nan], [1.0]], device="cuda")
    slots = torch.tensor([-1, 99, 2], device="cuda")
    with poisoned_outputs():
        gathered = gather_rows(x, slots, weight, 1)
        combined = combine_rows(x, index, torch.tensor([[nan, 1], [nan, 1]]).cuda())
        dots = dot_rows(torch.full_like(x[:2], nan), x, index)
    assert not gathered[:2].any() and gathered[2].eq(1).all()
    assert combined.eq(1).all()
    assert not dots[:, 0].any() and dots[:, 1].isnan().all()


def test_beyond_int32():
    """More than 2^31 elements, read and written."""
    m, k = 131072 + 128, 16384
    x = torch.randn(m, 1, device="cuda", dtype=torch.bfloat16).expand(m, k).contiguous()
    index = torch.arange(m, device="cuda", dtype=torch.int32).flip(0)
    got = gather_rows(x, index)
    for rows in (slice(0, 128), slice(m - 128, m)):
        assert_same(got[rows], x[index[rows]])


def both_ways(permute, unpermute, counts: list[list[int]], dtype: torch.dtype):
    """What leaves either function, forward and backward; its index, -1 for padding, and sizes."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, device="cuda", dtype=dtype, generator=generator)

    count = torch.tensor(counts, device="cuda")
    x = draw(sum(map(sum, counts)), 576).requires_grad_()
    shape, rows, index, sizes = permute(x, count.flatten(), *count.shape)
    tokens = getattr(index, "tokens", index)
    padding = (tokens < 0)[:, None]
    rows.backward(draw(*rows.shape).masked_fill(padding, float("nan")))
    out = draw(*rows.shape).masked_fill(padding, float("nan")).requires_grad_()
    y = unpermute(out, shape, index)
    y.backward(draw(*y.shape))
    return tokens, sizes, rows.detach(), x.grad, y.detach(), out.grad


@every_dtype
@pytest.mark.parametrize("alignment", [16, 128])
@pytest.mark.parametrize("counts", ODD_ROUTING)
def test_gathers_equal_torchtitans_permutation(
    monkeypatch, torchtitan_moe, counts, alignment, dtype
):
    def permute_by_gathers(x, count, ranks, _):
        return x.shape, *permute.sort_by_expert(x, count, ranks, alignment)

    monkeypatch.setattr(torchtitan_moe, "TOKEN_GROUP_ALIGN_SIZE_M", alignment)
    arguments = ODD_ROUTING[counts], dtype
    want = both_ways(torchtitan_moe._permute, torchtitan_moe._unpermute, *arguments)
    with poisoned_outputs():
        unpermute = lambda out, _, index: permute.sort_back(out, index)  # noqa: E731
        got = both_ways(permute_by_gathers, unpermute, *arguments)
    names = ("tokens", "sizes", "permuted", "gradient", "unpermuted", "its gradient")
    for name, a, b in zip(names, got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name


@every_dtype
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_a_layer_with_gathers_equals_torchtitans(torchtitan_moe, top_k, before, dtype):
    from torchtitan.models.moe.moe import MoE, MoEArgs

    from titan_fp8.host.torchtitan_0_2 import moe

    results = []
    for by_gathers in (False, True):
        torch.manual_seed(0)
        args = MoEArgs(num_experts=8, top_k=top_k, score_before_experts=before)
        with torch.device("cuda"):
            layer = MoE(args, dim=576, hidden_dim=64)
            layer.experts = torch.nn.Module()
            for parameter in layer.parameters():
                torch.nn.init.normal_(parameter, std=0.05)
            x = torch.randn(2, 130, 576, dtype=dtype).requires_grad_()
            g = torch.randn(2, 130, 576, dtype=dtype)
        # Rows keep their sizes and are told apart by where they stand.
        layer.experts.forward = lambda x, n: x * torch.linspace(1, 2, len(x)).to(x)[:, None]
        assert len(moe.route_by_gathers(torch.nn.ModuleList([layer] * by_gathers))) == by_gathers
        layer = layer.to(dtype)
        out = layer(x)
        out.backward(g)
        results.append((out.detach(), x.grad, layer.router.gate.weight.grad))
    for name, want, got in zip(("out", "x", "router"), *results, strict=True):
        assert got.dtype == want.dtype and want.any(), name
        error = (got - want).norm() / want.norm()
        assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5), name


@pytest.mark.parametrize("experts", [64, 256, 257])
def test_slots_are_sorted_by_expert(experts):
    chosen = torch.randint(experts, (16384, 6), device="cuda")
    chosen[7:90] = experts - 1
    want = chosen.flatten().argsort(stable=True)
    assert torch.equal(permute.slots_by_expert(chosen, experts), want)


def test_nothing_waits_for_the_device():
    count = torch.tensor(ODD_ROUTING["uneven"], device="cuda").flatten()
    x = torch.randn(432, 256, device="cuda", requires_grad=True)
    for _ in range(2):
        # The first time compiles the kernels.
        with no_sync():
            rows, index, _ = permute.sort_by_expert(x, count, 2, 8)
            permute.sort_back(2 * rows, index).backward(x.detach())
    assert torch.equal(x.grad, 4 * x.detach())
