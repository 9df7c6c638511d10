"""The transpose of FP8 equals the reference: every byte of every place."""

import pytest
import torch
from gpu_utils import poisoned_outputs
from shapes import ODD_TRANSPOSE

from titan_fp8 import reference

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from titan_fp8.kernels import hopper as kernels


@pytest.mark.parametrize("shape", ODD_TRANSPOSE, ids=str)
def test_every_byte_is_in_its_place(shape):
    q = torch.randint(256, shape, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    with poisoned_outputs():
        q_t = kernels.transpose_fp8(q)
    want = reference.transpose_fp8(q)
    assert q_t.shape == want.shape and q_t.stride() == want.stride()
    assert torch.equal(q_t.view(torch.uint8), want.view(torch.uint8))
