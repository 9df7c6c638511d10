"""Records what a function allocates, launches and calls, as steps for `replay.py`.

A step is a kernel launch or a call of a PyTorch op that returns a new tensor. Each address that a
launch takes is recorded as a place: an offset into an input, or into memory that the function has
allocated itself.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from titan_fp8.kernels import launch

_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.empty_like.default,
}
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}


class Form(NamedTuple):
    """The shape, strides (in elements) and dtype of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def bytes_of(form: Form) -> int:
    """The bytes from the first element to the end of the last."""
    if 0 in form.shape:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(form.shape, form.strides, strict=True))
    return (1 + last) * form.dtype.itemsize


def form_of(t: Tensor) -> Form:
    return Form(tuple(t.shape), t.stride(), t.dtype)


class Memory:
    """Memory that the function allocates or that an op returns.

    Attributes:
        storage: a weak reference that tells whether the memory has been freed.
        address, size: where it is while the function is recorded; in bytes.
        zeros: it is allocated as zeros.
        first, last: the first and the last step at which it exists.
        allocated_as: the form of the tensor with which it was allocated.
        form: the form of the tensor that a replay allocates for it. None: a replay puts it into the
            workspace, because only launches read and write it.
    """

    def __init__(self, t: Tensor, zeros: bool, first: int):
        storage = t.untyped_storage()
        self.storage = StorageWeakRef(storage)
        self.address, self.size, self.zeros = storage.data_ptr(), storage.nbytes(), zeros
        self.first = self.last = first
        self.form: Form | None = None
        self.allocated_as = form_of(t)

    def overlaps(self, other: "Memory") -> bool:
        """Whether both exist at one step; zeros, which are cleared at the start, at every one."""
        together = self.first <= other.last and other.first <= self.last
        return together or self.zeros or other.zeros


class View(NamedTuple):
    """A tensor argument of an op: a view of the memory of a slot, at an offset in elements."""

    slot: int
    form: Form
    offset: int


class OpCall(NamedTuple):
    """A call of an op. `memory` is the index of the new tensor; tensor arguments are Views."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    memory: int


class Recorder(TorchDispatchMode):
    """Records what this thread does while the mode is active: a function of `inputs`.

    A slot is an input or, after these, an element of `memory`, by number.

    Attributes:
        inputs: the address and form of each.
        memory: what the function allocates, in order.
        steps: launches as `launcher.c` encodes them, and calls of ops.
        replayable: False if the function did anything that cannot be replayed.
    """

    sees_inside_ops = True

    def __init__(self, inputs: list[Tensor]):
        super().__init__()
        self.inputs = [(t.data_ptr(), form_of(t)) for t in inputs]
        self.memory: list[Memory] = []
        self.steps: list[bytes | OpCall] = []
        self.replayable = True

    def __enter__(self) -> "Recorder":
        self._before = launch.RECORDER.set(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        launch.RECORDER.reset(self._before)
        super().__exit__(*error)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        if op in _EMPTY or op in _ZEROS:
            self.memory.append(Memory(result, op in _ZEROS, len(self.steps)))
        elif not op.is_view:
            self._record_call(op, args, kwargs, result)
        return result

    def launch(
        self, launcher: functools.partial, grid: tuple[int, ...], *args: Any, **options: Any
    ) -> None:
        """Launches a kernel."""
        launcher(grid, None, *args, **options)
        places = tuple([self._place(a[0] if isinstance(a, tuple) else a) for a in args])
        step = None
        if self.replayable:
            step = launcher(grid, places, *args, **options)
        self.replayable = step is not None
        self._add(step or b"")

    def _record_call(self, op: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Records an op that computes, rather than allocates or views."""
        if op._schema.is_mutable or not isinstance(result, Tensor):
            self.replayable = False
        if not self.replayable:
            return
        arguments = tuple(self._argument(value) for value in args)
        named = {name: self._argument(value) for name, value in kwargs.items()}
        storage = result.untyped_storage().data_ptr()
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        if any(t.untyped_storage().data_ptr() == storage for t in tensors):
            self.replayable = False  # The result shares memory with an argument.
        memory = Memory(result, False, len(self.steps))
        memory.form = memory.allocated_as
        self.memory.append(memory)
        self._add(OpCall(op, arguments, named, len(self.memory) - 1))

    def _add(self, step: bytes | OpCall) -> None:
        """Adds a step. Memory that has not been freed exists at this step."""
        for memory in self.memory:
            if not memory.storage.expired():
                memory.last = len(self.steps)
        self.steps.append(step)

    def _argument(self, value: Any) -> Any:
        """An argument of an op as a step holds it: a View, if it is a tensor."""
        if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
            self.replayable = False
        if not isinstance(value, Tensor):
            return value
        place, form = self._place(value), form_of(value)
        if place is None:
            self.replayable = False
            return None
        slot, offset = place
        if slot < len(self.inputs):
            dtype = self.inputs[slot][1].dtype
        else:
            memory = self.memory[slot - len(self.inputs)]
            if memory.form is None:
                # Allocated in the form that this op reads, it needs no view.
                whole = not offset and bytes_of(form) == memory.size
                memory.form = form if whole else memory.allocated_as
            dtype = memory.form.dtype
        if dtype != form.dtype or offset % dtype.itemsize:
            self.replayable = False
        return View(slot, form, offset // dtype.itemsize)

    def _place(self, t: Any) -> tuple[int, int] | None:
        """The slot of the input or memory that holds a tensor, and the offset in bytes."""
        if not isinstance(t, Tensor):
            return None
        address = t.data_ptr()
        ranges = [(start, bytes_of(form)) for start, form in self.inputs]
        ranges += [(m.address, 0 if m.storage.expired() else m.size) for m in self.memory]
        found = [
            (slot, address - start)
            for slot, (start, size) in enumerate(ranges)
            if start <= address < start + size
        ]
        if len(found) == 1:
            return found[0]
        self.replayable = False  # For example, one input is a part of another.
        return None
