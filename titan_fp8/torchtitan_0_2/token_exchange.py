"""The all-to-alls of expert parallelism, with less CPU time.

PyTorch's functional collectives do in Python what torchtitan's dispatch does not need: they resolve
the process group, check the sizes, and pass through two autograd functions. These functions call
the same ops, so activation checkpointing sees and saves what it did before.

To send its rows, a rank must know how many of them each rank gets, and how many it receives. So the
ranks first exchange the counts of each expert, and the CPU waits for the sums. torchtitan does all
of this in a hook on the experts, which runs after that of FSDP2. Here `exchange_counts` starts it
before FSDP2's hook, whose work the CPU then does while the counts travel, and the sums are copied
to the CPU together.
"""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import expert_parallel

from titan_fp8.activation_checkpointing import inside_checkpoint
from titan_fp8.functional import no_double_backward
from titan_fp8.torchtitan_0_2.peer_exchange import exchanging

_c10d = torch.ops._c10d_functional


class _Exchanged(NamedTuple):
    """The rows for each expert, exchanged between the ranks.

    Attributes:
        counts: how many of this rank's rows each expert gets (experts,).
        received: how many rows come from each rank for each local expert (experts,), rank first.
        splits: the sums of both for each rank (2, ranks), on the CPU.
        copied: when `splits` has arrived there; None if it has.
    """

    counts: Tensor
    received: Tensor
    splits: Tensor
    copied: torch.cuda.Event | None


_groups: WeakKeyDictionary[nn.Module, ProcessGroup] = WeakKeyDictionary()
"""The ranks between which the tokens of experts are exchanged, once that has happened."""
_started: WeakKeyDictionary[nn.Module, _Exchanged] = WeakKeyDictionary()
"""What `exchange_counts` has started and `token_dispatch` has not used yet."""


def exchange_counts(experts: nn.Module, counts: Tensor) -> None:
    """Starts the exchange of the counts that `experts` will be called with.

    It does nothing in a recomputation. Under op-level checkpointing the result is saved there;
    under full checkpointing `token_dispatch` makes the exchange.
    """
    group = _groups.get(experts)
    if group is not None and torch._C._current_graph_task_id() == -1:
        _started[experts] = _exchange_counts(counts, group, blocking=False)


def _exchange_counts(counts: Tensor, group: ProcessGroup, blocking: bool) -> _Exchanged:
    with torch.no_grad():
        with inside_checkpoint():
            arriving = all_to_all_single(counts, None, None, group)
        received = _c10d.wait_tensor.default(arriving)
        splits = torch.stack((counts, received)).view(2, group.size(), -1).sum(-1)
        with inside_checkpoint():
            splits = splits.to("cpu", non_blocking=not blocking)
    pending = not blocking and counts.is_cuda
    copied = torch.cuda.current_stream().record_event() if pending else None
    return _Exchanged(counts, received, splits, copied)


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


def token_dispatch(
    self: expert_parallel.ExpertParallel,
    mod: Any,
    inputs: tuple[Tensor, Tensor],
    device_mesh: DeviceMesh,
) -> tuple[Tensor, Tensor]:
    """ExpertParallel._token_dispatch: sends each row to the rank of its expert.

    Args:
        inputs: rows (S, dim), sorted by expert, and the rows for each expert (experts,) integers.

    Returns:
        The rows of the local experts, as `_permute` pads them, and the padded sizes of the groups;
        the inputs themselves, if the layer exchanges its tokens (`peer_exchange.py`).
    """
    if mod in exchanging:
        return inputs
    rows, counts = inputs
    group, ranks = device_mesh.get_group(), device_mesh.shape[0]
    exchanged = _started.pop(mod, None)
    if exchanged is None or exchanged.counts is not counts:
        exchanged = _exchange_counts(counts, group, blocking=True)
    _groups[mod] = group
    if exchanged.copied is not None:
        exchanged.copied.synchronize()
    self.input_splits, self.output_splits = exchanged.splits.tolist()
    rows = all_to_all_single_autograd(rows, self.output_splits, self.input_splits, group)
    self.input_shape, rows, self.permuted_indices, sizes = expert_parallel._permute(
        rows, exchanged.received, ranks, len(counts) // ranks
    )
    return rows, sizes


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows; backward sends the gradient of each row back to where it came from."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, received: list[int], sent: list[int], group_name: str
    ) -> Tensor:
        ctx.arguments = sent, received, group_name
        with torch._C._AutoDispatchBelowAutograd(), inside_checkpoint():
            out = _c10d.all_to_all_single.default(x, received, sent, group_name)
        return AsyncCollectiveTensor(out)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            out = _c10d.all_to_all_single.default(g.contiguous(), *ctx.arguments)
            return _c10d.wait_tensor.default(out), None, None, None
