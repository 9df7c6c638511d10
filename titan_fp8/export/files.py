"""Writes the files of a Hugging Face model folder atomically.

A file is written under another name, flushed to the disk and renamed. So a file that has its final
name is complete, even if the process is killed at any moment.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from titan_fp8.export.tensors import HFTensor

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
PARTIAL = ".partial"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, renamed to `path` after the block if that raises nothing."""
    partial = path.with_name(path.name + PARTIAL)
    with open(partial, "xb") as file:
        mode = os.fstat(file.fileno()).st_mode
    yield partial
    with open(partial, "rb") as file:
        # safetensors writes a file of its own, which nobody but its owner may read.
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
    os.rename(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, content: Any) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n")


def shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05}-of-{count:05}.safetensors"


def write_safetensors(
    path: Path, tensors: Sequence[HFTensor], values: Iterable[tuple[str, Tensor]]
) -> None:
    """Write a file of `tensors`, whose values come in the order of their parts.

    All of them are in memory at once: the library has no way to write one after the other.
    """
    parts = [part for tensor in tensors for part in tensor.parts]
    content = {}
    for (name, value), part in zip(values, parts, strict=True):
        assert (name, value.dtype, value.shape) == part
        content[name] = value
    with replacing(path) as partial:
        try:
            save_file(content, partial, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{path.name}: {error}") from error


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
