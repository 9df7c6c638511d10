"""The quantiser kernels on one Hopper GPU: us, GB/s and % of the copy bandwidth of the same run.

    python scripts/bench_quantize.py [--json FILE]

Bytes are an ideal kernel's: x read once where a scale's block fits on chip, twice for scales that
stand for a column of all tokens, and each FP8 copy written once. With arbitrary group ends the
padding that the layout asks for is the kernel's own cost, not counted as bytes.

The last column, for SwiGLU and its gradient: the time of what the compiler does, divided by the
op's. The compiler's kernel writes h, or da, db and h, in bf16, and our quantisers read them.

No speed is printed for an op whose result is not the reference's, bit for bit, on an input of the
same kind with fewer rows; of SwiGLU one where the sigmoid is 1, which is approximated otherwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from bench_common import copy_gbps, median_us, parser, report, sets_beyond_l2
from bench_shapes import SEED, uneven_ends
from torch import Tensor

from titan_fp8 import kernels, reference

TOKENS = ((32768, 7168), (8192, 14336), (32768, 2048), (8192, 8192))
"""(M, K) of activations and gradients: 64 M elements and more."""
WEIGHTS = ((1, 32768, 7168), (4, 8192, 7168), (16, 2048, 7168), (64, 2048, 1408))
"""(E, N, K) of expert weights."""
GROUPS = ((8, True), (64, True), (8, False), (64, False))
"""(E, aligned) of the grouped inputs, all of TOKENS[0]."""
GATED = ((8192, 14336), (32768, 2048))
"""(M, H) of SwiGLU: Llama3-8B at 8192 tokens, the experts of DeepSeek-V3 671B."""
CHECKED_ROWS = 1152
SWIGLU, SWIGLU_BACKWARD = "swiglu_1x128", "swiglu_backward_1x128_128x1_t"
WRITES = {"quantize_1x128_128x1_t": 2, "quantize_row_col_t": 2, SWIGLU_BACKWARD: 5}
READS = {
    "quantize_col_t": 2,
    "quantize_row_col_t": 2,
    "quantize_weight_col_t": 2,
    SWIGLU: 2,
    SWIGLU_BACKWARD: 3,
}
BLOCKWISE = ("quantize_1x128", "quantize_128x1_t", "quantize_1x128_128x1_t")
ROWWISE = ("quantize_row", "quantize_col_t", "quantize_row_col_t")
WEIGHT_OPS = ("quantize_128x128", "quantize_128x128_t", "quantize_row", "quantize_weight_col_t")


@dataclass(frozen=True)
class Case:
    """One op on one kind of input; `groups` is (E, aligned)."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    groups: tuple[int, bool] | None = None

    def arguments(self, rows: int) -> tuple:
        """Random input with that many rows (of each expert) and, with groups, their ends."""
        *lead, _, k = self.shape
        if self.op in (SWIGLU, SWIGLU_BACKWARD):
            shape = (READS[self.op], rows, k)
            return tuple(torch.randn(shape, device="cuda", dtype=self.dtype).unbind())
        x = torch.randn(*lead, rows, k, device="cuda", dtype=self.dtype)
        if self.groups is None:
            return (x,)
        e, aligned = self.groups
        alignment = 1 if not aligned else 16 if self.op in ROWWISE else 128
        # `aligned` tells of multiples of 128.
        return x, uneven_ends(e, rows, alignment).cuda(), alignment == 128


def cases() -> Iterator[Case]:
    for shape in TOKENS:
        yield from (Case(op, shape) for op in BLOCKWISE + ROWWISE)
    for groups in GROUPS:
        yield from (Case(op, TOKENS[0], groups=groups) for op in BLOCKWISE[1:] + ROWWISE[1:])
    for op in WEIGHT_OPS:
        yield from (Case(op, shape) for shape in WEIGHTS)
    for op in BLOCKWISE + ROWWISE + WEIGHT_OPS[:2]:
        yield Case(op, TOKENS[0], torch.float32)
    for op in (SWIGLU, SWIGLU_BACKWARD):
        yield from (Case(op, shape) for shape in GATED)


@torch.compile(fullgraph=True, dynamic=False)
def compiled_swiglu(a: Tensor, b: Tensor) -> Tensor:
    return reference.swiglu(a, b)


@torch.compile(fullgraph=True, dynamic=False)
def compiled_swiglu_backward(dh: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return *reference.swiglu_backward(dh, a, b), reference.swiglu(a, b)


def by_compiler(*inputs: Tensor) -> tuple[Tensor, ...]:
    """What the SwiGLU op of these inputs computes, by a kernel of the compiler and quantisers."""
    if len(inputs) == 2:
        return kernels.quantize_1x128(compiled_swiglu(*inputs))
    da, db, h = compiled_swiglu_backward(*inputs)
    both = kernels.quantize_1x128_128x1_t
    return *both(da), *both(db), *kernels.quantize_128x1_t(h)


def is_right(case: Case) -> bool:
    arguments = case.arguments(CHECKED_ROWS if case.groups is None else case.shape[0] // 2)
    if case.op in (SWIGLU, SWIGLU_BACKWARD):
        *dh, a, b = arguments
        arguments = *dh, 20 + a.abs(), b
    got = getattr(kernels, case.op)(*arguments)
    want = getattr(reference, case.op)(*arguments)
    pairs = zip(got, want, strict=True)
    return all(torch.equal(a.float(), b.float()) for a, b in pairs)


def gigabytes(case: Case) -> float:
    elements = torch.Size(case.shape).numel()
    read = READS.get(case.op, 1) * case.dtype.itemsize
    return elements * (read + WRITES.get(case.op, 1)) / 1e9


def measure(case: Case, copy: float) -> dict[str, object]:
    row = {
        "op": case.op,
        "shape": "x".join(map(str, case.shape)),
        "dtype": str(case.dtype).removeprefix("torch."),
        "groups": "" if case.groups is None else f"{case.groups[0]}{'' if case.groups[1] else '*'}",
    }
    if not is_right(case):
        return row | {"us": "WRONG", "GB/s": None, "% of copy": None, "x compiler": None}
    inputs = [
        case.arguments(case.shape[-2]) for _ in range(sets_beyond_l2(int(gigabytes(case) * 1e9)))
    ]
    us = median_us([lambda a=a: getattr(kernels, case.op)(*a) for a in inputs])
    gbps = gigabytes(case) / us * 1e6
    row |= {"us": us, "GB/s": gbps, "% of copy": 100 * gbps / copy, "x compiler": None}
    if case.op in (SWIGLU, SWIGLU_BACKWARD):
        row["x compiler"] = median_us([lambda a=a: by_compiler(*a) for a in inputs]) / us
    return row


def main() -> None:
    arguments = parser(__doc__.splitlines()[0]).parse_args()
    copy = copy_gbps()
    print(f"copy: {copy:.0f} GB/s; group ends: multiples of 128, 16 rowwise, * any; seed: {SEED}")
    report([measure(case, copy) for case in cases()], arguments.json)


if __name__ == "__main__":
    main()
