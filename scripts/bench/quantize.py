"""Quantizers, and SwiGLU fused with quantization: time and share of the copy bandwidth. Groups
end at multiples of 128 (rowwise: 16), or with a * anywhere.

Bytes are those of an ideal kernel. It reads x once if the elements that share a scale fit on chip,
twice if a scale covers a column of all tokens, and writes each FP8 copy once. The padding of groups
that end anywhere does not count.

"x compiler", for SwiGLU and its gradient, is the speedup over torch.compile: a compiled kernel that
writes h (or da, db and h) in bf16, followed by our quantizers that read it.

An op gets no time unless its result equals the reference's bit for bit, on the same kind of input
with fewer rows. SwiGLU is checked on inputs whose sigmoid is 1, because the kernel approximates it
differently from the reference.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from bench.common import Result, bandwidth, copy_gbps, median_us, sets_beyond_l2
from bench.shapes import QUANTIZE, QUANTIZE_WEIGHTS, SWIGLU, uneven_ends
from tables import Row
from torch import Tensor

from titan_fp8 import reference
from titan_fp8.kernels import hopper

GROUPS = ((8, True), (64, True), (8, False), (64, False))
"""(E, aligned) of the grouped inputs, all of shape QUANTIZE[0]."""
CHECKED_ROWS = 1152
FORWARD, BACKWARD = "swiglu_1x128", "swiglu_backward_1x128_128x1_t"
WRITES = {"quantize_1x128_128x1_t": 2, "quantize_row_col_t": 2, BACKWARD: 5}
READS = {
    "quantize_col_t": 2,
    "quantize_row_col_t": 2,
    "quantize_weight_col_t": 2,
    FORWARD: 2,
    BACKWARD: 3,
}
BLOCKWISE = ("quantize_1x128", "quantize_128x1_t", "quantize_1x128_128x1_t")
ROWWISE = ("quantize_row", "quantize_col_t", "quantize_row_col_t")
WEIGHT_OPS = ("quantize_128x128", "quantize_128x128_t", "quantize_row", "quantize_weight_col_t")
TITLE = "Quantizers"


@dataclass(frozen=True)
class Case:
    """One op on one kind of input; `groups` is (E, aligned)."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    groups: tuple[int, bool] | None = None

    def arguments(self, rows: int) -> tuple:
        """A random input with this many rows (of each expert), and its group ends if any."""
        *lead, _, k = self.shape
        if self.op in (FORWARD, BACKWARD):
            shape = (READS[self.op], rows, k)
            return tuple(torch.randn(shape, device="cuda", dtype=self.dtype).unbind())
        x = torch.randn(*lead, rows, k, device="cuda", dtype=self.dtype)
        if self.groups is None:
            return (x,)
        e, aligned = self.groups
        alignment = 1 if not aligned else 16 if self.op in ROWWISE else 128
        # The op's `aligned` means multiples of 128.
        return x, uneven_ends(e, rows, alignment).cuda(), alignment == 128


def cases() -> Iterator[Case]:
    for shape in QUANTIZE:
        yield from (Case(op, shape) for op in BLOCKWISE + ROWWISE)
    for groups in GROUPS:
        yield from (Case(op, QUANTIZE[0], groups=groups) for op in BLOCKWISE[1:] + ROWWISE[1:])
    for op in WEIGHT_OPS:
        yield from (Case(op, shape) for shape in QUANTIZE_WEIGHTS)
    for op in BLOCKWISE + ROWWISE + WEIGHT_OPS[:2]:
        yield Case(op, QUANTIZE[0], torch.float32)
    for op in (FORWARD, BACKWARD):
        yield from (Case(op, shape) for shape in SWIGLU)


@torch.compile(fullgraph=True, dynamic=False)
def compiled_swiglu(a: Tensor, b: Tensor) -> Tensor:
    return reference.swiglu(a, b)


@torch.compile(fullgraph=True, dynamic=False)
def compiled_swiglu_backward(dh: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return *reference.swiglu_backward(dh, a, b), reference.swiglu(a, b)


def by_compiler(*inputs: Tensor) -> tuple[Tensor, ...]:
    """What the SwiGLU op computes from these inputs, with a compiled kernel and our quantizers."""
    if len(inputs) == 2:
        return hopper.quantize_1x128(compiled_swiglu(*inputs))
    da, db, h = compiled_swiglu_backward(*inputs)
    both = hopper.quantize_1x128_128x1_t
    return *both(da), *both(db), *hopper.quantize_128x1_t(h)


def is_right(case: Case) -> bool:
    arguments = case.arguments(CHECKED_ROWS if case.groups is None else case.shape[0] // 2)
    if case.op in (FORWARD, BACKWARD):
        *dh, a, b = arguments
        arguments = *dh, 20 + a.abs(), b
    got = getattr(hopper, case.op)(*arguments)
    want = getattr(reference, case.op)(*arguments)
    pairs = zip(got, want, strict=True)
    return all(torch.equal(a.float(), b.float()) for a, b in pairs)


def gigabytes(case: Case) -> float:
    elements = torch.Size(case.shape).numel()
    read = READS.get(case.op, 1) * case.dtype.itemsize
    return elements * (read + WRITES.get(case.op, 1)) / 1e9


def row_of(case: Case, copy: float) -> Row:
    row = {
        "op": case.op,
        "shape": "x".join(map(str, case.shape)),
        "dtype": str(case.dtype).removeprefix("torch."),
        "groups": "" if case.groups is None else f"{case.groups[0]}{'' if case.groups[1] else '*'}",
    }
    if not is_right(case):
        return row | {"us": "wrong", "GB/s": None, "% of copy": None, "x compiler": None}
    inputs = [
        case.arguments(case.shape[-2]) for _ in range(sets_beyond_l2(int(gigabytes(case) * 1e9)))
    ]
    us = median_us([lambda a=a: getattr(hopper, case.op)(*a) for a in inputs])
    row |= {"us": us, **bandwidth(gigabytes(case), us, copy), "x compiler": None}
    if case.op in (FORWARD, BACKWARD):
        row["x compiler"] = median_us([lambda a=a: by_compiler(*a) for a in inputs]) / us
    return row


def measure() -> Result:
    copy = copy_gbps()
    rows = [row_of(case, copy) for case in cases()]
    return rows, {"copy bandwidth": f"{copy:.0f} GB/s"}
