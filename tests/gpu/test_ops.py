"""The ops on a GPU: what they refuse, strides, addresses, gradients, and the profiler."""

import functools

import pytest
import torch

import titan_fp8
from titan_fp8.ops import call as call_op

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

ops = torch.ops.titan_fp8


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "call", [ops.blockwise_fprop, functools.partial(call_op, "blockwise_fprop")]
)
def test_what_is_refused(call):
    x, w = normal(256, 512), normal(384, 512)
    q, s = ops.quantize_1x128(x)
    call(q, s, w)
    for bad in ((q, s, w.half()), (q, s[:128], w), (q, s.cpu(), w), (q, s, w.cpu())):
        with pytest.raises(ValueError, match="titan_fp8::blockwise_fprop: .*: allowed is"):
            call(*bad)


def test_strides_make_no_difference():
    """Of offs, of weights in FP8 and of scales, whatever a caller has made of them."""
    x, w = normal(300, 512), normal(3, 384, 512)
    offs = torch.tensor([5, 0, 120, 0, 300, 0], dtype=torch.int32, device="cuda")[::2]
    (q, s), (wq, ws) = ops.quantize_1x128(x), ops.quantize_128x128(w)
    _, sw_t = ops.quantize_128x128_t(w)
    g, sg = ops.quantize_1x128(normal(300, 384))
    permuted = wq.mT.contiguous().mT
    for _ in range(3):
        want = ops.blockwise_mm(q, s, wq, ws, offs.contiguous())
        got = ops.blockwise_mm(q, s.contiguous(), permuted, ws.mT.contiguous().mT, offs)
        assert torch.equal(got, want)
        want = ops.blockwise_dgrad(g, sg, wq, offs.contiguous(), w_scale=sw_t)
        got = ops.blockwise_dgrad(g, sg, permuted, offs, w_scale=sw_t.mT.contiguous().mT)
        assert torch.equal(got, want)


def moved(t: torch.Tensor) -> torch.Tensor:
    """A copy of t, one element past a multiple of 16 bytes."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def test_addresses_make_no_difference():
    x, w = normal(256, 512), normal(384, 512)
    (q, s), (wq, ws) = ops.quantize_1x128(x), ops.quantize_128x128(w)
    bytes_of = lambda t: moved(t.view(torch.uint8)).view(t.dtype)  # noqa: E731
    for _ in range(3):
        want = ops.blockwise_mm(q, s, wq, ws)
        assert torch.equal(ops.blockwise_mm(bytes_of(q), s, bytes_of(wq), moved(ws)), want)
        transposed = [ops.transpose_fp8(t).view(torch.uint8) for t in (wq, bytes_of(wq))]
        assert torch.equal(*transposed)
        for t in (x, w.float()):
            for got, expected in zip(ops.quantize_1x128(moved(t)), ops.quantize_1x128(t)):
                assert torch.equal(got.float(), expected.float())


def test_no_output_has_a_gradient():
    x, w = normal(256, 512).requires_grad_(), normal(384, 512).requires_grad_()
    for _ in range(2):
        operands = ops.quantize_1x128(x)
        y = ops.blockwise_fprop(*operands, w)
        dw = ops.bf16_wgrad(normal(256, 384), x)
        assert not any(t.requires_grad for t in (*operands, y, dw))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_profiler_sees_the_ops_of_layers(compiled):
    """And what each of them runs on the GPU."""
    layer = torch.nn.Sequential(torch.nn.Linear(512, 384, bias=False)).cuda().bfloat16()
    titan_fp8.convert_linears(layer, filter_fqns=())
    run = torch.compile(layer) if compiled else layer
    x = normal(256, 512).requires_grad_()
    run(x).sum().backward()
    with torch.profiler.profile() as profile:
        run(x).sum().backward()
    events = [e for e in profile.events() if e.name.startswith("titan_fp8::")]
    assert {e.name for e in events} == {
        "titan_fp8::quantize_1x128_128x1_t",
        "titan_fp8::blockwise_fprop",
        "titan_fp8::blockwise_dgrad",
        "titan_fp8::blockwise_wgrad",
    }
    assert all(e.device_time_total > 0 for e in events)
