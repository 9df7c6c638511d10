"""The ops of a step, wrapped so that they tell an observer what they have read and written.

Each function below stands for the ops that recipes have for one purpose. It is given an observer, a
call and what the op has returned. The call are the arguments by name, and besides them `first`, the
first one, and `blockwise`, whether the op scales blocks. The other ops pass unseen.
"""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titan_fp8 import reference
from titan_fp8.ops.registry import OPS, Implementation
from titan_fp8.recipe import RECIPES
from titan_fp8.reference import swiglu, swiglu_backward

if TYPE_CHECKING:
    from titan_fp8.health.observer import Observer


class WatchedOps(Implementation):
    """The ops over the functions of `module`, watched by an observer."""

    def __init__(self, module: Any, observer: "Observer"):
        super().__init__(module)
        self._observer = observer

    def __getattr__(self, name: str) -> Any:
        op, watch = super().__getattr__(name), WATCHED.get(name)
        if watch is None or not self._observer.observing():
            return op

        @torch.no_grad()
        def run(x: Tensor, *args: Any, **options: Any) -> Any:
            outputs = op(x, *args, **options)
            arguments = _signature(name).bind(x, *args, **options)
            arguments.apply_defaults()
            call = SimpleNamespace(**arguments.arguments, first=x, blockwise="128" in name)
            watch(self._observer, call, outputs)
            return outputs

        setattr(self, name, run)  # The base class has set a composite op.
        return run


@functools.cache
def _signature(name: str) -> inspect.Signature:
    body = OPS[name].body
    return inspect.signature(functools.partial(body, None) if body else getattr(reference, name))


# Quantizers


def _note(observer: "Observer", c: Any, x: Tensor, rows: Any = None, columns: Any = None) -> None:
    """A call has written q and s, `rows` or `columns` or both; x are the sampled rows of it."""
    if not len(x):  # Experts may have no tokens. Their columns have a size all the same.
        observer.forget(*(of_one[0] for of_one in (rows, columns) if of_one))
        return
    twin, sampler = None, observer.sampler
    if rows:
        twin = observer.note(rows[0], sampler.take_rows(x, c, *rows))
    if columns:
        observer.note(columns[0], sampler.take_columns(x, c, *columns), twin)


def _rows(observer: "Observer", c: Any, outputs: Any) -> None:
    if c.first.dim() == 3:  # A recipe may quantize weights by the same op.
        _weight(observer, c, outputs)
    else:
        _note(observer, c, observer.sampler.sampled(c.first), outputs)


def _columns(observer: "Observer", c: Any, outputs: Any) -> None:
    _note(observer, c, observer.sampler.sampled(c.first), columns=outputs)


def _both(observer: "Observer", c: Any, outputs: Any) -> None:
    _note(observer, c, observer.sampler.sampled(c.first), outputs[:2], outputs[2:])


def _gather(observer: "Observer", _: Any, outputs: Any) -> None:
    """Copies of rows that were quantized before: they are no samples of this layer's tokens."""
    observer.forget(outputs[0], outputs[2])


def _swiglu(observer: "Observer", c: Any, outputs: Any) -> None:
    a, b = map(observer.sampler.sampled, (c.a, c.b))
    _note(observer, c, swiglu(a, b), outputs)


def _swiglu_backward(observer: "Observer", c: Any, outputs: Any) -> None:
    dh, a, b = map(observer.sampler.sampled, (c.dh, c.a, c.b))
    da, db = swiglu_backward(dh, a, b)
    _note(observer, c, da, outputs[:2], outputs[2:4])
    _note(observer, c, db, outputs[4:6], outputs[6:8])
    _note(observer, c, swiglu(a, b), columns=outputs[8:])


def _weight(observer: "Observer", c: Any, outputs: Any) -> None:
    if getattr(c, "dtype", None) is None:  # Otherwise it is a shard, sampled before the step.
        observer.note(outputs[0], observer.sampler.take_weight(c.first, *outputs))


def _weight_t(observer: "Observer", c: Any, outputs: Any) -> None:
    observer.note(outputs[0], observer.sampler.take_weight(c.first.mT, *outputs))


# Products


def _product(gemm: str, observer: "Observer", c: Any, _: Tensor) -> None:
    pair = [(c.a2, c.w2, c.w2_scale)] if hasattr(c, "a2") else []
    observer.multiplied(gemm, c.offs, (c.a, c.w, c.w_scale), *pair)


def _wgrad(observer: "Observer", c: Any, _: Tensor) -> None:
    observer.multiplied_columns(c.a, c.b)


WATCHED: dict[str, Callable[["Observer", Any, Any], None]] = {}
for _r in RECIPES.values():
    WATCHED |= {
        _r.quantize_weight.name: _weight,
        _r.quantize_weight_t.name: _weight_t,
        _r.quantize_rows.name: _rows,
        _r.quantize_columns.name: _columns,
        _r.quantize_rows_and_columns.name: _both,
        _r.fprop.name: functools.partial(_product, "fprop"),
        _r.dgrad.name: functools.partial(_product, "dgrad"),
    }
    if not _r.wgrad_in_bf16:
        WATCHED[_r.wgrad.name] = _wgrad
    if _r.feed_forward is not None:
        WATCHED[_r.feed_forward.swiglu.name] = _swiglu
        WATCHED[_r.feed_forward.swiglu_backward.name] = _swiglu_backward
        WATCHED[_r.feed_forward.dgrad_pair.name] = functools.partial(_product, "dgrad")
        WATCHED[_r.feed_forward.gather.name] = _gather
