"""Reads a DCP checkpoint one tensor, or some experts of a tensor, at a time."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

METADATA = ".metadata"
"""DCP writes this file last: a folder without it is no checkpoint, or an incomplete one."""


class Checkpoint:
    """The tensors of one step, by name; `tensors` has their shapes and dtypes."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not (self.folder / METADATA).is_file():
            raise ValueError(
                f"CHECKPOINT = {self.folder} has no {METADATA}: allowed is the folder of one step, "
                "such as checkpoint/step-1000"
            )
        self._reader = FileSystemReader(self.folder)
        with self._readable(METADATA):
            metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """The tensor `name`, or its `rows` along dimension 0, on the CPU in the dtype as saved.

        The parts that ranks have saved are read one at a time, each as a whole.
        """
        saved = self.tensors[name]
        shape, offsets = list(saved.size), [0] * len(saved.size)
        if rows is not None:
            shape[0], offsets[0] = len(rows), rows.start
        target = torch.empty(shape, dtype=saved.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(offsets), target.shape)
        items = create_read_items_for_chunk_list(name, saved, [wanted])
        if (found := sum(item.lengths.numel() for item in items)) != target.numel():
            raise ValueError(
                f"CHECKPOINT = {self.folder}: {name} has {found} of {target.numel()} elements: the "
                "checkpoint is incomplete; export another step"
            )
        with self._readable(name):
            self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        return target

    @contextlib.contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        """Turns whatever DCP raises for a damaged file into a ValueError."""
        try:
            yield
        except Exception as error:
            summary = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(
                f"CHECKPOINT = {self.folder}: {what} cannot be read ({summary}): a file is missing "
                "or damaged; export another step"
            ) from error


class _Into(DefaultLoadPlanner):
    """Lets the reader write to one tensor, which may be only a part of the saved one."""

    def __init__(self, target: Tensor):
        super().__init__()
        self.target = target

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.target
