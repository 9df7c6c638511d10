"""How FSDP2 reduces the gradients of a unit: bf16 gradients are sent in bf16.

With `mixed_precision_reduce = "float32"`, torchtitan's default, FSDP2 casts bf16 gradients to FP32
and reduce-scatters them. Half of the bytes of such an FP32 number are zeros. Here the ranks send
each other the bf16 gradients, and each sums its part in FP32. Between two ranks the results are
those of NCCL's reduce-scatter, bit for bit, if gradients are divided by a power of two, such as the
number of ranks. Otherwise FP32 sums may be rounded in another way: the order in which NCCL adds is
its own, and the kernel here multiplies and adds in one operation.

FSDP2's own way remains

- for groups that span several hosts. A reduce-scatter can add up the gradients of a host before
  they leave it; an exchange would send each of them.
- for gradients in FP32, such as those that FSDP2 adds up without reducing them (pipeline
  parallelism, `set_requires_gradient_sync(False)`).

A unit that one rank has whole, such as experts under as much expert parallelism as there are ranks,
has nothing to reduce, and FSDP2 still copies its gradients to FP32, divides them, copies them and
casts them back: 28 bytes per element of bf16. In bf16 all along, these are 12, and the results are
the same: both ways divide in FP32 and round once.
"""

import functools
import inspect
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PART_LIMIT = 2**31 - 2**13
"""A rank's part of a unit's gradients must have fewer elements: the kernel counts them in 32 bits,
those beyond the end of the last tile, too."""


def has_kernel(device: torch.device) -> bool:
    """Whether the kernel of `kernels/gradients.py` runs there."""
    return device.type == "cuda" and torch.version.hip is None


def in_bf16(foreach_reduce: Callable) -> Callable:
    """Wraps FSDP2's `foreach_reduce`: bf16 gradients are sent as they are, and summed in FP32."""
    names = tuple(inspect.signature(foreach_reduce).parameters)

    @functools.wraps(foreach_reduce)
    def reduce(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args)) | kwargs
        group = given["reduce_scatter_group"]
        are_bf16 = all(gradient.dtype == torch.bfloat16 for gradient in given["unsharded_grads"])
        if group is not None and are_bf16 and not given.get("force_sum_reduction_for_comms"):
            if _stays_on_its_rank(given):
                given["reduce_dtype"] = torch.bfloat16
            elif _can_be_exchanged(given):
                divisor = given["gradient_divide_factor"] or group.size()
                given["reduce_scatter_comm"] = GradientExchange(1 / divisor)
        return foreach_reduce(**given)

    return reduce


def noting_accumulation(to_accumulated_grad: Callable) -> Callable:
    """Wraps `FSDPParam.to_accumulated_grad_if_needed`, which runs where nothing is reduced.

    What has accumulated is FP32 and is not exchanged. A rank on which a unit got no gradient then
    would have a bf16 gradient later, and must not exchange it, either.
    """

    @functools.wraps(to_accumulated_grad)
    def accumulate(param: Any) -> None:
        param.titan_fp8_accumulates = True
        to_accumulated_grad(param)

    return accumulate


def _stays_on_its_rank(given: dict[str, Any]) -> bool:
    """Whether these arguments of `foreach_reduce` only copy and divide bf16 gradients."""
    return (
        given["reduce_scatter_group"].size() == 1
        and given["all_reduce_group"] is None
        and given["all_reduce_hook"] is None
        and given["orig_dtype"] == torch.bfloat16
    )


def _can_be_exchanged(given: dict[str, Any]) -> bool:
    """Whether these arguments of `foreach_reduce` reduce bf16 gradients in FP32 on one host.

    All ranks of the group come to the same answer.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    group = given["reduce_scatter_group"]
    ranks = group.size()
    shapes = (gradient.shape for gradient in given["unsharded_grads"])
    part = sum(-(-rows // ranks) * math.prod(others) for rows, *others in shapes)
    return (
        ranks > 1
        and type(given["reduce_scatter_comm"]) is DefaultReduceScatter
        and given["reduce_dtype"] == torch.float32
        and not any(hasattr(param, "titan_fp8_accumulates") for param in given["fsdp_params"])
        and 0 < part < PART_LIMIT
        and has_kernel(given["device"])
        and on_one_host(group)
    )


def on_one_host(group: dist.ProcessGroup) -> bool:
    """Whether all ranks of the group are on one host, if torchrun says how many a host has."""
    of_host, ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 0)), dist.get_process_group_ranks(group)
    return of_host > 0 and len({rank // of_host for rank in ranks}) == 1


class GradientExchange:
    """A reduce-scatter with FSDP2's interface (`ReduceScatter`), for one call of `foreach_reduce`.

    FSDP2 allocates a buffer for the gradients of all ranks, copies them in, and then allocates the
    output. The buffer is bf16 here, whatever dtype FSDP2 asks for.

    Args:
        scale: each gradient is multiplied by it before they are added, as NCCL does it.
    """

    def __init__(self, scale: float):
        self.scale = scale
        self._allocated = False

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if not self._allocated:
            self._allocated, dtype = True, torch.bfloat16
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sums each rank's part of `input_tensor` (bf16) in `output_tensor` (FP32); both flat.

        `op` is ignored, because `scale` says by what it would divide.
        """
        rank, ranks = group.rank(), group.size()
        parts = list(input_tensor.chunk(ranks))
        # A rank sends nothing to itself. NCCL would copy it at the speed of a transfer.
        own, parts[rank] = parts[rank], input_tensor[:0]
        received = input_tensor.new_empty((ranks - 1) * own.numel())
        others = list(received.chunk(ranks - 1))
        dist.all_to_all([*others[:rank], received[:0], *others[rank:]], parts, group)
        from titan_fp8.kernels.gradients import sum_gradients

        sum_gradients(output_tensor, own, received, rank, ranks, self.scale)
