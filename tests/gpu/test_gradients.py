"""Copies of gradients equal FSDP2's own, bit for bit, also when their launches are replayed."""

import pytest
import torch
from gpu_utils import no_sync
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce_scatter_copy_in

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from titan_fp8.host.gradient_reduction import copy_by_kernel

SHAPES = {
    "block of a small Llama": [(256, 256), (64, 256), (256,), (768, 256), (256, 768), (256,)],
    "experts": [(8, 96, 64), (8, 64, 96), (64, 48)],
    "odd rows": [(128, 3), (64, 5, 7), (64,), (64, 4099)],
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("reduced", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_are_copied_as_fsdp2_does(shapes, ranks, dtype, reduced):
    if any(rows % ranks for rows, *_ in shapes):
        pytest.skip("rows do not divide by the ranks")

    def unused(*_):
        pytest.fail("FSDP2's own copies ran")

    copy = copy_by_kernel(unused)
    for _ in range(4):  # The third call is the first replay.
        grads = [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]
        grads[0].view(-1)[0] = float("inf")
        size = sum(g.numel() for g in grads)
        expected, copied = (
            torch.full((size,), float("nan"), device="cuda", dtype=reduced) for _ in range(2)
        )
        foreach_reduce_scatter_copy_in(grads, expected, ranks)
        with no_sync():
            copy(grads, copied, ranks)
        assert torch.equal(copied, expected)


OTHERS = {
    "padded": lambda ones: (ones[:5], 2),
    "transposed": lambda ones: (ones.t(), 2),
    "expanded": lambda ones: (ones[:1].expand(4, 4), 2),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_gradients_are_left_to_fsdp2(make):
    grad, ranks = make(torch.ones(8, 4, device="cuda"))
    args, calls = ([grad], torch.empty(100, device="cuda"), ranks), []
    copy_by_kernel(lambda *given: calls.append(given))(*args)
    assert calls == [args]
