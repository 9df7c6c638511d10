"""An implementation of the primitive ops that tells an observer what its functions did.

Each function below stands for one or more ops: it calls the op, then notes samples of what it has
read and written, or the operands that a GEMM has read. The other ops pass unseen.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titan_fp8.reference import swiglu, swiglu_backward

if TYPE_CHECKING:
    from titan_fp8.health.observer import Observer

Op = Callable[..., Any]


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
            if not x.numel() or _is_captured(x):
                return op(x, *args, **options)
            return watch(self._observer, op, x, *args, **options)

        return run


def _is_captured(x: Tensor) -> bool:
    """Whether a CUDA graph is captured: it would repeat the samples, into memory of its own."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _sampled(observer: "Observer", x: Tensor) -> Tensor:
    """The sampled rows of x."""
    return x[observer.sampler.sampled_rows(len(x), x.device)]


# Inputs and gradients


def _rows(observer: "Observer", op: Op, x: Tensor, **options: Any) -> Any:
    q, s = op(x, **options)
    observer.note(observer.sampler.take_rows(_sampled(observer, x), q, s))
    return q, s


def _columns(
    blockwise: bool,
    observer: "Observer",
    op: Op,
    x: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    **options: Any,
) -> Any:
    q, s = op(x, offs, aligned, **options)
    observer.note(
        observer.sampler.take_columns(_sampled(observer, x), len(x), q, s, offs, aligned, blockwise)
    )
    return q, s


def _rows_and_columns(
    blockwise: bool,
    observer: "Observer",
    op: Op,
    x: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    **options: Any,
) -> Any:
    outputs = op(x, offs, aligned, **options)
    _note_rows_and_columns(
        observer, _sampled(observer, x), len(x), outputs, offs, aligned, blockwise
    )
    return outputs


def _note_rows_and_columns(
    observer: "Observer",
    x: Tensor,
    size: int,
    outputs: tuple[Tensor, ...],
    offs: Tensor | None,
    aligned: bool,
    blockwise: bool = True,
) -> None:
    """Rows and columns of a tensor of `size` rows, of which x are the sampled ones."""
    q, s, q_t, s_t = outputs
    rows = observer.note(observer.sampler.take_rows(x, q, s, offs))
    columns = observer.sampler.take_columns(x, size, q_t, s_t, offs, aligned, blockwise)
    observer.note(columns, twin=rows)


def _swiglu_rows(observer: "Observer", op: Op, a: Tensor, b: Tensor, **options: Any) -> Any:
    q, s = op(a, b, **options)
    observer.note(
        observer.sampler.take_rows(swiglu(_sampled(observer, a), _sampled(observer, b)), q, s)
    )
    return q, s


def _swiglu_backward(
    observer: "Observer",
    op: Op,
    dh: Tensor,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    **options: Any,
) -> Any:
    outputs = op(dh, a, b, offs, aligned, **options)
    dh, a_at, b_at = _sampled(observer, dh), _sampled(observer, a), _sampled(observer, b)
    for i, gradient in enumerate(swiglu_backward(dh, a_at, b_at)):
        _note_rows_and_columns(
            observer, gradient, len(a), outputs[4 * i : 4 * i + 4], offs, aligned
        )
    h, (q, s) = swiglu(a_at, b_at), outputs[8:]
    observer.note(observer.sampler.take_columns(h, len(a), q, s, offs, aligned, blockwise=True))
    return outputs


# Weights


def _weight(
    gemm: str,
    observer: "Observer",
    op: Op,
    w: Tensor,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    if dtype is not None:
        return op(w, dtype, **options)  # A shard, which shards.py samples.
    q, s = op(w, **options)
    sample = observer.sampler.take_weight(w if gemm == "fprop" else w.mT, q, s)
    observer.note(sample, source=observer.source(w), gemm=gemm)
    return q, s


def _rows_or_weight(observer: "Observer", op: Op, x: Tensor, **options: Any) -> Any:
    """Rows of an input, of a gradient or of a weight; the GEMM that reads them will tell which."""
    q, s = op(x, **options)
    if x.dim() == 3:
        sample = observer.sampler.take_weight(x, q, s)
    else:
        sample = observer.sampler.take_rows(_sampled(observer, x), q, s)
    observer.note(sample, source=observer.source(x), gemm="fprop")
    return q, s


def _transpose(observer: "Observer", op: Op, q: Tensor) -> Tensor:
    q_t = op(q)
    observer.transposed(q, q_t)
    return q_t


# GEMMs


def _mm(
    observer: "Observer",
    op: Op,
    a: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    offs: Tensor | None = None,
    *args: Any,
) -> Tensor:
    observer.multiplied(a, b, offs)
    return op(a, sa, b, sb, offs, *args)


def _mm_pair(observer: "Observer", op: Op, *args: Any) -> Tensor:
    a, _, b, _, a2, _, b2, *_ = args
    observer.multiplied(a, b, None)
    observer.multiplied(a2, b2, None)
    return op(*args)


def _wgrad(observer: "Observer", op: Op, g: Tensor, sg: Tensor, x: Tensor, *args: Any) -> Tensor:
    observer.multiplied_columns(g, x)
    return op(g, sg, x, *args)


_WATCHED: dict[str, Op] = {
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
    "transpose_fp8": _transpose,
    "blockwise_mm": _mm,
    "blockwise_mm_pair": _mm_pair,
    "blockwise_wgrad": _wgrad,
    "rowwise_mm": _mm,
    "rowwise_wgrad": _wgrad,
}
