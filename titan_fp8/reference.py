"""Every op in plain PyTorch: the definition of the numerics, the CPU path and the emulation.

Quantization. The elements of a block share one scale, s = max(amax, 1e-12) / 448, kept in FP32.
x is approximated by q · s, where q = e4m3(x · (1 / s)), rounded to nearest even. Every step is one
correctly rounded FP32 operation, so the result is the same to the bit on every machine, and the GPU
kernels must match it. A NaN in a block makes its scale NaN, an Inf makes it Inf: every element of
the block then dequantizes to a non-finite value.

GEMMs multiply the dequantized operands in FP32 and round once, to `out_dtype`. Products on tensor
cores differ from that in the order of summation only.

`layouts.py` describes the layouts of operands and scales, and what `offs` and `aligned` mean.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from titan_fp8.layouts import (
    BLOCK,
    E4M3,
    ROW_ALIGNMENT,
    cdiv,
    column_slices,
    group_bounds,
    pad_blocks,
    pad_groups,
    round_up,
    to_layout_1x128,
    to_layout_128x128,
    zero_padding,
)

E4M3_MAX = 448.0
AMAX_MIN = 1e-12


def scale_of(amax: Tensor, scale_fmt: str = "fp32") -> Tensor:
    """The scales of blocks with these FP32 absolute maxima; "ue8m0" rounds them up to 2^n."""
    # A tensor as the divisor: on CUDA, dividing by a Python number multiplies by its reciprocal.
    s = amax.clamp(min=AMAX_MIN) / torch.full_like(amax, E4M3_MAX)
    if scale_fmt == "fp32":
        return s
    if scale_fmt != "ue8m0":
        raise ValueError(f"scale_fmt = {scale_fmt!r}: allowed are 'fp32' and 'ue8m0'")
    # Adding just less than one exponent step rounds up, and keeps what is a power of two already.
    powers = ((s.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(s.isfinite(), powers, s)


def cast(x: Tensor, s: Tensor) -> Tensor:
    """e4m3(x · (1 / s)); x FP32 and s broadcastable to it."""
    return (x * (torch.ones_like(s) / s)).to(E4M3)


# Blockwise quantizers


def quantize_1x128(x: Tensor, *, scale_fmt: str = "fp32") -> tuple[Tensor, Tensor]:
    """1x128 blocks of x (M, K): q (M, K), s (M, ⌈K/128⌉). The last block of a row may be short."""
    m, k = x.shape
    blocks = pad_blocks(x.float(), -1).reshape(m, cdiv(k, BLOCK), BLOCK)
    s = scale_of(blocks.abs().amax(-1), scale_fmt)
    q = cast(blocks, s.unsqueeze(-1)).view(m, round_up(k, BLOCK))[:, :k]
    return q.contiguous(), to_layout_1x128(s)


def quantize_128x1_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False, *, scale_fmt: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """128x1 blocks of x (M, K), written transposed: q (K, Mt), s (K, Mt/128)."""
    padded, group = pad_groups(x, offs, aligned, BLOCK)
    q, s = quantize_1x128(padded.t(), scale_fmt=scale_fmt)
    return zero_padding(q, x.shape[0], offs, group), s


def quantize_1x128_128x1_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False, *, scale_fmt: str = "fp32"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both of the above: q (M, K), s (M, ⌈K/128⌉), q (K, Mt), s (K, Mt/128)."""
    columns = quantize_128x1_t(x, offs, aligned, scale_fmt=scale_fmt)
    return (*quantize_1x128(x, scale_fmt=scale_fmt), *columns)


def quantize_128x128(
    w: Tensor, dtype: torch.dtype | None = None, *, scale_fmt: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """128x128 blocks of w (..., N, K) as `dtype`: q (..., N, K), s (..., ⌈N/128⌉, ⌈K/128⌉)."""
    *lead, n, k = w.shape
    tiles = pad_blocks(w.to(dtype or w.dtype).float(), -2, -1)
    tiles = tiles.reshape(*lead, cdiv(n, BLOCK), BLOCK, cdiv(k, BLOCK), BLOCK)
    s = scale_of(tiles.abs().amax((-3, -1)), scale_fmt)
    q = cast(tiles, s[..., :, None, :, None])
    q = q.view(*lead, round_up(n, BLOCK), round_up(k, BLOCK))[..., :n, :k]
    return q.contiguous(), to_layout_128x128(s)


def quantize_128x128_t(w: Tensor, *, scale_fmt: str = "fp32") -> tuple[Tensor, Tensor]:
    """The same blocks, written transposed: q (..., K, N), s (..., ⌈K/128⌉, ⌈N/128⌉)."""
    q, s = quantize_128x128(w, scale_fmt=scale_fmt)
    return q.mT.contiguous(), to_layout_128x128(s.mT)


# SwiGLU and its gradient, quantized


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """h = silu(a) · b, computed in FP32 and rounded once to a's dtype."""
    a32 = a.float()
    return (a32 * torch.sigmoid(a32) * b.float()).to(a.dtype)


def swiglu_backward(dh: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """da and db, computed in FP32 and each rounded once to a's dtype."""
    dh32, a32, b32 = dh.float(), a.float(), b.float()
    sigma = torch.sigmoid(a32)
    da = dh32 * b32 * (sigma * (1 + a32 * (1 - sigma)))
    return da.to(a.dtype), (dh32 * (a32 * sigma)).to(a.dtype)


def swiglu_1x128(a: Tensor, b: Tensor, *, scale_fmt: str = "fp32") -> tuple[Tensor, Tensor]:
    """`quantize_1x128` of h = silu(a) · b for a, b (M, H): q (M, H), s (M, ⌈H/128⌉)."""
    return quantize_1x128(swiglu(a, b), scale_fmt=scale_fmt)


def swiglu_backward_1x128_128x1_t(
    dh: Tensor, a: Tensor, b: Tensor,
    offs: Tensor | None = None, aligned: bool = False, *, scale_fmt: str = "fp32",
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """The operands of backward of a SwiGLU of a, b (M, H), given dh (M, H): ten tensors.

    `quantize_1x128_128x1_t` of da (4) and of db (4), `quantize_128x1_t` of h (2).
    """
    da, db = swiglu_backward(dh, a, b)
    return (
        *quantize_1x128_128x1_t(da, offs, aligned, scale_fmt=scale_fmt),
        *quantize_1x128_128x1_t(db, offs, aligned, scale_fmt=scale_fmt),
        *quantize_128x1_t(swiglu(a, b), offs, aligned, scale_fmt=scale_fmt),
    )


def swiglu_dscores(dh: Tensor, a: Tensor, b: Tensor, scores: Tensor, before: bool) -> Tensor:
    """The gradients (M,) FP32 of the scores (M,) FP32 of an expert's rows; dh, a, b (M, H).

    The scores are factors of the rows of x if `before`, so of a and b; else of those of y, and so
    dh has them, too. A score of zero has the gradient zero.
    """
    products = dh.float() * swiglu(a, b).float()
    if before:  # db · b is dh · h.
        products += swiglu_backward(dh, a, b)[0].float() * a.float()
    return torch.where(scores == 0, 0, products.sum(1) / scores)


# Rowwise quantizers


def quantize_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale per row of x (..., R, C): q (..., R, C), s (..., R)."""
    x = x.float()
    s = scale_of(x.abs().amax(-1))
    return cast(x, s.unsqueeze(-1)), s


def quantize_col_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor]:
    """One scale per column of x (M, K) and group, written transposed.

    q (K, Mt); s (K,), with groups (E, K). A group without tokens has the scale of zero columns.
    """
    padded, group = pad_groups(x.float(), offs, aligned, ROW_ALIGNMENT)
    if offs is None or group is None:
        s = scale_of(torch.nn.functional.pad(padded, (0, 0, 0, 1)).abs().amax(0))
        q = cast(padded, s)
    else:
        # Row E collects the places without a token.
        amax = padded.new_zeros(offs.shape[0] + 1, x.shape[1])
        index = group.unsqueeze(-1).expand_as(padded)
        s = scale_of(amax.scatter_reduce(0, index, padded.abs(), "amax"))
        q, s = cast(padded, s[group]), s[:-1]
    return zero_padding(q.t().contiguous(), x.shape[0], offs, group), s.contiguous()


def quantize_row_col_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both of the above for x (M, K): q (M, K), s (M,), q (K, Mt), s (K,) or (E, K)."""
    return (*quantize_row(x), *quantize_col_t(x, offs, aligned))


def quantize_weight_col_t(w: Tensor) -> tuple[Tensor, Tensor]:
    """One scale per column of w (..., N, K), written transposed: q (..., K, N), s (..., K)."""
    return quantize_row(w.mT.contiguous())


def transpose_fp8(q: Tensor) -> Tensor:
    """q (..., R, C), transposed and contiguous: (..., C, R)."""
    return q.mT.contiguous()


# Dequantizers: not ops, but what the GEMMs below and the tests mean by q · s


def dequantize_1x128(q: Tensor, s: Tensor) -> Tensor:
    """q (M, K) · s (M, ⌈K/128⌉) in FP32."""
    return q.float() * s.repeat_interleave(BLOCK, -1)[:, : q.shape[1]]


def dequantize_128x128(q: Tensor, s: Tensor) -> Tensor:
    """q (..., N, K) · s (..., ⌈N/128⌉, ⌈K/128⌉) in FP32."""
    s = s.repeat_interleave(BLOCK, -2)[..., : q.shape[-2], :]
    return q.float() * s.repeat_interleave(BLOCK, -1)[..., : q.shape[-1]]


def dequantize_row(q: Tensor, s: Tensor) -> Tensor:
    """q (..., R, C) · s (..., R) in FP32."""
    return q.float() * s.unsqueeze(-1)


# GEMMs


@contextlib.contextmanager
def full_fp32(device: torch.device) -> Iterator[None]:
    """FP32 products stay FP32: no autocast, no TF32."""
    # Backend by backend: torch.backends.fp32_precision cannot be read or restored if they differ.
    mkldnn: Any = torch.backends.mkldnn
    backends = torch.backends.cuda.matmul, mkldnn.matmul
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before):
            backend.fp32_precision = precision


def matmul_nt(a: Tensor, b: Tensor, offs: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a (M, K) by b (N, K), or each group's rows by its own b of (E, N, K), all FP32; (M, N)."""
    with full_fp32(a.device):
        if offs is None:
            return (a @ b.mT).to(out_dtype)
        y = a.new_zeros(a.shape[0], b.shape[-2])
        starts, ends = group_bounds(offs, a.shape[0])
        for e, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            y[start:end] = a[start:end] @ b[e].mT
        return y.to(out_dtype)


def matmul_tokens(
    groups: list[tuple[Tensor, Tensor]], offs: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """a (N, tokens) by b (K, tokens) of each group, FP32; (N, K), with `offs` (E, N, K)."""
    with full_fp32(groups[0][0].device):
        products = [(a @ b.mT).to(out_dtype) for a, b in groups]
    return products[0] if offs is None else torch.stack(products)


def blockwise_mm(
    a: Tensor, sa: Tensor, b: Tensor, sb: Tensor,
    offs: Tensor | None = None, aligned: bool = False, out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """fprop and dgrad, 1x128 by 128x128: a (M, K), b (N, K), with groups (E, N, K); (M, N)."""
    return matmul_nt(dequantize_1x128(a, sa), dequantize_128x128(b, sb), offs, out_dtype)


def blockwise_mm_pair(
    a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, a2: Tensor, sa2: Tensor, b2: Tensor, sb2: Tensor,
    offs: Tensor | None = None, aligned: bool = False, out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """The sum of two `blockwise_mm` of the same shapes, added in FP32 and rounded once."""
    layout = offs, aligned, torch.float32
    return (blockwise_mm(a, sa, b, sb, *layout) + blockwise_mm(a2, sa2, b2, sb2, *layout)).to(
        out_dtype
    )


def blockwise_wgrad(
    a: Tensor, sa: Tensor, b: Tensor, sb: Tensor,
    offs: Tensor | None = None, aligned: bool = False, out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """wgrad, 1x128 by 1x128 along tokens: a (N, Mt), b (K, Mt); (N, K), with groups (E, N, K)."""
    left, right = dequantize_1x128(a, sa), dequantize_1x128(b, sb)
    columns = column_slices(a, offs, aligned)
    return matmul_tokens([(left[:, c], right[:, c]) for c in columns], offs, out_dtype)


def rowwise_mm(
    a: Tensor, sa: Tensor, b: Tensor, sb: Tensor,
    offs: Tensor | None = None, aligned: bool = False, out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """fprop and dgrad, a scale for each row of a (M, K) and b (N, K) or (E, N, K); (M, N)."""
    return matmul_nt(dequantize_row(a, sa), dequantize_row(b, sb), offs, out_dtype)


def rowwise_wgrad(
    a: Tensor, sa: Tensor, b: Tensor, sb: Tensor,
    offs: Tensor | None = None, aligned: bool = False, out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """wgrad, a scale for each row and group of a (N, Mt) and b (K, Mt); (N, K) or (E, N, K)."""
    groups = []
    for e, c in enumerate(column_slices(a, offs, aligned)):
        left, right = (sa, sb) if offs is None else (sa[e], sb[e])
        groups.append((dequantize_row(a[:, c], left), dequantize_row(b[:, c], right)))
    return matmul_tokens(groups, offs, out_dtype)


def bf16_wgrad(
    g: Tensor, x: Tensor,
    offs: Tensor | None = None, aligned: bool = False, out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """wgrad of `rowwise_with_gw_hp`: gᵀ x of bf16 g (M, N) and x (M, K); (N, K) or (E, N, K)."""
    left, right = g.float().t(), x.float().t()
    rows = [slice(None)]
    if offs is not None:
        bounds = group_bounds(offs, g.shape[0])
        rows = [slice(*b) for b in zip(*(t.tolist() for t in bounds), strict=True)]
    return matmul_tokens([(left[:, r], right[:, r]) for r in rows], offs, out_dtype)


# Permutation


def _inside(places: Tensor, size: int) -> Tensor:
    return (places >= 0) & (places < size)


def gather_rows(x: Tensor, slots: Tensor, weight: Tensor | None = None, k: int = 1) -> Tensor:
    """Row ⌊slots[r] / k⌋ of x (M, K) for each r, times its slot's weight: (R, K) in x's dtype.

    slots (R,) integers, zeros where x has no such row; weight (M, k) FP32 or None.
    """
    inside = _inside(slots, x.shape[0] * k)
    slots = torch.where(inside, slots, 0)
    rows = torch.nn.functional.pad(x, (0, 0, 0, 1))  # Even an empty x then has a row 0.
    rows = torch.where(inside[:, None], rows[slots // k], 0)
    if weight is None:
        return rows
    weight = torch.nn.functional.pad(weight.flatten(), (0, 1))[slots]
    weight = torch.where(inside, weight, 0)
    return (weight[:, None] * rows.float()).to(x.dtype)


def combine_rows(y: Tensor, index: Tensor, weight: Tensor | None = None) -> Tensor:
    """The sum over i of row index[t, i] of y (M, K), times weight[t, i]: (T, K) in y's dtype.

    index (T, k) integers, -1 for none; weight (T, k) FP32 or None. Summed in FP32, rounded once.
    """
    rows = gather_rows(y, index.flatten()).float().view(*index.shape, y.shape[1])
    if weight is None:
        return rows.sum(1).to(y.dtype)
    weight = torch.where(_inside(index, len(y)), weight, 0)
    with full_fp32(y.device):
        return torch.bmm(weight[:, None], rows).squeeze(1).to(y.dtype)


def dot_rows(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    """The dot product of row t of a (T, K) and row index[t, i] of b (M, K): (T, k) FP32.

    index (T, k) integers; 0 where b has no such row.
    """
    rows = gather_rows(b, index.flatten()).float().view(*index.shape, b.shape[1])
    with full_fp32(a.device):
        products = torch.bmm(a.float()[:, None], rows.mT).squeeze(1)
    return torch.where(_inside(index, len(b)), products, 0)


def invert_index(index: Tensor, count: int) -> Tensor:
    """The position in `index`, distinct int64, of each number below `count`; -1 where missing."""
    positions = torch.arange(len(index), device=index.device)
    inverse = index.new_empty(count) if len(index) == count else index.new_full((count,), -1)
    return inverse.scatter_(0, index, positions)


def places_of_tokens(
    counts: Tensor, experts: int, ranks: int, tokens: int, length: int, alignment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The permutation that sorts tokens by expert and pads each expert's to `alignment`.

    counts (ranks · experts,) integers: the tokens from each rank for each expert, rank first, in
    the order of the tokens; `tokens` is their sum. Returns, all int32, the token at each place
    (length,), -1 for padding; the place of each token (tokens,); the padded size of each expert
    (experts,).
    """
    counts = counts.long().view(ranks, experts)
    # An expert without tokens gets one block of padding, as in torchtitan.
    sizes = (counts.sum(0) + alignment - 1).div(alignment, rounding_mode="floor").clamp(min=1)
    sizes = sizes * alignment
    # Segments of one rank and expert: where they begin among the tokens and among the places.
    first_token = counts.flatten().cumsum(0) - counts.flatten()
    first_place = (sizes.cumsum(0) - sizes) + (counts.cumsum(0) - counts)
    token = torch.arange(tokens, device=counts.device)
    segment = torch.searchsorted(first_token, token, right=True) - 1
    place = first_place.flatten()[segment] + token - first_token[segment]
    token_of_place = torch.full((length,), -1, device=counts.device).scatter_(0, place, token)
    return token_of_place.int(), place.int(), sizes.int()


def gather_1x128_128x1_t(
    q: Tensor,
    s: Tensor,
    index: Tensor,
    offs: Tensor,
    weight: Tensor | None = None,
    k: int = 1,
    *,
    scale_fmt: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row ⌊index[c] / k⌋ of q (R, K) and s (R, ⌈K/128⌉) for each c, as GEMMs of groups read them.

    index (C,) int32, C and all ends `offs` multiples of 128; a row of zeros where q has no such
    row. weight (C,) FP32 multiplies the scales of the rows.

    Returns:
        The rows' q (C, K) and s (C, ⌈K/128⌉); then q (K, C) and s (K, C/128) of their columns,
        which are quantized again: `quantize_128x1_t` of the FP32 products q · s.
    """
    inside = _inside(index, q.shape[0] * k)
    source = torch.where(inside, index // k, q.shape[0])  # a row of zeros that is appended
    q = torch.nn.functional.pad(q.view(torch.uint8), (0, 0, 0, 1))[source].view(q.dtype)
    s = torch.cat((s, scale_of(s.new_zeros(1, s.shape[1]), scale_fmt)))[source]
    if weight is not None:
        s = torch.where(inside[:, None], s * weight[:, None], s)
    columns = quantize_128x1_t(dequantize_1x128(q, s), offs, True, scale_fmt=scale_fmt)
    return q, to_layout_1x128(s), *columns
