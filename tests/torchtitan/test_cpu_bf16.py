"""Products of bf16 matrices on the CPU: those of FP32, rounded once."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from titan_fp8 import cpu_host
from titan_fp8.cpu_host import bf16
from titan_fp8.patches import BF16_KERNELS

NAMES = ("mm", "addmm", "bmm", "baddbmm")


@pytest.fixture(scope="module", autouse=True)
def overridden() -> Iterator[None]:
    """FP32 products on every CPU."""
    for kernel in BF16_KERNELS:
        kernel.replace(bf16.in_fp32(kernel.path))
    yield
    for kernel in BF16_KERNELS:
        kernel.replace(cpu_host._in_fp32(kernel.path))


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def case(name: str, m: int = 96, k: int = 640, n: int = 72) -> list[torch.Tensor]:
    """The tensors that the op called `name` takes, in bf16."""
    torch.manual_seed(0)
    batch = (3,) if "bmm" in name else ()
    bias = [randn(*batch, m, n)] if name.endswith(("addmm", "addbmm")) else []
    return [*bias, randn(*batch, m, k), randn(*batch, k, n)]


def transposed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same values, with the last two dimensions swapped in memory."""
    return [tensor.mT.contiguous().mT for tensor in tensors]


def floats(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.float() for tensor in tensors]


@pytest.mark.parametrize("layout", [list, transposed])
@pytest.mark.parametrize("name", NAMES)
def test_is_the_fp32_product_rounded(name: str, layout: Callable) -> None:
    op, tensors = getattr(torch, name), layout(case(name))
    product = op(*tensors)
    assert product.equal(op(*floats(tensors)).bfloat16())
    assert product.is_contiguous()
    out = torch.full_like(product, torch.nan)
    assert op(*tensors, out=out) is out
    assert out.equal(product)


@pytest.mark.parametrize("name", ["addmm", "baddbmm"])
def test_alpha_and_beta(name: str) -> None:
    op, tensors = getattr(torch, name), case(name)
    scales = {"alpha": 0.3, "beta": 1.7}
    expected = op(*floats(tensors), **scales).bfloat16()
    assert op(*tensors, **scales).equal(expected)
    bias = tensors[0].clone()
    op(bias, *tensors[1:], **scales, out=bias)
    assert bias.equal(expected)
    tensors[0].fill_(torch.nan)  # beta = 0 ignores the bias
    assert op(*tensors, beta=0).isfinite().all()


def test_strided_and_broadcast_tensors() -> None:
    _, x_MK, w_KN = case("addmm")
    x_MK, w_KN, bias_N = x_MK[::2, ::3], w_KN[::3, ::2], randn(36)
    expected = torch.addmm(bias_N.float(), x_MK.float(), w_KN.float()).bfloat16()
    assert torch.addmm(bias_N, x_MK, w_KN).equal(expected)
    out = torch.full((48, 72), torch.nan, dtype=torch.bfloat16)
    torch.addmm(bias_N, x_MK, w_KN, out=out[:, ::2])
    assert out[:, ::2].equal(expected)
    assert out[:, 1::2].isnan().all()


@pytest.mark.parametrize("empty", ["m", "k", "n"])
@pytest.mark.parametrize("name", NAMES)
def test_empty_dimensions(name: str, empty: str) -> None:
    op, tensors = getattr(torch, name), case(name, **{empty: 0})
    product = op(*tensors)
    assert product.dtype is torch.bfloat16
    assert product.equal(op(*floats(tensors)).bfloat16())
    assert op(*tensors, out=torch.full_like(product, torch.nan)).equal(product)


def test_out_is_resized() -> None:
    x_MK, w_KN = case("mm")
    out = torch.empty(0, dtype=torch.bfloat16)
    torch.mm(x_MK, w_KN, out=out)
    torch.testing.assert_close(out, torch.mm(x_MK, w_KN))


def test_mixed_dtypes_stay_errors() -> None:
    x_MK, w_KN = case("mm")
    for operands in [(x_MK, w_KN.float()), (x_MK.float(), w_KN)]:
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.mm(*operands)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(x_MK, w_KN, out=torch.empty(96, 72))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.mm(x_MK, x_MK)


def test_backward_multiplies_in_fp32() -> None:
    x_MK, w_NK, grad_MN = randn(96, 640), randn(72, 640), randn(96, 72)
    for tensor in (x_MK, w_NK):
        tensor.requires_grad_()
    F.linear(x_MK, w_NK).backward(grad_MN)
    assert x_MK.grad.equal((grad_MN.float() @ w_NK.float()).bfloat16())
    assert w_NK.grad.equal((grad_MN.float().T @ x_MK.float()).bfloat16())


def test_compiled_code_multiplies_in_fp32() -> None:
    bias_MN, x_MK, w_KN = case("addmm")

    @torch.compile(fullgraph=True)
    def compiled(x_MK: torch.Tensor, w_KN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x_MK @ w_KN, torch.addmm(bias_MN, x_MK, w_KN)

    x_MK.requires_grad_()
    product, total = compiled(x_MK, w_KN)
    assert product.equal((x_MK.float() @ w_KN.float()).bfloat16())
    assert total.equal(torch.addmm(bias_MN.float(), x_MK.float(), w_KN.float()).bfloat16())
    product.backward(bias_MN)
    assert x_MK.grad.equal((bias_MN.float() @ w_KN.float().T).bfloat16())


def test_grouped_products() -> None:
    x_MK, w_EKN = randn(96, 640), randn(2, 640, 72)
    product = torch._grouped_mm(x_MK, w_EKN, torch.tensor([40, 96], dtype=torch.int32))
    parts = [x_MK[:40].float() @ w_EKN[0].float(), x_MK[40:].float() @ w_EKN[1].float()]
    assert product.equal(torch.cat(parts).bfloat16())


@pytest.mark.parametrize("masked", [False, True])
def test_attention_multiplies_in_fp32_in_backward(masked: bool) -> None:
    torch.manual_seed(0)
    # (batch, heads, tokens, dimension), in the memory order of torchtitan's models
    q, k, v, grad = (randn(2, 40, 3, 16).transpose(1, 2) for _ in range(4))
    mask = {"attn_mask": randn(40, 40) if masked else None}
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, not masked, **mask
    )
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    tensors = [grad, q, k, v, output]
    found = backward(*tensors, logsumexp, 0.0, not masked, **mask)
    if masked:
        mask = {"attn_mask": mask["attn_mask"].float()}
    expected = backward(*floats(tensors), logsumexp, 0.0, not masked, **mask)
    for gradient, widened in zip(found, expected):
        assert gradient.equal(widened.bfloat16())
        assert gradient.stride() == widened.stride()


def test_only_cpus_without_bf16_kernels_change(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = [torch.randn(5, 5, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    products = []
    for native in (True, False):
        monkeypatch.setattr(bf16, "has_bf16_kernels", lambda native=native: native)
        for _ in range(2):
            for kernel in BF16_KERNELS:
                kernel.replace(cpu_host._in_fp32(kernel.path))
        dumps = [torch._C._dispatch_dump(kernel.path) for kernel in BF16_KERNELS]
        assert {"/patches.py" in dump for dump in dumps} == {not native}
        products.append([operand @ operand for operand in operands])
    assert all(map(torch.equal, *products))
