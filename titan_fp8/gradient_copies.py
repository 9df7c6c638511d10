"""How FSDP2 copies the gradients of a unit into the buffer that it reduce-scatters.

The buffer holds, for each rank, that rank's rows of every gradient, in the dtype of the reduction.
FSDP2 fills it with one kernel, `chunk_cat`, which needs a table on the GPU. The table grows with
the rows of a rank. Between few ranks it is so large that the CPU waits for its copy, and so for all
earlier work of the stream. Here one launch per gradient writes the same numbers, without a table.

A unit that one rank has whole, such as experts under as much expert parallelism as there are ranks,
has nothing to reduce, and FSDP2 still copies its gradients to FP32, divides them, copies them and
casts them back: 28 bytes per element of bf16. In bf16 all along, these are 12, and the results are
the same: both ways divide in FP32 and round once.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PART_LIMIT = 2**31
"""A rank's part of a gradient must have fewer elements: the kernel counts them in 32 bits."""


def copy_by_kernel(copy_in: Callable) -> Callable:
    """Wraps FSDP2's `foreach_reduce_scatter_copy_in`: on GPUs, our kernel makes the copies."""

    @functools.wraps(copy_in)
    def copy(unsharded_grads: list[Tensor], reduce_scatter_input: Tensor, world_size: int) -> None:
        if not fits_kernel(unsharded_grads, reduce_scatter_input, world_size):
            return copy_in(unsharded_grads, reduce_scatter_input, world_size)
        _kernel()(reduce_scatter_input, world_size, *unsharded_grads)

    return copy


def without_fp32_on_one_rank(foreach_reduce: Callable) -> Callable:
    """Wraps FSDP2's `foreach_reduce`: bf16 gradients that stay on their rank stay in bf16."""
    names = tuple(inspect.signature(foreach_reduce).parameters)

    @functools.wraps(foreach_reduce)
    def reduce(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args)) | kwargs
        if _stays_in_bf16(given):
            given["reduce_dtype"] = torch.bfloat16
        return foreach_reduce(**given)

    return reduce


def _stays_in_bf16(given: dict[str, Any]) -> bool:
    """Whether these arguments of `foreach_reduce` only copy and divide bf16 gradients."""
    group = given["reduce_scatter_group"]
    return (
        group is not None
        and group.size() == 1
        and given["all_reduce_group"] is None
        and given["all_reduce_hook"] is None
        and not given.get("force_sum_reduction_for_comms")
        and given["orig_dtype"] == torch.bfloat16
        and all(gradient.dtype == torch.bfloat16 for gradient in given["unsharded_grads"])
    )


def fits_kernel(gradients: Sequence[Tensor], buffer: Tensor, ranks: int) -> bool:
    """Whether the kernel can copy them: plain contiguous tensors whose rows divide evenly."""
    on_nvidia = buffer.is_cuda and torch.version.hip is None
    return on_nvidia and all(
        type(g) is Tensor
        and g.is_contiguous()
        and g.shape[0]
        and g.shape[0] % ranks == 0
        and g.numel() // ranks < PART_LIMIT
        for g in gradients
    )


@functools.cache
def _kernel() -> Callable[..., tuple[()]]:
    from titan_fp8.kernels.gradients import copy_gradients

    return copy_gradients
