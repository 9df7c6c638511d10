"""Functions whose kernel launches are recorded once and then replayed by `launcher.c`.

A product allocates a few tensors and launches a few kernels, and all of it follows from the shapes,
strides and dtypes of its inputs. In Python this takes the host longer than many of the kernels run.
So `replayed` calls a function in Python the first two times that it sees such inputs, and records
the second call. From then on a call allocates the outputs and one workspace for all temporaries,
and one call into C does all launches, with the addresses of the tensors at hand.

The function must depend on its arguments alone. It may allocate tensors, with zeros too, take
views, and launch kernels of `launch.kernel`. If it calls any other PyTorch op, or returns anything
but fresh tensors, every call runs in Python.
"""

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from titan_fp8.kernels import launch
from titan_fp8.layouts import round_up

Function = Callable[..., Any]

ALIGNMENT = 256
"""Of temporaries in the workspace, in bytes."""
_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.empty_like.default,
}
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
_TENSORS = (Tensor, torch.nn.Parameter)


class _Memory:
    """Memory that the function allocates; it exists while launches `first` to `last` are done."""

    def __init__(self, t: Tensor, zeros: bool, first: int):
        storage = t.untyped_storage()
        self.storage = StorageWeakRef(storage)
        self.address, self.size, self.zeros = storage.data_ptr(), storage.nbytes(), zeros
        self.first = self.last = first
        self.offset = 0

    def meets(self, other: "_Memory") -> bool:
        """Whether both exist at the same time."""
        return self.first <= other.last and other.first <= self.last


class Recorder(TorchDispatchMode):
    """Records what a function of `inputs` allocates and launches in this thread."""

    sees_inside_ops = True

    def __init__(self, inputs: list[Tensor]):
        super().__init__()
        self.inputs = [(t.data_ptr(), _extent(t)) for t in inputs]
        self.memory: list[_Memory] = []
        self.steps: list[bytes] = []
        self.replayable = True

    def __enter__(self) -> "Recorder":
        launch.recording.recorder = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        launch.recording.recorder = None
        super().__exit__(*error)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **kwargs or {})
        if op in _EMPTY or op in _ZEROS:
            self.memory.append(_Memory(result, op in _ZEROS, len(self.steps)))
        elif not op.is_view:
            self.replayable = False
        return result

    def record(self, kernel: Any, grid: tuple[int, ...], args: tuple, options: dict) -> None:
        """A launch that has just been done."""
        for memory in self.memory:
            if not memory.storage.expired():
                memory.last = len(self.steps)
        places = tuple(self._place(launch.address(argument)) for argument in args)
        step = kernel.step(grid, places, *args, **options) if self.replayable else None
        self.replayable = step is not None
        self.steps.append(step or b"")

    def _place(self, address: int | None) -> tuple[int, int] | None:
        """The slot of the input or memory that holds an address, and the offset there."""
        if address is None:
            return None
        ranges = [*self.inputs, *((m.address, m.size) for m in self.memory)]
        gone = {len(self.inputs) + i for i, m in enumerate(self.memory) if m.storage.expired()}
        found = [
            (slot, address - start)
            for slot, (start, size) in enumerate(ranges)
            if start <= address < start + size and slot not in gone
        ]
        if len(found) == 1:
            return found[0]
        self.replayable = False  # For example, one input is a part of another.
        return None


class Replay:
    """What a recorded call did, for other tensors of the same shapes.

    Raises:
        ValueError: an output is not a fresh tensor of its own.
    """

    def __init__(self, recorder: Recorder, result: Any):
        self.returns_tuple = isinstance(result, tuple)
        outputs = result if self.returns_tuple else (result,)
        self.outputs = [(tuple(t.shape), t.stride(), t.dtype) for t in outputs]
        first_output = len(recorder.inputs)
        workspace = first_output + len(outputs)
        of_outputs = {t.untyped_storage().data_ptr(): i for i, t in enumerate(outputs)}
        temporaries = [m for m in recorder.memory if m.storage.expired()]
        fresh = [m for m in recorder.memory if not m.storage.expired() and not m.zeros]
        if {m.address for m in fresh} != of_outputs.keys() or len(fresh) != len(outputs):
            raise ValueError("every output must be a tensor that the function allocated")
        if any(t.storage_offset() for t in outputs):
            raise ValueError("an output is a view")
        zeros, self.bytes = _pack(temporaries)
        slots = [(i, 0) for i in range(first_output)]
        for memory in recorder.memory:
            if memory.address in of_outputs and not memory.storage.expired():
                slots.append((first_output + of_outputs[memory.address], 0))
            else:
                slots.append((workspace, memory.offset))
        self._launch = launch.native().Replay(
            *(b"".join(recorder.steps), tuple(slots), workspace + 1, zeros),
            *(torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream),
        )

    def __call__(self, inputs: list[Tensor]) -> Any:
        device = inputs[0].device
        outputs = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype in self.outputs
        ]
        workspace = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        self._launch(*inputs, *outputs, workspace)
        return tuple(outputs) if self.returns_tuple else outputs[0]


def _pack(memory: list[_Memory]) -> tuple[int, int]:
    """Gives each memory its offset in the workspace, where no other has it at the same time.

    Returns:
        The bytes at the start of the workspace that must be zero, and its bytes in all.
    """
    zeros = 0
    for m in memory:
        if m.zeros:
            m.offset, zeros = zeros, zeros + round_up(m.size, ALIGNMENT)
    total = zeros
    placed: list[_Memory] = []
    for m in memory:
        if m.zeros:
            continue
        m.offset = zeros
        for other in sorted(placed, key=lambda other: other.offset):
            if m.meets(other) and m.offset + m.size > other.offset:
                m.offset = max(m.offset, other.offset + round_up(other.size, ALIGNMENT))
        placed.append(m)
        total = max(total, m.offset + round_up(m.size, ALIGNMENT))
    return zeros, total


def replayed(function: Function) -> Function:
    """`function` with its launches replayed.

    It takes CUDA tensors, by position, and hashable constants, and returns a tensor or a tuple.
    """
    replays: OrderedDict[tuple, Replay | str] = OrderedDict()

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if launch.recording.recorder is not None:
            return function(*args, **options)  # The recorder must see each launch.
        key = *map(_key, args), *options.items(), torch._C._cuda_getDevice()
        replay = replays.get(key)
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
            with contextlib.suppress(ValueError):
                replays[key] = Replay(recorder, outputs)
        return outputs

    return call


def _key(value: Any) -> Any:
    """What a call depends on, besides addresses and the memory's contents."""
    if type(value) in _TENSORS:
        return value.dtype, value.shape, value.stride(), value.data_ptr() % 16
    return value


def _extent(t: Tensor) -> int:
    """The bytes from a tensor's first element to the end of its last."""
    if not t.numel():
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.itemsize
