"""The quantiser kernels on one Hopper GPU: us, GB/s and % of the copy bandwidth of the same run.

    python scripts/bench_quantize.py [--json FILE]

Bytes are an ideal kernel's: x read once where a scale's block fits on chip, twice for scales that
stand for a column of all tokens, and each FP8 copy written once. With arbitrary group ends the
padding that the layout asks for is the kernel's own cost, not counted as bytes.

No speed is printed for an op whose result is not the reference's, bit for bit, on an input of the
same kind with fewer rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from bench_common import copy_gbps, median_us, parser, report, sets_beyond_l2
from torch import Tensor

from titan_fp8 import kernels, reference

TOKENS = ((32768, 7168), (8192, 14336), (32768, 2048), (8192, 8192))
"""(M, K) of activations and gradients: 64 M elements and more."""
WEIGHTS = ((1, 32768, 7168), (4, 8192, 7168), (16, 2048, 7168), (64, 2048, 1408))
"""(E, N, K) of expert weights."""
GROUPS = ((8, True), (64, True), (8, False), (64, False))
"""(E, aligned) of the grouped inputs, all of TOKENS[0]."""
CHECKED_ROWS = 1152
WRITES = {"quantize_1x128_128x1_t": 2, "quantize_row_col_t": 2}
READS = {"quantize_col_t": 2, "quantize_row_col_t": 2, "quantize_weight_col_t": 2}
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
        x = torch.randn(*lead, rows, k, device="cuda", dtype=self.dtype)
        if self.groups is None:
            return (x,)
        e, aligned = self.groups
        alignment = (16 if self.op in ROWWISE else 128) if aligned else 1
        return x, group_ends(rows, e, alignment), aligned


def group_ends(m: int, e: int, alignment: int) -> Tensor:
    """Random ends of `e` groups, multiples of `alignment`, sizes of up to 5 to 1."""
    share = 0.25 + torch.rand(e, generator=torch.Generator().manual_seed(e))
    ends = (share.cumsum(0) / share.sum() * m / alignment).round().int() * alignment
    ends[-1] = m
    return ends.cuda()


def cases() -> Iterator[Case]:
    for shape in TOKENS:
        yield from (Case(op, shape) for op in BLOCKWISE + ROWWISE)
    for groups in GROUPS:
        yield from (Case(op, TOKENS[0], groups=groups) for op in BLOCKWISE[1:] + ROWWISE[1:])
    for op in WEIGHT_OPS:
        yield from (Case(op, shape) for shape in WEIGHTS)
    for op in BLOCKWISE + ROWWISE + WEIGHT_OPS[:2]:
        yield Case(op, TOKENS[0], torch.float32)


def is_right(case: Case) -> bool:
    arguments = case.arguments(CHECKED_ROWS)
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
        return row | {"us": "WRONG", "GB/s": None, "% of copy": None}
    inputs = [
        case.arguments(case.shape[-2]) for _ in range(sets_beyond_l2(int(gigabytes(case) * 1e9)))
    ]
    us = median_us([lambda a=a: getattr(kernels, case.op)(*a) for a in inputs])
    gbps = gigabytes(case) / us * 1e6
    return row | {"us": us, "GB/s": gbps, "% of copy": 100 * gbps / copy}


def main() -> None:
    arguments = parser(__doc__.splitlines()[0]).parse_args()
    copy = copy_gbps()
    print(f"copy: {copy:.0f} GB/s; groups marked * have arbitrary ends, the others aligned ones")
    report([measure(case, copy) for case in cases()], arguments.json)


if __name__ == "__main__":
    main()
