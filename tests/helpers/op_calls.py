"""Calls of every op in all its forms."""

import itertools

import torch

import titan_fp8.recipe

ops = torch.ops.titan_fp8

E4M3 = torch.float8_e4m3fn

RECIPES = tuple(titan_fp8.recipe.RECIPES)

DTYPES = (torch.bfloat16, torch.float32)


def offsets(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


LAYOUTS = {
    "dense": (None, False),
    "unaligned": (offsets(5, 5, 190), False),
    "aligned": (offsets(128, 128, 256), True),
}
"""offs and aligned; the first two for any M, the last for 256 tokens and more."""


def token_ops():
    return (
        ops.quantize_128x1_t, ops.quantize_1x128_128x1_t, ops.quantize_col_t,
        ops.quantize_row_col_t,
    )  # fmt: skip


PERMUTATION = (
    ops.gather_rows, ops.combine_rows, ops.dot_rows, ops.invert_index, ops.places_of_tokens,
)  # fmt: skip

INTEGERS = (torch.int64, torch.int32)


def calls(tokens=((300, 144), (257, 48), (0, 32)), gemms=((300, 144, 272), (0, 32, 16))):
    """(op, arguments) of every op in all its forms, for these (M, K) and (M, N, K)."""
    yield from index_calls()
    for (m, k), dtype in itertools.product(tokens, DTYPES):
        x = torch.randn(m, k, dtype=dtype)
        yield ops.quantize_1x128, (x,)
        yield ops.quantize_row, (x,)
        yield from gather_calls(x)
        for index in ([-1, 7, m - 1, -1, 0, m], []):
            yield from row_calls(x, torch.tensor(index, dtype=torch.int32))
        a, b = torch.randn(2, m, k, dtype=dtype)
        yield ops.swiglu_1x128, (a, b)
        yield ops.swiglu_dscores, (x, a, b, torch.rand(m), m % 2 == 0)
        for offs, aligned in LAYOUTS.values():
            if m > 256 or not aligned:
                for op in token_ops():
                    yield op, (x, offs, aligned)
                yield ops.swiglu_backward_1x128_128x1_t, (x, a, b, offs, aligned)
    for shape in ((272, 144), (512, 640), (1, 16, 16), (3, 144, 272), (2, 512, 48)):
        for op in (ops.quantize_128x128, ops.quantize_row):
            yield op, (torch.randn(shape),)
        for op in (ops.quantize_128x128_t, ops.quantize_weight_col_t):
            yield op, (torch.randn(shape, dtype=torch.bfloat16),)
        yield ops.transpose_fp8, (torch.randn(shape).to(E4M3),)
        for x, dtype in ((torch.randn(shape), DTYPES[0]), (torch.randn(shape), DTYPES[1])):
            yield ops.quantize_128x128, (x, dtype)
    for (m, n, k), (offs, aligned), dtype in itertools.product(gemms, LAYOUTS.values(), DTYPES):
        if m > 256 or not aligned:
            yield from gemm_calls(m, n, k, offs, aligned, dtype)


def row_calls(x, index):
    """The ops on rows of x, of an even number of rows or none."""
    pairs = index.view(-1, 2)
    yield ops.gather_rows, (x, index, None)
    yield ops.gather_rows, (x, index, torch.randn(len(x), 3), 3)
    for weight in (None, torch.randn(pairs.shape)):
        yield ops.combine_rows, (x, pairs, weight)
    yield ops.dot_rows, (torch.randn(len(pairs), x.shape[1], dtype=x.dtype), x, pairs)


def gather_calls(x):
    """Rows of x in FP8, in groups; there are no rows for the first and the last index."""
    q, s = ops.quantize_1x128(x)
    ends = offsets(128, 256)
    for index in (torch.arange(-20, 364).int(), torch.arange(0).int()):
        arguments = q, s, index, ends.clamp(max=len(index))
        yield ops.gather_1x128_128x1_t, arguments
        yield ops.gather_1x128_128x1_t, (*arguments, torch.randn(len(index)), 2)


def index_calls():
    """The ops on indices: four tokens from two ranks for three experts, one of them without any."""
    yield ops.invert_index, (torch.tensor([5, 0, 2]), 6)
    for counts, dtype in itertools.product(([1, 0, 2, 0, 0, 1], [0] * 6), INTEGERS):
        counts = torch.tensor(counts, dtype=dtype)
        yield ops.places_of_tokens, (counts, 3, 2, int(counts.sum()), 64, 16)


def gemm_calls(m, n, k, offs, aligned, dtype):
    x, g = torch.randn(m, k), torch.randn(m, n)
    w = torch.randn(n, k) if offs is None else torch.randn(len(offs), n, k)
    layout = (offs, aligned)
    end = (*layout, dtype)
    yield ops.blockwise_mm, (*ops.quantize_1x128(x), *ops.quantize_128x128(w), *end)
    yield ops.rowwise_mm, (*ops.quantize_row(x), *ops.quantize_row(w), *end)
    yield ops.blockwise_fprop, (*ops.quantize_1x128(x), w, *end)
    yield ops.blockwise_dgrad, (*ops.quantize_1x128(g), w, *end)
    pair = (*ops.quantize_1x128(g), w, *ops.quantize_1x128(2 * g), torch.randn_like(w))
    yield ops.blockwise_dgrad_pair, (*pair, *end)
    left = *ops.quantize_1x128(g), *ops.quantize_128x128_t(w)
    yield ops.blockwise_mm_pair, (*left, *left, *end)
    yield ops.rowwise_fprop, (*ops.quantize_row(x), w, *end)
    yield ops.rowwise_dgrad, (*ops.quantize_row(g), w, *end)
    (wq, sw), (_, sw_t) = ops.quantize_128x128(w), ops.quantize_128x128_t(w)
    end_of_fp8 = (*end, dtype)
    left = *ops.quantize_1x128(g), wq
    yield ops.blockwise_fprop, (*ops.quantize_1x128(x), wq, *end_of_fp8, sw)
    yield ops.blockwise_dgrad, (*left, *end_of_fp8, sw_t)
    yield ops.blockwise_dgrad_pair, (*left, *left, *end_of_fp8, sw_t, sw_t)
    yield ops.rowwise_fprop, (*ops.quantize_row(x), wq, *end_of_fp8, ops.quantize_row(w)[1])
    sw_t = ops.quantize_weight_col_t(w)[1]
    yield ops.rowwise_dgrad, (*ops.quantize_row(g), wq, *end_of_fp8, sw_t)
    operands = *ops.quantize_128x1_t(g, *layout), *ops.quantize_128x1_t(x, *layout)
    yield ops.blockwise_wgrad, (*operands, *end)
    operands = *ops.quantize_col_t(g, *layout), *ops.quantize_col_t(x, *layout)
    yield ops.rowwise_wgrad, (*operands, *end)
    yield ops.bf16_wgrad, (g.bfloat16(), x.bfloat16(), *end)
