"""An op that runs several FP8 ops one after the other, for code from torch.compile.

A call of an op takes the CPU longer than many of its kernels run. A sequence is called once, and
its launches are replayed together. What only its own ops read is a temporary of the replay and no
tensor. The tensors that it is given live until it ends. `graph_passes.py` puts sequences into
graphs.

Compiled code is cached on disk, so a sequence is a string, a Python literal:

    ((op, arguments, options), ...), results

An argument is None, a boolean, a number, a string, ("dtype", name) or ("tensor", step, output).
Steps count from 1; the "outputs" of step 0 are the tensors that the op is given. A result is a pair
of step and output, too. Torch's C++ code puts the string between double quotes, so it has none.
"""

import ast
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
    """Where the tensor of an argument or a result comes from."""

    step: int
    output: int


class Step(NamedTuple):
    """A call of the op that `torch.ops.titan_fp8` has under this name; options are constants."""

    op: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def encode(steps: Sequence[Step], results: Sequence[Place]) -> str:
    """The string of a sequence.

    Raises:
        TypeError: an argument is none of those that a string can hold.
    """

    def value(argument: Any) -> Any:
        if isinstance(argument, Place):
            return "tensor", *argument
        if isinstance(argument, torch.dtype):
            return "dtype", str(argument).removeprefix("torch.")
        if argument is None or isinstance(argument, (bool, int, float, str)):
            return argument
        raise TypeError(f"no argument of a sequence: {argument!r}")

    calls = tuple((step.op, tuple(map(value, step.arguments)), step.options) for step in steps)
    return repr((calls, tuple(map(tuple, results))))


@functools.cache
def _decode(sequence: str) -> tuple[tuple[Step, ...], tuple[Place, ...], tuple[list[Place], ...]]:
    """The steps, the results, and for each step the tensors that no later one reads."""

    def argument(value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        kind, *what = value
        return Place(*what) if kind == "tensor" else getattr(torch, *what)

    calls, results = ast.literal_eval(sequence)
    steps = tuple(Step(op, tuple(map(argument, args)), options) for op, args, options in calls)
    kept = tuple(Place(*result) for result in results)
    last: dict[Place, int] = {}
    for number, step in enumerate(steps):
        last |= {place: number for place in step.arguments if isinstance(place, Place)}
    gone = tuple(
        [p for p, number in last.items() if p.step and number == n and p not in kept]
        for n in range(len(steps))
    )
    return steps, kept, gone


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
