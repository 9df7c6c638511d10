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
casts them to the dtype of the parameters. Here they are copied to that dtype and divided in place:
8 bytes per element instead of 28 for bf16 parameters, 14 instead of 22 for FP32. The results are
the same: both ways divide in FP32 and round once. Gradients that are added to earlier ones are
copied once more.

FSDP2 allocates what it reduces on a stream of its own, and the caching allocator gives memory of
one stream to no other: what it holds there at the end of backward, all gradients of the rank, is
of no use to the next forward. Here gradients are allocated on the stream of backward, before the
other stream writes them.
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
                _divide_in_place(given)
            elif _can_be_exchanged(given):
                scale = 1 / (given["gradient_divide_factor"] or group.size())
                dtype = given["orig_dtype"] if _become_gradients(given) else None
                given["reduce_scatter_comm"] = GradientExchange(scale, group.size(), dtype)
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
    """Whether these arguments of `foreach_reduce` only copy gradients, and divide them in FP32."""
    return (
        given["reduce_scatter_group"].size() == 1
        and given["reduce_dtype"] == torch.float32
        and given["all_reduce_group"] is None
        and given["all_reduce_hook"] is None
    )


def _divide_in_place(given: dict[str, Any]) -> None:
    """Has `foreach_reduce` divide gradients of one rank in one buffer, if they become `.grad`.

    Those that are added to earlier ones are copied, in bf16 if the parameters are.
    """
    becomes, divisor = _become_gradients(given), given["gradient_divide_factor"]
    if becomes or given["orig_dtype"] == torch.bfloat16:
        given["reduce_dtype"] = given["orig_dtype"]
    if becomes:
        given["reduce_scatter_comm"], given["gradient_divide_factor"] = OneBuffer(), None
        if divisor not in (None, 1):
            given["all_reduce_hook"] = lambda gradients: gradients.div_(divisor)


def _become_gradients(given: dict[str, Any]) -> bool:
    """Whether the output of `foreach_reduce` with these arguments is what `.grad` will be.

    Otherwise FSDP2 reads the output, and releases it while its stream still does so. Then it must
    be memory of that stream. All-reduces are in FP32.
    """
    if given["all_reduce_group"] is None:
        dtypes = [torch.float32, torch.bfloat16]
    else:
        once = given["all_reduce_grads"] and given["partial_reduce_output"] is None
        dtypes = [torch.float32] if once else []
    return (
        given["orig_dtype"] in dtypes
        and given["all_reduce_hook"] is None
        and not any(
            param.offload_to_cpu
            or param.sharded_param.grad is not None
            or param.sharded_param._post_accumulate_grad_hooks
            for param in given["fsdp_params"]
        )
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


class OneBuffer:
    """The buffers of a reduce-scatter (`ReduceScatter`) on one rank, where FSDP2 only copies.

    Both are the same tensor, so nothing is copied.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(*size, dtype=dtype, device=device)
        return self._buffer


class GradientExchange:
    """A reduce-scatter with FSDP2's interface (`ReduceScatter`), for one call of `foreach_reduce`.

    FSDP2 allocates a buffer for the gradients of all ranks on the stream of backward, copies them
    in, and allocates the output on its own stream. The buffer is bf16 here, whatever dtype FSDP2
    asks for, and its memory ends with room for what the other ranks send: FSDP2 holds it until the
    output is written.

    Args:
        scale: each gradient is multiplied by it before they are added, as NCCL does it.
        ranks: of the group.
        dtype: of an output that is allocated on the stream of backward, too. None: it is allocated
            as FSDP2 asks for it.
    """

    def __init__(self, scale: float, ranks: int, dtype: torch.dtype | None):
        self.scale, self._ranks, self._dtype = scale, ranks, dtype
        self._received: Tensor | None = None
        self._output: Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        (n,) = map(int, size)
        if self._received is None:
            part = n // self._ranks
            buffer = torch.empty(n + n - part, dtype=torch.bfloat16, device=device)
            if self._dtype is not None:
                self._output = torch.empty(part, dtype=self._dtype, device=device)
            gradients, self._received = buffer[:n], buffer[n:]
            return gradients
        if self._output is None:
            return torch.empty(n, dtype=dtype, device=device)
        return self._output

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sums each rank's part of `input_tensor` (bf16) in `output_tensor`; both flat.

        `op` is ignored, because `scale` says by what it would divide.
        """
        rank, ranks = group.rank(), group.size()
        parts = list(input_tensor.chunk(ranks))
        # A rank sends nothing to itself. NCCL would copy it at the speed of a transfer.
        own, parts[rank] = parts[rank], input_tensor[:0]
        received = self._received
        assert received is not None, "FSDP2 allocates the input first"
        others = list(received.chunk(ranks - 1))
        dist.all_to_all([*others[:rank], received[:0], *others[rank:]], parts, group)
        from titan_fp8.kernels.gradients import sum_gradients

        sum_gradients(output_tensor, own, received, rank, ranks, self.scale)
