"""Memory of GPUs that write to each other's: the same buffers at the same offsets on every rank."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_fp8.layouts import round_up

ALIGN_BYTES = 256


class SymmetricBuffers:
    """This rank's buffers, which all ranks of `group` make together, with the same arguments.

    Args:
        shapes: shape and dtype of each buffer by its name.

    Attributes:
        memory: all of them, bytes.
        deltas: (ranks,) int64: the distance, in units of 16 bytes, to the memory of each rank.

    Raises:
        RuntimeError: the GPUs cannot reach each other's memory.
    """

    def __init__(
        self,
        group: ProcessGroup,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
    ):
        from torch.distributed import _symmetric_memory as symmetric

        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes.values()]
        padded = [round_up(size, ALIGN_BYTES) for size in sizes]
        self.memory = symmetric.empty(sum(padded), dtype=torch.uint8, device=device)
        pieces = zip(shapes.items(), self.memory.split(padded), sizes, strict=True)
        self._views = {
            name: piece[:size].view(dtype).view(shape)
            for (name, (shape, dtype)), piece, size in pieces
        }
        handle = symmetric.rendezvous(self.memory, group.group_name)
        begin, addresses = self.memory.data_ptr(), list(handle.buffer_ptrs)
        shift = begin - addresses[group.rank()]  # 0, unless buffers have a common header.
        deltas = [(address + shift - begin) // 16 for address in addresses]
        self.deltas = torch.tensor(deltas, dtype=torch.int64, device=device)

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]
