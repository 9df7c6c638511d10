"""An implementation of the primitive ops that tells an observer what its functions did.

Each function below stands for one or more ops. Given the arguments of a call by name and what the
op has returned, it notes samples of both, or the operands that a GEMM has read. The other ops pass
unseen.
"""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titan_fp8 import reference
from titan_fp8.reference import swiglu, swiglu_backward

if TYPE_CHECKING:
    from titan_fp8.health.observer import Observer

Watch = Callable[["Observer", Any, Any], None]


class WatchedOps:
    """The functions of an implementation, watched by an observer."""

    def __init__(self, implementation: Any, observer: "Observer"):
        self._implementation, self._observer = implementation, observer

    def note_cast(self, w: Tensor, cast: Tensor) -> None:
        """A weight has been cast, to be quantized next (`ops/quantize.py`)."""
        if self._observer.observing() and not _is_captured(w):
            self._observer.cast(w, cast)

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._implementation, name)
        watch = _WATCHED.get(name)
        if watch is None or not self._observer.observing():
            return op

        @torch.no_grad()
        def run(x: Tensor, *args: Any, **options: Any) -> Any:
            outputs = op(x, *args, **options)
            if x.numel() and not _is_captured(x):
                arguments = _signature(name).bind(x, *args, **options)
                arguments.apply_defaults()
                watch(self._observer, SimpleNamespace(**arguments.arguments), outputs)
            return outputs

        return run


@functools.cache
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(getattr(reference, name))


def _is_captured(x: Tensor) -> bool:
    """Whether a CUDA graph is captured: it would repeat the samples, into memory of its own."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _sampled(observer: "Observer", x: Tensor) -> Tensor:
    """The sampled rows of x."""
    return x[observer.sampler.sampled_rows(len(x), x.device)]


# Inputs and gradients


def _rows(observer: "Observer", c: Any, outputs: Any) -> None:
    observer.note(observer.sampler.take_rows(_sampled(observer, c.x), *outputs))


def _columns(blockwise: bool, observer: "Observer", c: Any, outputs: Any) -> None:
    x, (q, s) = _sampled(observer, c.x), outputs
    columns = observer.sampler.take_columns(x, len(c.x), q, s, c.offs, c.aligned, blockwise)
    observer.note(columns)


def _rows_and_columns(blockwise: bool, observer: "Observer", c: Any, outputs: Any) -> None:
    x = _sampled(observer, c.x)
    _note_rows_and_columns(observer, x, len(c.x), outputs, c, blockwise)


def _note_rows_and_columns(
    observer: "Observer", x: Tensor, size: int, outputs: Any, c: Any, blockwise: bool
) -> None:
    """Rows and columns of a tensor of `size` rows, of which x are the sampled ones."""
    q, s, q_t, s_t = outputs
    rows = observer.note(observer.sampler.take_rows(x, q, s, c.offs))
    columns = observer.sampler.take_columns(x, size, q_t, s_t, c.offs, c.aligned, blockwise)
    observer.note(columns, twin=rows)


def _swiglu_rows(observer: "Observer", c: Any, outputs: Any) -> None:
    h = swiglu(_sampled(observer, c.a), _sampled(observer, c.b))
    observer.note(observer.sampler.take_rows(h, *outputs))


def _swiglu_backward(observer: "Observer", c: Any, outputs: Any) -> None:
    dh, a, b = (_sampled(observer, t) for t in (c.dh, c.a, c.b))
    for i, gradient in enumerate(swiglu_backward(dh, a, b)):
        of_gradient = outputs[4 * i : 4 * i + 4]
        _note_rows_and_columns(observer, gradient, len(c.a), of_gradient, c, blockwise=True)
    h, (q, s) = swiglu(a, b), outputs[8:]
    observer.note(observer.sampler.take_columns(h, len(c.a), q, s, c.offs, c.aligned, True))


# Weights


def _weight(gemm: str, observer: "Observer", c: Any, outputs: Any) -> None:
    if getattr(c, "dtype", None) is None:  # Otherwise it is a shard, which shards.py samples.
        sample = observer.sampler.take_weight(c.w if gemm == "fprop" else c.w.mT, *outputs)
        observer.note(sample, source=observer.source(c.w), gemm=gemm)


def _rows_or_weight(observer: "Observer", c: Any, outputs: Any) -> None:
    """Rows of an input, of a gradient or of a weight; the GEMM that reads them will tell which."""
    if c.x.dim() == 3:
        sample = observer.sampler.take_weight(c.x, *outputs)
    else:
        sample = observer.sampler.take_rows(_sampled(observer, c.x), *outputs)
    observer.note(sample, source=observer.source(c.x), gemm="fprop")


# GEMMs


def _mm_pair(observer: "Observer", c: Any, outputs: Any) -> None:
    observer.multiplied(c.a, c.b, None)
    observer.multiplied(c.a2, c.b2, None)


_WATCHED: dict[str, Watch] = {
    "quantize_1x128": _rows,
    "quantize_128x1_t": functools.partial(_columns, True),
    "quantize_1x128_128x1_t": functools.partial(_rows_and_columns, True),
    "quantize_128x128": functools.partial(_weight, "fprop"),
    "quantize_128x128_t": functools.partial(_weight, "dgrad"),
    "swiglu_1x128": _swiglu_rows,
    "swiglu_backward_1x128_128x1_t": _swiglu_backward,
    "quantize_row": _rows_or_weight,
    "quantize_col_t": functools.partial(_columns, False),
    "quantize_row_col_t": functools.partial(_rows_and_columns, False),
    "quantize_weight_col_t": functools.partial(_weight, "dgrad"),
    "transpose_fp8": lambda observer, c, q_t: observer.transposed(c.q, q_t),
    "blockwise_mm": lambda observer, c, _: observer.multiplied(c.a, c.b, c.offs),
    "blockwise_mm_pair": _mm_pair,
    "blockwise_wgrad": lambda observer, c, _: observer.multiplied_columns(c.a, c.b),
    "rowwise_mm": lambda observer, c, _: observer.multiplied(c.a, c.b, c.offs),
    "rowwise_wgrad": lambda observer, c, _: observer.multiplied_columns(c.a, c.b),
}
