"""An op that runs several FP8 ops one after the other, for code from torch.compile.

A call of an op takes the CPU longer than many of its kernels run. A sequence is called once, and
its launches are replayed together. What only its own ops read is a temporary of the replay and no
tensor. The tensors that it is given live until it ends. `graph_passes.py` puts sequences into
graphs.

Compiled code is cached on disk, so a sequence is a string: the Python expression of its steps and
results. Torch's C++ code puts the string between double quotes, so it has none.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_fp8.layouts import E4M3
from titan_fp8.ops import registry
from titan_fp8.ops.operands import DTYPES

_DTYPES = {*DTYPES, E4M3, torch.int32, torch.int64}


class Place(NamedTuple):
    """Where the tensor of an argument or a result comes from.

    Steps count from 1. The outputs of step 0 are the tensors that the op is given.
    """

    step: int
    output: int


class Step(NamedTuple):
    """A call of the op that `torch.ops.titan_fp8` has under this name.

    Arguments are Places and constants; options are constants.
    """

    op: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def encode(steps: Sequence[Step], results: Sequence[Place]) -> str:
    """The string of a sequence."""
    return repr((tuple(steps), tuple(results)))


@functools.cache
def _decode(sequence: str) -> tuple[tuple[Step, ...], tuple[Place, ...], tuple[list[Place], ...]]:
    """The steps, the results, and for each step the tensors that no later one reads."""
    steps, results = eval(sequence, {"Step": Step, "Place": Place, "torch": torch})
    last: dict[Place, int] = {}
    for number, step in enumerate(steps):
        last |= {place: number for place in step.arguments if isinstance(place, Place)}
    gone = tuple(
        [p for p, number in last.items() if p.step and number == n and p not in results]
        for n in range(len(steps))
    )
    return steps, results, gone


def run_steps(ops: Any, *arguments: Any) -> tuple[Tensor, ...]:
    """Runs the sequence that is the last argument on the tensors before it."""
    *tensors, sequence = arguments
    steps, results, gone = _decode(sequence)
    if not _DTYPES.issuperset([t.dtype for t in tensors]):
        dtypes = [t.dtype for t in tensors]
        raise ValueError(f"titan_fp8::sequence: tensors are {dtypes}: allowed are {_DTYPES}")
    found: list[list[Any]] = [tensors]
    for step, places in zip(steps, gone, strict=True):
        args = [found[a.step][a.output] if isinstance(a, Place) else a for a in step.arguments]
        args = registry.OPS[step.op].check.laid_out(args)
        outputs = getattr(ops, step.op)(*args, **step.options)
        found.append([*outputs] if isinstance(outputs, tuple) else [outputs])
        del args, outputs
        for place in places:  # Frees the memory.
            found[place.step][place.output] = None
    return tuple([found[place.step][place.output] for place in results])


def _run(tensors: list[Tensor], sequence: str) -> list[Tensor]:
    return [*registry.run(run_steps, *tensors, sequence)]


def _fake(tensors: list[Tensor], sequence: str) -> list[Tensor]:
    return [*run_steps(registry.DISPATCHED, *tensors, sequence)]


OVERLOAD = registry.register(
    "sequence", "(Tensor[] tensors, str sequence) -> Tensor[]", run=_run, fake=_fake
)
