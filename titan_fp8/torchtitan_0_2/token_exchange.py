"""The all-to-alls of expert parallelism, with less CPU time.

PyTorch's functional collectives do in Python what torchtitan's dispatch does not need: they resolve
the process group, check the sizes, and pass through two autograd functions. These functions call
the same ops, so activation checkpointing sees and saves what it did before.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from titan_fp8.functional import no_double_backward

_c10d = torch.ops._c10d_functional


def all_to_all_single(
    x: Tensor, output_split_sizes: None, input_split_sizes: None, group: ProcessGroup
) -> Tensor:
    """Exchanges equal parts of x, without gradients; the caller waits by `wait_tensor`."""
    assert output_split_sizes is None and input_split_sizes is None
    sizes = [x.shape[0] // group.size()] * group.size()
    with torch._C._AutoDispatchBelowAutograd():
        return _c10d.all_to_all_single.default(x, sizes, sizes, group.group_name)


def all_to_all_single_autograd(
    x: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], group: ProcessGroup
) -> Tensor:
    """Sends rows of x (S, dim) to each rank and returns those received, as AsyncCollectiveTensor.

    Gradients flow through ops on the result. Its `wait()` returns a tensor without gradients, which
    suits the forward of an autograd function, as in `permute.py`.

    Args:
        output_split_sizes, input_split_sizes: the rows from each rank, and for each rank.
    """
    return _Exchange.apply(x, output_split_sizes, input_split_sizes, group.group_name)


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows; backward sends the gradient of each row back to where it came from."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, received: list[int], sent: list[int], group_name: str
    ) -> Tensor:
        ctx.arguments = sent, received, group_name
        with torch._C._AutoDispatchBelowAutograd():
            out = _c10d.all_to_all_single.default(x, received, sent, group_name)
            return AsyncCollectiveTensor(out)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            out = _c10d.all_to_all_single.default(g.contiguous(), *ctx.arguments)
            return _c10d.wait_tensor.default(out), None, None, None
