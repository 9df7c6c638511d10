"""The ops of `reference.py` as `torch.ops.titan_fp8.*`, for autograd, torch.compile and benchmarks.

Each op has the name and arguments of the reference's function, or of that in `composites.py`, and
`emulate=False` besides. It runs the Hopper kernels on CUDA tensors, and the reference on the CPU or
with `emulate=True`.
Ops are functional: they write to none of their arguments and return fresh tensors, so that
torch.compile merges equal ones, such as the quantisation of an input that wq, wk and wv share.

The products with a weight, fprop and dgrad, quantise it themselves. So torch.compile never sees an
FP8 copy of a weight, which it would else make in forward for backward and keep until then, and the
host dispatches one op for the kernels of both. Their parts are ops as well, for benchmarks.

The experts' forward and backward have an op each besides, made of these, see `composites.py`.

The ops on rows have nothing to do with FP8: no `emulate`, and kernels for any CUDA GPU.

The functions below the registration tell torch.compile the shapes, dtypes and strides; the layouts
are explained in `reference.py`.
"""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from titan_fp8 import reference
from titan_fp8.composites import COMPOSITES
from titan_fp8.reference import BLOCK, E4M3, ROW_ALIGNMENT, cdiv, round_up, transposed_width

_library = torch.library.Library("titan_fp8", "DEF")

DTYPES = (torch.bfloat16, torch.float32)
"""What is quantised, and what products come in."""


@functools.cache
def require_kernels(device: torch.device) -> None:
    """RuntimeError, with what would do, where the Hopper kernels cannot run on a CUDA `device`."""
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        raise RuntimeError(
            f"titan_fp8: the FP8 kernels need a Hopper GPU (compute capability 9.0), and "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}; "
            "emulate = true computes the same numbers on any device"
        )


@functools.cache
def _kernels():
    from titan_fp8 import kernels

    return kernels


def run_kernel(name: str, x: Tensor, args: tuple):
    """The kernels' function of that name, on the GPU that x is on."""
    return _on_gpu_of(x, getattr(_kernels(), name), x, *args)


def _on_gpu_of(x: Tensor, function: Callable, *args):
    if x.get_device() == torch.cuda.current_device():
        return function(*args)
    with torch.cuda.device(x.device):
        return function(*args)


def _register(name: str, prototype: Callable, call: Callable, fake: Callable) -> None:
    """Defines the op of that name, with the arguments of `prototype`.

    `call` computes it by an implementation of ops, the first argument, `fake` its empty result.
    """
    schema = torch.library.infer_schema(prototype, mutates_args=())
    arguments, result = schema.rsplit(" -> ", 1)
    _library.define(f"{name}{arguments[:-1]}, *, bool emulate=False) -> {result}")

    def run(x, *args, emulate=False):
        x = x.contiguous()
        if emulate or not x.is_cuda:
            return call(reference, x, *args)
        require_kernels(x.device)
        return _on_gpu_of(x, call, _kernels(), x, *args)

    _library.impl(name, run, "CompositeExplicitAutograd")

    def run_fake(*args, emulate=False):
        return fake(*args)

    torch.library.register_fake(f"titan_fp8::{name}", run_fake, lib=_library)


def _q(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=E4M3)


def _s(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


def _s_1x128(x: Tensor, rows: int, columns: int) -> Tensor:
    return _s(x, cdiv(columns, BLOCK), round_up(rows, 4))[:, :rows].t()


def _s_128x128(w: Tensor, n: int, k: int) -> Tensor:
    storage = _s(w, *w.shape[:-2], cdiv(n, BLOCK), round_up(cdiv(k, BLOCK), 4))
    return storage[..., : cdiv(k, BLOCK)]


def _quantize_1x128(x):
    return _q(x, *x.shape), _s_1x128(x, *x.shape)


def _quantize_128x1_t(x, offs=None, aligned=False):
    k, width = x.shape[1], transposed_width(x.shape[0], offs, aligned, BLOCK)
    return _q(x, k, width), _s_1x128(x, k, width)


def _quantize_1x128_128x1_t(x, offs=None, aligned=False):
    return (*_quantize_1x128(x), *_quantize_128x1_t(x, offs, aligned))


def _quantize_128x128(w):
    return _q(w, *w.shape), _s_128x128(w, *w.shape[-2:])


def _quantize_128x128_t(w):
    *lead, n, k = w.shape
    return _q(w, *lead, k, n), _s_128x128(w, k, n)


def _swiglu_1x128(a, b):
    return _quantize_1x128(a)


def _swiglu_backward_1x128_128x1_t(dh, a, b, offs=None, aligned=False):
    both = [_quantize_1x128_128x1_t(a, offs, aligned) for _ in range(2)]
    return (*both[0], *both[1], *_quantize_128x1_t(a, offs, aligned))


def _quantize_row(x):
    return _q(x, *x.shape), _s(x, *x.shape[:-1])


def _quantize_col_t(x, offs=None, aligned=False):
    k, width = x.shape[1], transposed_width(x.shape[0], offs, aligned, ROW_ALIGNMENT)
    return _q(x, k, width), _s(x, k) if offs is None else _s(x, offs.shape[0], k)


def _quantize_row_col_t(x, offs=None, aligned=False):
    return (*_quantize_row(x), *_quantize_col_t(x, offs, aligned))


def _quantize_row_col_t_pair(g, x, offs=None, aligned=False):
    return (*_quantize_row_col_t(g, offs, aligned), *_quantize_col_t(x, offs, aligned))


def _quantize_weight_col_t(w):
    *lead, n, k = w.shape
    return _q(w, *lead, k, n), _s(w, *lead, k)


def _blockwise_mm(a, sa, b, sb, offs=None, aligned=False, out_dtype=torch.bfloat16):
    return a.new_empty(a.shape[0], b.shape[-2], dtype=out_dtype)


def _blockwise_fprop(a, sa, w, offs=None, aligned=False, out_dtype=torch.bfloat16):
    return a.new_empty(a.shape[0], w.shape[-2], dtype=out_dtype)


def _blockwise_dgrad(a, sa, w, offs=None, aligned=False, out_dtype=torch.bfloat16):
    return a.new_empty(a.shape[0], w.shape[-1], dtype=out_dtype)


def _blockwise_dgrad_pair(
    a, sa, w, a2, sa2, w2, offs=None, aligned=False, out_dtype=torch.bfloat16
):
    return _blockwise_dgrad(a, sa, w, offs, aligned, out_dtype)


def _blockwise_wgrad(a, sa, b, sb, offs=None, aligned=False, out_dtype=torch.bfloat16):
    groups = [] if offs is None else [offs.shape[0]]
    return a.new_empty(*groups, a.shape[0], b.shape[0], dtype=out_dtype)


def _rowwise_mm(a, sa, b, sb, offs=None, aligned=False, out_dtype=torch.bfloat16):
    return _blockwise_mm(a, sa, b, sb, offs, aligned, out_dtype)


def _rowwise_fprop(a, sa, w, offs=None, aligned=False, out_dtype=torch.bfloat16):
    return _blockwise_fprop(a, sa, w, offs, aligned, out_dtype)


def _rowwise_dgrad(a, sa, w, offs=None, aligned=False, out_dtype=torch.bfloat16):
    return _blockwise_dgrad(a, sa, w, offs, aligned, out_dtype)


def _rowwise_wgrad(a, sa, b, sb, offs=None, aligned=False, out_dtype=torch.bfloat16):
    return _blockwise_wgrad(a, sa, b, sb, offs, aligned, out_dtype)


def _bf16_wgrad(g, x, offs=None, aligned=False, out_dtype=torch.bfloat16):
    groups = [] if offs is None else [offs.shape[0]]
    return g.new_empty(*groups, g.shape[1], x.shape[1], dtype=out_dtype)


QUANTIZERS = (
    _quantize_1x128,
    _quantize_128x1_t,
    _quantize_1x128_128x1_t,
    _quantize_128x128,
    _quantize_128x128_t,
    _quantize_row,
    _quantize_col_t,
    _quantize_row_col_t,
    _quantize_row_col_t_pair,
    _quantize_weight_col_t,
)
SWIGLU = (_swiglu_1x128, _swiglu_backward_1x128_128x1_t)
GEMMS = (
    _blockwise_mm,
    _blockwise_fprop,
    _blockwise_dgrad,
    _blockwise_dgrad_pair,
    _blockwise_wgrad,
    _rowwise_mm,
    _rowwise_fprop,
    _rowwise_dgrad,
    _rowwise_wgrad,
    _bf16_wgrad,
)

_fakes = SimpleNamespace(
    **{f.__name__.removeprefix("_"): f for f in (*QUANTIZERS, *SWIGLU, *GEMMS)}
)


def _check_inputs(name: str, *args) -> None:
    """ValueError for what a quantiser's kernel would misread: it takes x as 32-bit words."""
    x, *others = (t for t in args if isinstance(t, Tensor) and t.is_floating_point())
    for t in (x, *others):
        if t.dtype not in DTYPES or t.dtype != x.dtype or t.shape[-1] % 16:
            raise ValueError(
                f"titan_fp8::{name}: an input is {t.dtype} of shape {tuple(t.shape)}: allowed are "
                "torch.bfloat16 or torch.float32, all the same, last dimensions multiples of 16"
            )


def _register_single(name: str, fake: Callable) -> None:
    def call(of, *args):
        return getattr(of, name)(*args)

    def checked_call(of, *args):
        _check_inputs(name, *args)
        return call(of, *args)

    _register(name, getattr(reference, name), call if fake in GEMMS else checked_call, fake)


def _register_composite(composite: Callable) -> None:
    def fake(*args):
        return composite(_fakes, *args)

    signature = inspect.signature(composite)
    fake.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])

    def call(of, x, *args):
        _check_inputs(composite.__name__, x)
        return composite(of, x, *args)

    _register(composite.__name__, fake, call, fake)


for _name, _fake in vars(_fakes).items():
    _register_single(_name, _fake)
for _composite in COMPOSITES:
    _register_composite(_composite)


# The permutation around the experts


def _register_on_rows(fake) -> None:
    """As `_register`, for the ops that move rows in high precision."""
    name = fake.__name__.removeprefix("_")
    _library.define(name + torch.library.infer_schema(getattr(reference, name), mutates_args=()))

    def run(*args):
        x, *args = (t.contiguous() if isinstance(t, Tensor) else t for t in args)
        if not x.is_cuda:
            return getattr(reference, name)(x, *args)
        return run_kernel(name, x, args)

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"titan_fp8::{name}", fake, lib=_library)


def _gather_rows(x, slots, weight=None, k=1):
    return x.new_empty(slots.shape[0], x.shape[1])


def _combine_rows(y, index, weight=None):
    return y.new_empty(index.shape[0], y.shape[1])


def _dot_rows(a, b, index):
    return _s(a, *index.shape)


ON_ROWS = (_gather_rows, _combine_rows, _dot_rows)

for _fake in ON_ROWS:
    _register_on_rows(_fake)

NAMES = tuple(
    f.__name__.removeprefix("_") for f in (*QUANTIZERS, *SWIGLU, *GEMMS, *COMPOSITES, *ON_ROWS)
)
"""All ops of `torch.ops.titan_fp8`."""
