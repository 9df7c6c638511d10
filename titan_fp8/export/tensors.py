"""Which tensors an export writes, from which tensors of the checkpoint, and their values.

torchtitan's state-dict adapters say what a tensor is called in Hugging Face's models and how its
elements are arranged there. They map one tensor to one, except for the stacked weights of experts
(E, N, K), of which each expert becomes a tensor of its own.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_fp8.export.checkpoint import Checkpoint
from titan_fp8.export.run import Run
from titan_fp8.layouts import BLOCK, E4M3, cdiv
from titan_fp8.reference import quantize_128x128

SCALE_SUFFIX = "_scale_inv"
STRIP = 8 * BLOCK
"""Rows of a weight that are quantized at once; the temporaries are in FP32."""

Part = tuple[str, torch.dtype, torch.Size]
"""A tensor in a file: name, dtype, shape."""


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
    def parts(self) -> list[Part]:
        if not self.quantized:
            return [(self.name, self.dtype, self.shape)]
        scales = torch.Size(cdiv(size, BLOCK) for size in self.shape)
        return [
            (self.name, E4M3, self.shape),
            (self.name + SCALE_SUFFIX, torch.float32, scales),
        ]

    @property
    def nbytes(self) -> int:
        return sum(shape.numel() * dtype.itemsize for _, dtype, shape in self.parts)


def plan_tensors(run: Run, saved: Checkpoint) -> list[HFTensor]:
    """Every tensor to write, in the model's order.

    Raises:
        ValueError: the checkpoint is not one of this model, or has a tensor for which Hugging
            Face's model has no place.
    """
    _check_same_model(run, saved)
    tensors = []
    for source, meta in run.state.items():
        dtype = meta.dtype if source in run.buffers else run.dtype
        mapped = run.to_hf(source, meta)
        if not mapped:
            _check_droppable(source, run, saved)
        for i, (name, value) in enumerate(mapped.items()):
            expert = i if meta.dim() == 3 else None
            quantized = source in run.quantized
            tensors.append(HFTensor(name, value.shape, source, expert, quantized, dtype))
    return tensors


def _check_same_model(run: Run, saved: Checkpoint) -> None:
    """ValueError unless the checkpoint has the model's tensors, all of them and no others."""
    where = f"CHECKPOINT = {saved.folder}"
    hint = f"is {run.description} the model of the run? --config or --model.flavor says which"
    missing = [name for name in run.state if name not in saved.tensors]
    if missing:
        raise ValueError(
            f"{where} lacks {len(missing)} of {len(run.state)} tensors, {missing[0]} first: {hint}"
        )
    for name, meta in run.state.items():
        if (found := saved.tensors[name].size) != meta.shape:
            raise ValueError(
                f"{where}: {name} has shape {tuple(found)}, expected {tuple(meta.shape)}: {hint}"
            )
    roots = {name.split(".")[0] for name in run.state}
    others = [n for n in saved.tensors if n.split(".")[0] in roots and n not in run.state]
    if others:
        raise ValueError(
            f"{where} has {len(others)} tensors that the model lacks, {others[0]} first: {hint}"
        )


def _check_droppable(source: str, run: Run, saved: Checkpoint) -> None:
    """ValueError if leaving out a tensor that has no name in Hugging Face's model changes it."""
    tied = source == "output.weight" and run.tied
    if not tied and saved.read(source).any():
        raise ValueError(
            f"{source} is not zero, and Hugging Face's model for {run.description} has no such "
            "tensor: it cannot be exported"
        )


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


def converted_parts(
    tensors: Sequence[HFTensor], run: Run, saved: Checkpoint, limit: int
) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the tensors' parts, in order, one tensor at a time.

    Of stacked experts at most `limit` bytes, or one expert, are read at once.
    """
    for source, group in itertools.groupby(tensors, key=lambda tensor: tensor.source):
        of_source = list(group)
        if of_source[0].expert is None:
            (tensor,) = of_source
            # No name here keeps the value while the next one is read.
            yield from _convert(
                tensor, run.to_hf(source, saved.read(source))[tensor.name], run.scale_fmt
            )
            continue
        expert_bytes = of_source[0].shape.numel() * saved.tensors[source].properties.dtype.itemsize
        step = max(1, limit // expert_bytes)
        for first in range(0, len(of_source), step):
            some = of_source[first : first + step]
            start = some[0].expert
            assert start is not None
            stacked = saved.read(source, range(start, start + len(some)))
            for tensor, value in zip(some, stacked, strict=True):
                yield from _convert(tensor, value, run.scale_fmt)
            del stacked, value


def _convert(tensor: HFTensor, value: Tensor, scale_fmt: str) -> Iterator[tuple[str, Tensor]]:
    if not tensor.quantized:
        # A copy, so that no view keeps the stacked experts in memory until the file is written.
        value = value.to(tensor.dtype, copy=True).contiguous()
        _check_finite(tensor, value)
        yield tensor.name, value
        return
    strips = [
        quantize_128x128(rows.to(tensor.dtype), scale_fmt=scale_fmt) for rows in value.split(STRIP)
    ]
    q, s = (torch.cat(parts) for parts in zip(*strips))
    _check_finite(tensor, s)
    yield tensor.name, q
    yield tensor.name + SCALE_SUFFIX, s


def _check_finite(tensor: HFTensor, value: Tensor) -> None:
    # Unlike isfinite(), aminmax() needs no temporary of the tensor's size, and keeps NaN and Inf.
    least, largest = value.aminmax()
    if not (least.isfinite() and largest.isfinite()):
        of_expert = "" if tensor.expert is None else f" of expert {tensor.expert}"
        raise ValueError(
            f"{tensor.source}{of_expert} has NaN or infinite elements: export an earlier step"
        )
