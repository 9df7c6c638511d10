"""How the ops of `torch.ops.titan_fp8` are defined.

A primitive op is a typed stub. Its signature is the op's schema, and its body is the fake: it makes
empty outputs with the right shapes, dtypes and strides, which is all that torch.compile needs. The
computation is found by the stub's name, in the kernels of the device or in the reference:

    @primitive(x=high(..., K))
    def quantize_row(x: Tensor, *, emulate: bool = False) -> tuple[Tensor, Tensor]:
        return new_fp8(x, x.shape), new_scale(x, x.shape[:-1])

A composite op is written once over the primitive ops of an implementation:

    @composite(a=fp8(M, K), sa=fp32(M), w=high(E, N, K))
    def rowwise_fprop(a: Tensor, sa: Tensor, w: Tensor, ..., *, emulate: bool = False) -> Tensor:
        impl = implementation(a, emulate)
        return impl.rowwise_mm(a, sa, *impl.quantize_row(w), ...)

`implementation` returns the kernels for a CUDA tensor, the reference for a CPU tensor or with
`emulate=True`, and the stubs themselves for a tensor without data. So one body serves as kernel,
reference and fake. `observe` lets an observer wrap the kernels and the reference. The decorators
say what the op accepts (`operands.py`). That is checked however an op is called, also while it is
traced, but not again when launches are replayed.

Ops are functional: they write to none of their arguments and return fresh tensors. That lets
torch.compile merge equal calls, such as the quantization of an input that wq, wk and wv share.

Ops have no gradient: their outputs never require grad, even if their inputs do. The layers and
`fp8_linear`, `fp8_grouped_mm` and `fp8_swiglu` are differentiable.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import _profiler_enabled, forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from titan_fp8 import reference
from titan_fp8.layouts import E4M3
from titan_fp8.ops.operands import Accepted, Check

Function = TypeVar("Function", bound=Callable[..., Any])

NAMESPACE = "titan_fp8"
NAMES: list[str] = []
"""The names of all ops but `sequence`, in the order of their definition."""
SCHEMAS: list[str] = []
"""The schemas of all ops. torch.compile's caches on disk do not notice that they have changed, so
the passes over its graphs do (`chained_pass.py`)."""
FP8_OPS: set[torch._ops.OpOverload] = set()
"""The ops that launch Hopper kernels, all of them in `NAMES`."""

direct = SimpleNamespace()
"""The ops as functions that skip PyTorch's dispatcher where possible, which saves 7 us a call.

torch.compile, dispatch modes such as activation checkpointing's, and subclasses of Tensor need the
dispatcher. The overloads (`torch.ops.titan_fp8.<op>.default`), which code from torch.compile calls,
skip it in the same cases. They are called with more arguments by name, so they save 12 us.
"""

_library = torch.library.Library(NAMESPACE, "DEF")
_fakes = SimpleNamespace()
_overloads: dict[Callable[..., Any], torch._ops.OpOverload] = {}
_PLAIN = {Tensor, torch.nn.Parameter, type(None), bool, int, float, str, torch.dtype}
"""Types of arguments that need no dispatcher; subclasses of Tensor do."""
_wrap: Callable[[Any], Any] | None = None
"""What wraps the kernels and the reference; set by `observe`."""


def implementation(x: Tensor, emulate: bool) -> Any:
    """What computes the primitive ops for a tensor like x: an object with a function for each.

    Raises:
        RuntimeError: x is on a GPU without FP8 kernels, and `emulate` is False.
    """
    if isinstance(x, FakeTensor) or x.is_meta:
        return _fakes
    module = reference if emulate or not x.is_cuda else kernels_for(x.device)
    return module if _wrap is None else _wrap(module)


def observe(wrap: Callable[[Any], Any] | None) -> None:
    """From now on `wrap(implementation)` computes the FP8 ops; with None the implementation itself.

    Launches are not replayed while there is a `wrap`, because a replay calls no implementation.
    Neither the schemas of the ops nor traced graphs change.
    """
    global _wrap
    _wrap = wrap


@functools.cache
def kernels_for(device: torch.device) -> Any:
    """`titan_fp8.kernels.for_device`, which raises a RuntimeError for a GPU without FP8 kernels."""
    from titan_fp8 import kernels

    return kernels.for_device(device)


@functools.cache
def _permutation_kernels() -> Any:
    from titan_fp8.kernels import permute

    return permute


def primitive(
    *, kernel: Literal["hopper", "any GPU", "none"] = "hopper", **operands: Accepted
) -> Callable[[Function], Function]:
    """Defines a primitive op from its stub, which the decorator returns.

    Args:
        kernel: what computes CUDA tensors: a kernel of `kernels.hopper`; one of `kernels.permute`,
            for any GPU; or no kernel but the reference. The last two have no `emulate`.
        operands: what each tensor may be.
    """

    def define(stub: Function) -> Function:
        name = stub.__name__

        def compute(*args: Any, emulate: bool = False, **options: Any) -> Any:
            return getattr(implementation(args[0], emulate), name)(*args, **options)

        def compute_without_fp8(x: Tensor, *args: Any) -> Any:
            module = _permutation_kernels() if x.is_cuda and kernel == "any GPU" else reference
            return getattr(module, name)(x, *args)

        setattr(_fakes, name, stub)
        fp8 = kernel == "hopper"
        parameters = inspect.signature(stub).parameters
        check = Check(name, parameters, operands)
        _define(stub, compute if fp8 else compute_without_fp8, check, fp8)
        return stub

    return define


def composite(*, check: Any = None, **operands: Accepted) -> Callable[[Function], Function]:
    """Defines an op that is made of primitive ones.

    Args:
        operands: what each tensor may be.
        check: in place of them: an object like a `Check`, for an op whose constants decide that.
    """

    def define(function: Function) -> Function:
        parameters = inspect.signature(function).parameters
        _define(function, function, check or Check(function.__name__, parameters, operands))
        return function

    return define


def _define(
    stub: Callable[..., Any],
    compute: Callable[..., Any],
    check: Any,
    fp8: bool = True,
) -> None:
    """Registers the op that `compute` computes, and the function for `direct`.

    fp8: the op launches Hopper kernels, which can be replayed, and may have `emulate`.
    """
    name = stub.__name__
    parameters = inspect.signature(stub).parameters
    options_of_op = {p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY}

    contiguous = check.contiguous

    # A replay is found by the dtypes, shapes and devices of the arguments, so it needs no check.
    def checked(*args: Any, **options: Any) -> Any:
        check(*args, **options)
        laid_out = [
            _for_kernels(t) if i in contiguous and t is not None else t for i, t in enumerate(args)
        ]
        return compute(*laid_out, **options)

    def fake(*args: Any, **options: Any) -> Any:
        check(*args, **options)
        return stub(*args, **options)

    def run(*args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            # PyTorch's ops in here would be differentiated.
            with torch._C._AutoDispatchBelowAutograd():
                return run_below_autograd(*args, **options)
        return run_below_autograd(*args, **options)

    def run_below_autograd(x: Tensor, *args: Any, **options: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_cuda:
            return checked(x, *args, **options)
        on_gpu = _replayed(checked) if fp8 and not options.get("emulate") else checked
        # Kernels are launched on the current device.
        if x.get_device() == torch._C._cuda_getDevice():
            return on_gpu(x, *args, **options)
        with torch.cuda.device(x.device):
            return on_gpu(x, *args, **options)

    overload = register(name, torch.library.infer_schema(stub, mutates_args=()), run, fake)
    NAMES.append(name)
    dispatch = overload._op

    def call(*args: Any, **options: Any) -> Any:
        # The dispatcher sorts arguments that are given by name.
        if options_of_op.issuperset(options) and not needs_dispatcher(args):
            return run(*args, **options)
        if mode_ignores_ops():
            with _pop_mode_temporarily():
                return call(*args, **options)
        return (overload if torch.compiler.is_compiling() else dispatch)(*args, **options)

    setattr(direct, name, call)
    _overloads[call] = overload
    # From here on `overload` has another hash.
    overload._op = _without_dispatcher(call, dispatch, parameters, overload._schema)
    if fp8:
        FP8_OPS.add(overload)


def _for_kernels(t: Tensor) -> Tensor:
    """t, contiguous, and at a multiple of 16 bytes if it is FP8, which is read by TMA."""
    t = t.contiguous()
    return t.clone() if t.dtype == E4M3 and t.data_ptr() % 16 else t


def register(
    name: str, signature: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> torch._ops.OpOverload:
    """Defines `torch.ops.titan_fp8.<name>`, which `run` computes.

    Args:
        signature: the arguments and results of its schema.
        fake: makes the outputs of tensors without data.
    """
    _library.define(name + signature)
    SCHEMAS.append(name + signature)
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # There is no gradient.
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _without_dispatcher(
    call: Callable[..., Any],
    dispatch: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    schema: torch.FunctionSchema,
) -> Callable[..., Any]:
    """What an overload calls, in place of `dispatch`: `call`.

    Code from torch.compile calls overloads. It passes arguments that have defaults by name, and a
    default dtype as PyTorch's number for it.
    """
    numbers = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    positional = [p for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    defaults = [
        (p.name, p.default, numbers[p.name] if isinstance(p.default, torch.dtype) else None)
        for p in positional
        if p.default is not p.empty
    ]
    required = len(positional) - len(defaults)

    def call_overload(*args: Any, **options: Any) -> Any:
        if peek_interpreter_stack() is not None:
            _refuse_gradient()
        given = len(args) - required  # of those with defaults
        plain = given >= 0 and _PLAIN.issuperset(map(type, args))
        if not plain or torch.compiler.is_compiling():
            return dispatch(*args, **options)
        values = [*args]
        for name, default, number in defaults[given:]:
            value = options.pop(name, default)
            values.append(default if number is not None and value == number else value)
        return call(*values, **options)

    return call_overload


def replayable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replays the launches of a function that only calls ops, on the GPU.

    Args:
        function: takes tensors and hashable constants by position, the first one a tensor, and
            returns a tensor or a tuple of tensors. `kernels/replay.py` says what it may do.
    """

    @functools.wraps(function)
    def call(x: Tensor, *args: Any) -> Any:
        if needs_dispatcher((x, *args)):
            if mode_ignores_ops():
                with _pop_mode_temporarily():
                    return call(x, *args)
            return function(x, *args)
        if not x.is_cuda or x.get_device() != torch._C._cuda_getDevice():
            return function(x, *args)
        return _replayed(function)(x, *args)

    return call


def _replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that replays `function`; while ops are observed, `function` itself."""
    return _replay_of(function) if _wrap is None else function


@functools.cache
def _replay_of(function: Callable[..., Any]) -> Callable[..., Any]:
    from titan_fp8.kernels.replay import replayed

    return replayed(function)


def needs_dispatcher(args: Sequence[Any]) -> bool:
    """Whether an op with these arguments must be called through PyTorch's dispatcher."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack():
        if not _sees_inside_ops():
            return True
    elif _profiler_enabled():
        return True  # The profiler sees what goes through the dispatcher.
    if peek_interpreter_stack() is not None or _len_torch_dispatch_stack_pre_dispatch():
        return True  # functorch, such as vmap; tracing above autograd, such as torch.export's
    if _PLAIN.issuperset(map(type, args)):
        return False
    return any(isinstance(a, Tensor) and type(a) not in _PLAIN for a in args)


def _refuse_gradient() -> None:
    """Raises RuntimeError in a transform of torch.func that differentiates, and would get zeros.

    torch.compile calls this, too, when it traces the autograd functions inside a transform. Their
    inputs do not say there that they are differentiated.
    """
    if peek_interpreter_stack().key() in (TransformType.Jvp, TransformType.Grad):
        raise RuntimeError(
            "titan_fp8 ops have no gradient inside transforms of torch.func: use fp8_linear, "
            "fp8_grouped_mm and Tensor.backward or torch.autograd.grad"
        )


def mode_ignores_ops() -> bool:
    """True if the only dispatch mode is that of a checkpoint which saves none of our ops."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 1
        and getattr(_get_current_dispatch_mode(), "ignores_fp8_ops", False)
    )


def _sees_inside_ops() -> bool:
    """True if the innermost dispatch mode records what happens inside an op (`record.py`)."""
    return getattr(_get_current_dispatch_mode(), "sees_inside_ops", False)


def overload_of(call: Callable[..., Any]) -> torch._ops.OpOverload:
    """The registered op of a function of `direct`."""
    return _overloads[call]
