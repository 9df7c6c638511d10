"""How FSDP2 reduces the gradients of a unit: bf16 gradients travel in bf16.

With `mixed_precision_reduce = "float32"`, torchtitan's default, FSDP2 casts gradients to FP32 and
reduce-scatters them. If the gradients are bf16, half of what it sends is zeros. Here the ranks of
one host exchange their parts in bf16, and each sums what it gets in FP32. Between two ranks the
results are those of NCCL's reduce-scatter, bit for bit. With more ranks NCCL adds in an order of
its own, so FP32 sums may be rounded in another way.

Between hosts a reduce-scatter sums what leaves a host, and an exchange would not. So groups that
span several hosts are left to FSDP2.

A unit that one rank has whole, such as experts under as much expert parallelism as there are ranks,
has nothing to reduce, and FSDP2 still copies its gradients to FP32, divides them, copies them and
casts them back: 28 bytes per element of bf16. In bf16 all along, these are 12, and the results are
the same: both ways divide in FP32 and round once.
"""

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PART_LIMIT = 2**31
"""A rank's part of the gradients must have fewer elements: the kernel counts them in 32 bits."""


def in_bf16(foreach_reduce: Callable) -> Callable:
    """Wraps FSDP2's `foreach_reduce`: bf16 gradients travel as they are and are summed in FP32."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    names = tuple(inspect.signature(foreach_reduce).parameters)

    @functools.wraps(foreach_reduce)
    def reduce(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args)) | kwargs
        if _stays_on_its_rank(given):
            given["reduce_dtype"] = torch.bfloat16
        elif type(given["reduce_scatter_comm"]) is DefaultReduceScatter and _can_be_exchanged(
            given
        ):
            divisor = given["gradient_divide_factor"] or given["reduce_scatter_group"].size()
            given["reduce_scatter_comm"] = GradientExchange(1 / divisor)
        return foreach_reduce(**given)

    return reduce


def _all_are_bf16(given: dict[str, Any]) -> bool:
    return all(gradient.dtype == torch.bfloat16 for gradient in given["unsharded_grads"])


def _stays_on_its_rank(given: dict[str, Any]) -> bool:
    """Whether these arguments of `foreach_reduce` only copy and divide bf16 gradients."""
    group = given["reduce_scatter_group"]
    return (
        group is not None
        and group.size() == 1
        and given["all_reduce_group"] is None
        and given["all_reduce_hook"] is None
        and not given.get("force_sum_reduction_for_comms")
        and given["orig_dtype"] == torch.bfloat16
        and _all_are_bf16(given)
    )


def _can_be_exchanged(given: dict[str, Any]) -> bool:
    """Whether these arguments of `foreach_reduce` reduce bf16 gradients in FP32 on one host."""
    group = given["reduce_scatter_group"]
    return (
        group is not None
        and group.size() > 1
        and not given.get("force_sum_reduction_for_comms")
        and given["reduce_dtype"] == torch.float32
        and _all_are_bf16(given)
        and sum(gradient.numel() for gradient in given["unsharded_grads"]) < PART_LIMIT
        and has_kernel(given["device"])
        and on_one_host(group)
    )


def has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


@functools.cache
def on_one_host(group: dist.ProcessGroup) -> bool:
    """Whether torchrun has started all ranks of the group on one host."""
    ranks_of_host = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if not ranks_of_host:
        return False
    return len({rank // ranks_of_host for rank in dist.get_process_group_ranks(group)}) == 1


class GradientExchange:
    """A reduce-scatter with FSDP2's interface (`ReduceScatter`), for one call of `foreach_reduce`.

    FSDP2 allocates the gradients of all ranks, copies them in, and then allocates the output. What
    it allocates first is bf16 here.

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

        `op` is SUM, AVG or PREMUL_SUM, by NCCL's names. `scale` says the same.
        """
        rank, ranks = group.rank(), group.size()
        parts = list(input_tensor.chunk(ranks))
        # A rank sends nothing to itself. NCCL would copy it at the speed of a transfer.
        own, parts[rank] = parts[rank], input_tensor[:0]
        received = input_tensor.new_empty((ranks - 1) * own.numel())
        others = list(received.chunk(ranks - 1))
        dist.all_to_all([*others[:rank], received[:0], *others[rank:]], parts, group)
        _kernel()(output_tensor, own, received, rank, self.scale)


@functools.cache
def _kernel() -> Callable[..., tuple[()]]:
    from titan_fp8.kernels.gradients import sum_gradients

    return sum_gradients
