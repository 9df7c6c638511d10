"""Writes the files of a Hugging Face model folder atomically.

A file is written under another name, flushed to the disk and renamed. So a file that has its final
name is complete, even if the process is killed at any moment.
"""

import contextlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from titan_fp8.export.tensors import HFTensor

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
PARTIAL = ".partial"

_DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
}
"""safetensors' names."""


@contextlib.contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """A new file to write to, renamed to `path` after the block if that raises nothing."""
    partial = path.with_name(path.name + PARTIAL)
    with open(partial, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, content: Any) -> None:
    with atomic_writer(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05}-of-{count:05}.safetensors"


def write_safetensors(
    path: Path, tensors: Sequence[HFTensor], values: Iterable[tuple[str, Tensor]]
) -> None:
    """Write a file of `tensors`, whose values come one by one, in the order of their parts."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in (part for tensor in tensors for part in tensor.parts):
        start, end = end, end + shape.numel() * dtype.itemsize
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    expected = iter(part for tensor in tensors for part in tensor.parts)
    with atomic_writer(path) as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for (name, value), part in zip(values, expected, strict=True):
            assert (name, value.dtype, value.shape) == part
            file.write(value.contiguous().view(-1).view(torch.uint8).numpy().data)
            del value  # before the next one is made


def write_index(folder: Path, shards: Mapping[str, Sequence[HFTensor]]) -> None:
    """The index that says which file has which tensor; PyTorch's FP8 reader always wants one."""
    where = {
        name: file
        for file, tensors in shards.items()
        for tensor in tensors
        for name, *_ in tensor.parts
    }
    total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    write_json(folder / INDEX, content)
