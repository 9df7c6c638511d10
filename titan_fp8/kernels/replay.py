"""Functions whose kernel launches are recorded once and then replayed by `launcher.c`.

`replayed` calls a function in Python the first two times that it sees inputs of the same shapes,
strides and dtypes, and records the second call (`record.py`). From then on a call allocates the
outputs and one workspace for the temporaries, and one call into C does all launches, with the
addresses of the new tensors.

What a function must do to be replayed:

- It depends on its arguments alone.
- It allocates tensors, also zeros, takes views, launches kernels of `launch.kernel`, and calls
  PyTorch ops that return a new tensor. The kernels may write to its arguments.
- It returns fresh tensors or an empty tuple.

Every call of any other function runs in Python. So does a call that something must see: tracing,
dispatch modes, subclasses, the profiler and health (`ops/registry.py`, `run`). A replay calls a
PyTorch op again, between the launches before it and those after it. Memory that the op reads is a
tensor of its own, not a part of the workspace.
"""

import contextlib
import functools
import itertools
import operator
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_fp8.kernels import launch
from titan_fp8.kernels.record import Form, Memory, OpCall, Recorder, View, form_of
from titan_fp8.layouts import round_up

Function = Callable[..., Any]

ALIGNMENT = 256
"""The alignment of temporaries in the workspace, in bytes."""
_TENSORS = (Tensor, torch.nn.Parameter)


class NotReplayable(Exception):
    """A recorded call that must run in Python each time."""


class _Stage(NamedTuple):
    """Launches in one call into C, or one call of an op.

    Attributes:
        new: the tensors to allocate first: index, form, and whether they are zeros.
        run: does the work, given the list of all tensors. Puts the result of an op into the list.
        gone: indices of the tensors that no later stage needs.
    """

    new: list[tuple[int, Form, bool]]
    run: Callable[[list[Tensor]], None]
    gone: list[int]


class Replay:
    """Does what a recorded call did, for other tensors of the same shapes, strides and dtypes.

    All tensors are in one list: the inputs, then one for each Memory that has a form, outputs among
    them, and last the workspace, which holds all other Memory.

    Raises:
        NotReplayable: an output is not a fresh tensor of its own, or there are too many tensors.
    """

    def __init__(self, recorder: Recorder, result: Any):
        self.returns_tuple = isinstance(result, tuple)
        memory, inputs = recorder.memory, len(recorder.inputs)
        by_ops = {step.memory for step in recorder.steps if isinstance(step, OpCall)}
        outputs = _outputs(recorder, result if self.returns_tuple else (result,), by_ops)
        zeros, self.bytes, offsets = _pack([m for m in memory if m.form is None])
        # The forms of all tensors but the workspace, and where each input and each Memory is: the
        # index of a tensor and an offset in bytes.
        self._bases = [form for _, form in recorder.inputs]
        self._workspace = inputs + len(memory) - len(offsets)
        slots, offset_of_next = [(i, 0) for i in range(inputs)], iter(offsets)
        for m in memory:
            if m.form is None:
                slots.append((self._workspace, next(offset_of_next)))
            else:
                slots.append((len(self._bases), 0))
                self._bases.append(m.form)
        self._slots = tuple(slots)
        self.outputs = [slots[inputs + i][0] for i in outputs]
        self.stages = list(self._stages(recorder, by_ops, zeros))

    def _stages(self, recorder: Recorder, by_ops: set[int], zeros: int) -> Iterator[_Stage]:
        """The stages; the first launches also clear the first `zeros` bytes of the workspace."""
        inputs = len(recorder.inputs)
        for begin, end in _parts(recorder.steps):
            new, gone = [], []
            for i, m in enumerate(recorder.memory):
                number, _ = self._slots[inputs + i]
                if m.form is not None and begin <= m.first < end and i not in by_ops:
                    new.append((number, m.form, m.zeros))
                if m.form is not None and begin <= m.last < end and number not in self.outputs:
                    gone.append(number)
            steps = recorder.steps[begin:end]
            if isinstance(steps[0], OpCall):
                run = self._call(steps[0], inputs)
            else:
                run = self._launches(b"".join(s for s in steps if isinstance(s, bytes)), zeros)
                zeros = 0
            yield _Stage(new, run, gone)

    def _launches(self, steps: bytes, zeros: int) -> Callable[[list[Tensor]], None]:
        tensors = self._workspace + 1
        if tensors > launch.MAX_ARGUMENTS or len(self._slots) > launch.MAX_SLOTS:
            raise NotReplayable("a replay has too many tensors")
        header = array("q", [tensors, len(self._slots), zeros, *itertools.chain(*self._slots)])
        return functools.partial(launch.native().replay, header.tobytes() + steps)

    def _call(self, call: OpCall, inputs: int) -> Callable[[list[Tensor]], None]:
        args = [self._argument(value) for value in call.args]
        kwargs = {name: self._argument(value) for name, value in call.kwargs.items()}
        result, _ = self._slots[inputs + call.memory]

        def run(tensors: list[Tensor]) -> None:
            options = {name: value(tensors) for name, value in kwargs.items()}
            tensors[result] = call.op(*[value(tensors) for value in args], **options)

        return run

    def _argument(self, value: Any) -> Callable[[list[Tensor]], Any]:
        """The argument of an op, as a function of all tensors."""
        if not isinstance(value, View):
            return lambda tensors: value
        number, _ = self._slots[value.slot]
        if value.form == self._bases[number] and not value.offset:
            return operator.itemgetter(number)
        shape, strides, _ = value.form

        def view(tensors: list[Tensor]) -> Tensor:
            t = tensors[number]
            return t.as_strided(shape, strides, t.storage_offset() + value.offset)

        return view

    def __call__(self, inputs: list[Tensor]) -> Any:
        device = inputs[0].device
        workspace = inputs[0]
        if self.bytes:
            workspace = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        # The workspace is the placeholder of tensors that do not exist yet or any more.
        tensors = [*inputs, *[workspace] * (self._workspace - len(inputs) + 1)]
        for new, run, gone in self.stages:
            for index, (shape, strides, dtype), zeros in new:
                t = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                tensors[index] = t.zero_() if zeros else t
            run(tensors)
            for index in gone:
                tensors[index] = workspace
        if self.returns_tuple:
            return tuple([tensors[i] for i in self.outputs])
        return tensors[self.outputs[0]]


def _outputs(recorder: Recorder, results: tuple[Tensor, ...], by_ops: set[int]) -> list[int]:
    """The index of the memory of each result. Gives that memory the form of the result."""
    kept = {m.address: i for i, m in enumerate(recorder.memory) if not m.storage.expired()}
    outputs = [kept.get(t.untyped_storage().data_ptr(), -1) for t in results]
    if not recorder.steps or sorted(outputs) != sorted(kept.values()):
        raise NotReplayable("every output must be a tensor that the function allocated")
    for i, t in zip(outputs, results, strict=True):
        memory, form = recorder.memory[i], form_of(t)
        made_by_op = i in by_ops and memory.form != form
        other_dtype = form.dtype != memory.allocated_as.dtype
        if t.storage_offset() or made_by_op or other_dtype:
            raise NotReplayable("an output is a view of what was allocated")
        memory.form, memory.first = form, min(memory.first, len(recorder.steps) - 1)
    return outputs


def _parts(steps: list[bytes | OpCall]) -> list[tuple[int, int]]:
    """The first step and the end of each run of launches, and of each call of an op."""
    begins = [
        i
        for i, step in enumerate(steps)
        if i == 0 or isinstance(step, OpCall) or isinstance(steps[i - 1], OpCall)
    ]
    return list(zip(begins, [*begins[1:], len(steps)], strict=True))


def _pack(memory: list[Memory]) -> tuple[int, int, list[int]]:
    """Lays out the workspace. Two Memory objects may share bytes unless they exist together.

    Returns:
        The bytes at the start of the workspace that must be zero, its size in bytes, and the offset
        of each Memory.
    """
    zeros = total = 0
    offsets: dict[Memory, int] = {}
    for m in sorted(memory, key=lambda m: not m.zeros):
        offset = 0
        for other, taken in sorted(offsets.items(), key=operator.itemgetter(1)):
            if m.overlaps(other) and offset + m.size > taken:
                offset = max(offset, taken + round_up(other.size, ALIGNMENT))
        offsets[m] = offset
        total = max(total, offset + round_up(m.size, ALIGNMENT))
        zeros = total if m.zeros else zeros
    return zeros, total, [offsets[m] for m in memory]


def replayed(function: Function) -> Function:
    """`function`, which runs in Python twice for inputs of a form and is then replayed.

    It takes CUDA tensors by position, and hashable constants. It returns a tensor or a tuple. Of
    its replays the `launch.CACHED_SHAPES` that were used last are kept.
    """
    replays: OrderedDict[tuple, Replay | str] = OrderedDict()

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if launch.RECORDER.get() is not None:
            return function(*args, **options)  # The recorder must see each launch.
        # All that the recorded steps depend on; each replay gets the current addresses.
        key = (
            *[
                None
                if a is None
                else (a.dtype, a.shape, a.stride(), a.data_ptr() % 16, a.get_device())
                if (kind := type(a)) in _TENSORS
                # 1, 1.0 and True are equal, and so are 0.0 and -0.0, but no NaN is.
                else (kind, a.hex() if kind is float else a)
                for a in args
            ],
            *options.items(),
            torch._C._cuda_getDevice(),
        )
        if replay := replays.get(key):
            replays.move_to_end(key)
        if isinstance(replay, Replay):
            return replay([t for t in args if type(t) in _TENSORS])
        if replay is None:
            replays[key] = "seen"
            if len(replays) > launch.CACHED_SHAPES:
                replays.popitem(last=False)
        if replay != "seen":
            return function(*args, **options)
        with Recorder([t for t in args if type(t) in _TENSORS]) as recorder:
            outputs = function(*args, **options)
        replays[key] = "not replayable"
        if recorder.replayable:
            with contextlib.suppress(NotReplayable):
                replays[key] = Replay(recorder, outputs)
        return outputs

    return call
