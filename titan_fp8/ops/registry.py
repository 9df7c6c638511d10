"""How the ops of `torch.ops.titan_fp8` are defined, and the one way to run them.

A primitive op has the signature of the function that defines it in `reference.py`. Kernels for GPUs
have a function of the same name. The definition here adds what it returns and accepts
(`operands.py`); torch.compile is given empty outputs of these shapes, dtypes and strides:

    primitive(reference.quantize_row, fp8(..., K), fp32(...), x=high(..., K))

A composite op is a function of an implementation, `impl`, whose primitive ops it calls
(`gemm.py`). Whole layers are written in the same way (`functional/bodies.py`). `run` calls such a
body over what computes the ops on the device of a tensor (`implementation`), or, where something
must see the ops, over `DISPATCHED`.

Ops are functional: they write to none of their arguments and return fresh tensors. They have no
gradient: their outputs never require grad, even if their inputs do.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled, forward_ad
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)

from titan_fp8 import reference
from titan_fp8.ops.operands import Check, TensorSpec

NAMESPACE = "titan_fp8"
OPS: dict[str, "Op"] = {}
"""All ops but `sequence`, by name."""
SCHEMAS: list[str] = []
"""The schemas of all ops. torch.compile's caches on disk do not notice that they have changed, so
the passes over its graphs do (`compile/graph_passes.py`)."""

DISPATCHED, EMULATED = SimpleNamespace(), SimpleNamespace()
"""The ops, called through PyTorch's dispatcher; those of `EMULATED` with `emulate=True`."""

modes_that_ignore_ops: weakref.WeakSet[TorchDispatchMode] = weakref.WeakSet()
"""The dispatch modes of checkpoints that save no output of an FP8 op, and need not see them."""

Kernels = Literal["hopper", "any GPU", "none"]
_library = torch.library.Library(NAMESPACE, "DEF")
_PLAIN = {Tensor, torch.nn.Parameter, type(None), bool, int, float, str, tuple, torch.dtype}
"""Types of arguments that need no dispatcher; subclasses of Tensor do."""
_wrap: "Callable[[Any], Implementation] | None" = None
"""What makes the ops over the kernels or the reference instead of `Implementation`."""


class Implementation:
    """The ops as functions: the primitive ones of `module`, and the composite ones over these."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        op = OPS.get(name)
        if op is None or op.body is None:
            return getattr(self._module, name)
        setattr(self, name, composed := functools.partial(op.body, self))
        return composed


_implementation_by = functools.cache(Implementation)


def implementation(x: Any, emulate: bool = False, kernels: Kernels = "hopper") -> Any:
    """What computes the ops for a tensor like x.

    Args:
        kernels: those for CUDA tensors (`primitive`).

    Raises:
        RuntimeError: x is on a GPU without FP8 kernels, and `emulate` is False.
    """
    if getattr(x, "is_meta", False):
        return DISPATCHED
    if emulate or kernels == "none" or not getattr(x, "is_cuda", False):
        module: Any = reference
    elif kernels == "hopper":
        module = kernels_for(x.device)
    else:
        from titan_fp8.kernels import permute as module
    return (_wrap or _implementation_by)(module)


def observe(wrap: Callable[[Any], Implementation] | None) -> None:
    """From now on `wrap(module)` are the ops over the kernels or the reference; None ends this.

    Launches are not replayed while there is a `wrap`, because a replay calls no implementation.
    Neither the schemas of the ops nor traced graphs change.
    """
    global _wrap
    _wrap = wrap


def is_observed() -> bool:
    """Whether `observe` has been given a `wrap` that has not ended."""
    return _wrap is not None


def kernels_for(device: torch.device) -> Any:
    """`titan_fp8.kernels.for_device`, which raises a RuntimeError for a GPU without FP8 kernels."""
    from titan_fp8 import kernels

    return kernels.for_device(device)


# Running


def run(body: Callable[..., Any], *args: Any, emulate: bool = False) -> Any:
    """`body(ops, *args)`, over the ops that compute the first one, or dispatched ones if need be.

    torch.compile, dispatch modes such as activation checkpointing's, subclasses of Tensor and the
    profiler see the ops. Otherwise they skip PyTorch's dispatcher, and on a GPU a call is replayed.

    Args:
        body: calls ops only, and returns fresh tensors: one, or a tuple.
        args: tensors, the first one among them, and hashable constants.
    """
    if needs_dispatcher(args):
        if mode_ignores_ops():
            with _pop_mode_temporarily():
                return run(body, *args, emulate=emulate)
        return body(EMULATED if emulate else DISPATCHED, *args)
    return compute(body, args, emulate, {})


def call(name: str, *args: Any) -> Any:
    """One op, without the dispatcher where nothing needs it."""
    if needs_dispatcher(args):
        return getattr(DISPATCHED, name)(*args)
    return compute(OPS[name], args, False, {})


def compute(body: Any, args: Sequence[Any], emulate: bool, options: dict[str, Any]) -> Any:
    """`body(implementation, *args, **options)`; on a GPU launches are replayed."""
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        # PyTorch's ops in here would be differentiated.
        with torch._C._AutoDispatchBelowAutograd():
            return _compute(body, args, emulate, options)
    return _compute(body, args, emulate, options)


def _compute(body: Any, args: Sequence[Any], emulate: bool, options: dict[str, Any]) -> Any:
    x = args[0]
    if not isinstance(x, Tensor) or not x.is_cuda:
        return body(implementation(x, emulate), *args, **options)
    # Kernels are launched on the current device.
    if x.get_device() != torch._C._cuda_getDevice():
        with torch.cuda.device(x.device):
            return _compute(body, args, emulate, options)
    kernels: Any = getattr(body, "kernels", "hopper")
    if emulate or _wrap is not None or kernels != "hopper":
        return body(implementation(x, emulate, kernels), *args, **options)
    return _replayed(body)(*args, **options)


@functools.cache
def _replayed(body: Callable[..., Any]) -> Callable[..., Any]:
    from titan_fp8.kernels.replay import replayed

    return replayed(lambda x, *args, **options: body(implementation(x), x, *args, **options))


def needs_dispatcher(args: Sequence[Any]) -> bool:
    """Whether ops with these arguments must be called through PyTorch's dispatcher."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack():
        if not getattr(_get_current_dispatch_mode(), "sees_inside_ops", False):
            return True
    elif _profiler_enabled():
        return True  # The profiler sees what goes through the dispatcher.
    if torch._C._are_functorch_transforms_active():
        return True  # such as vmap
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        return True  # tracing above autograd, such as torch.export's
    return any(issubclass(kind, Tensor) for kind in {*map(type, args)} - _PLAIN)


def mode_ignores_ops() -> bool:
    """True if the only dispatch mode is one of `modes_that_ignore_ops`."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 1
        and _get_current_dispatch_mode() in modes_that_ignore_ops
    )


# Definitions


class Op:
    """An op of `torch.ops.titan_fp8`. Called with an implementation, it checks its arguments.

    Attributes:
        check: what it accepts.
        body: what computes a composite op over an implementation; None for a primitive op.
        kernels: what computes CUDA tensors. With those for Hopper it has `emulate`, and its
            launches are replayed.
        overload: what the compiler's graphs call.
    """

    def __init__(
        self,
        name: str,
        signature: inspect.Signature,
        outputs: tuple[TensorSpec, ...],
        operands: dict[str, TensorSpec],
        body: Callable[..., Any] | None = None,
        kernels: Kernels = "hopper",
    ):
        self.name, self.body, self.kernels, self._outputs = name, body, kernels, outputs
        self.check = Check(name, signature.parameters, operands)
        parameters = [*signature.parameters.values()]
        if self.is_fp8:
            parameters.append(_option("emulate", False))
        prototype: Any = lambda: None  # noqa: E731
        prototype.__signature__ = signature.replace(parameters=parameters)
        OPS[name] = self
        schema = torch.library.infer_schema(prototype, mutates_args=())
        computed = lambda *args, emulate=False, **opts: compute(self, args, emulate, opts)  # noqa: E731
        self.overload: torch._ops.OpOverload = register(name, schema, computed, self.fake)
        setattr(DISPATCHED, name, self.overload)
        emulated = functools.partial(self.overload, emulate=True) if self.is_fp8 else self.overload
        setattr(EMULATED, name, emulated)

    @property
    def is_fp8(self) -> bool:
        """Whether it quantizes, or reads what is quantized."""
        return self.kernels == "hopper"

    def fake(self, *args: Any, emulate: bool = False, **options: Any) -> Any:
        """Its outputs, empty."""
        known = self.check(*args, **options)
        outputs = tuple([output.empty(known) for output in self._outputs])
        return outputs if len(outputs) > 1 else outputs[0]

    def __call__(self, impl: Any, *args: Any, **options: Any) -> Any:
        # A replay needs no check: it is found by the dtypes, shapes and devices of the arguments.
        self.check(*args, **options)
        return getattr(impl, self.name)(*self.check.laid_out(args), **options)


def _option(name: str, default: bool | str) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=type(default))


def primitive(
    function: Callable[..., Any],
    *outputs: TensorSpec,
    kernels: Kernels = "hopper",
    **operands: TensorSpec,
) -> None:
    """Defines a primitive op.

    Args:
        function: its definition in `reference.py`.
        outputs: what it returns.
        kernels: what computes CUDA tensors: `kernels.hopper`; `kernels.permute`, on any GPU; or no
            kernel but the reference.
        operands: what each tensor may be.
    """
    signature = inspect.signature(function)
    Op(function.__name__, signature, outputs, operands, kernels=kernels)


def composite(
    name: str,
    body: Callable[..., Any],
    *outputs: TensorSpec,
    scaled: bool = True,
    **operands: TensorSpec,
) -> None:
    """Defines an op that is made of primitive ones; otherwise as `primitive`.

    Args:
        body: computes it, given an implementation, the arguments, and options.
        scaled: the op has the option `scale_fmt`.
    """
    signature = inspect.signature(body)
    _, *parameters, _ = signature.parameters.values()
    parameters += (_option("scale_fmt", "fp32"),) if scaled else ()
    Op(name, signature.replace(parameters=parameters), outputs, operands, body)


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
