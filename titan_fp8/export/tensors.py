"""Which tensors an export writes, from which tensors of the checkpoint, and their values.

torchtitan's state-dict adapters map a tensor to one of Hugging Face's model, by name and order of
elements; of the stacked weights of experts (E, N, K) each expert becomes a tensor of its own.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_fp8.export.checkpoint import Checkpoint
from titan_fp8.export.run import Run
from titan_fp8.layouts import BLOCK, cdiv
from titan_fp8.reference import quantize_128x128

STRIP = 8 * BLOCK
"""Rows of a weight that are quantized at once; the temporaries are in FP32."""


@dataclass(frozen=True)
class HFTensor:
    """A tensor of the Hugging Face model; with its scales, if it is quantized."""

    name: str
    shape: torch.Size
    source: str
    """Its name in the checkpoint."""
    expert: int | None
    """Which of the stacked experts it is."""
    quantized: bool
    dtype: torch.dtype
    """Of a tensor that is not quantized. Others are rounded to it first."""

    @property
    def nbytes(self) -> int:
        if not self.quantized:
            return self.shape.numel() * self.dtype.itemsize
        scales = math.prod(cdiv(size, BLOCK) for size in self.shape)
        return self.shape.numel() + scales * torch.float32.itemsize


def plan_tensors(run: Run, saved: Checkpoint) -> list[HFTensor]:
    """Every tensor to write, in the model's order.

    Raises:
        ValueError: the checkpoint is not one of this model, or has a tensor for which Hugging
            Face's model has no place.
    """
    if difference := _difference(run, saved):
        raise ValueError(
            f"CHECKPOINT = {saved.folder}{difference}: is {run.description} the model of the run? "
            "--config or --model.flavor says which"
        )
    tensors = []
    for source, meta in run.state.items():
        dtype = meta.dtype if source in run.buffers else run.dtype
        mapped = run.to_hf(source, meta)
        tied = source == "output.weight" and run.tied
        if not mapped and not tied and saved.read(source).any():
            raise ValueError(
                f"{source} is not zero, and Hugging Face's model for {run.description} has no such "
                "tensor: it cannot be exported"
            )
        for i, (name, value) in enumerate(mapped.items()):
            expert = i if meta.dim() == 3 else None
            quantized = source in run.quantized
            tensors.append(HFTensor(name, value.shape, source, expert, quantized, dtype))
    return tensors


def _difference(run: Run, saved: Checkpoint) -> str:
    """How the checkpoint's tensors differ from the model's; "" if it has these and no others."""
    if missing := [name for name in run.state if name not in saved.tensors]:
        return f" lacks {len(missing)} of {len(run.state)} tensors, {missing[0]} first"
    for name, meta in run.state.items():
        if (found := saved.tensors[name].size) != meta.shape:
            return f": {name} has shape {tuple(found)}, expected {tuple(meta.shape)}"
    roots = {name.split(".")[0] for name in run.state}
    others = [n for n in saved.tensors if n.split(".")[0] in roots and n not in run.state]
    return f" has {len(others)} tensors that the model lacks, {others[0]} first" if others else ""


def into_shards(tensors: Iterable[HFTensor], limit: int) -> list[list[HFTensor]]:
    """The tensors by file: at most `limit` bytes in each, unless a single tensor has more."""
    shards: list[list[HFTensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


def values_of(
    tensors: Sequence[HFTensor], run: Run, saved: Checkpoint, limit: int
) -> dict[str, Tensor]:
    """What a file holds: the tensors' values by name, and the scales of those in FP8.

    One tensor is read at a time; of stacked experts at most `limit` bytes, or one expert.
    """
    result: dict[str, Tensor] = {}
    for source, group in itertools.groupby(tensors, key=lambda tensor: tensor.source):
        of_source = list(group)
        nbytes = of_source[0].shape.numel() * saved.tensors[source].properties.dtype.itemsize
        step = max(1, limit // nbytes)
        for first in range(0, len(of_source), step):
            some = of_source[first : first + step]
            values: Iterable[Tensor]
            if (start := some[0].expert) is None:
                values = run.to_hf(source, saved.read(source)).values()
            else:
                values = saved.read(source, range(start, start + len(some)))
            for tensor, value in zip(some, values, strict=True):
                result |= _converted(tensor, value, run.scale_fmt)
            del values, value  # before the next ones are read
    return result


def _converted(tensor: HFTensor, value: Tensor, scale_fmt: str) -> dict[str, Tensor]:
    if tensor.quantized:
        strips = (rows.to(tensor.dtype) for rows in value.split(STRIP))
        parts = [quantize_128x128(strip, scale_fmt=scale_fmt) for strip in strips]
        q, checked = (torch.cat(each) for each in zip(*parts, strict=True))
        result = {tensor.name: q, f"{tensor.name}_scale_inv": checked}
    else:
        # A copy, so that no view keeps the stacked experts in memory until the file is written.
        checked = value.to(tensor.dtype, copy=True).contiguous()
        result = {tensor.name: checked}
    # Unlike isfinite(), aminmax() needs no temporary of the tensor's size, and keeps NaN and Inf.
    if not all(extreme.isfinite() for extreme in checked.aminmax()):
        of_expert = "" if tensor.expert is None else f" of expert {tensor.expert}"
        raise ValueError(
            f"{tensor.source}{of_expert} has NaN or infinite elements: export an earlier step"
        )
    return result
