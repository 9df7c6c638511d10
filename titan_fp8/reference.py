"""Every op in plain PyTorch: the definition of the numerics, the CPU path and the emulation.

Quantising. A block of elements shares one scale, s = max(amax, 1e-12) / 448, kept in FP32, and
x ≈ q · s with q = e4m3(x · (1 / s)), rounded to nearest even. Every operation is a single FP32 one,
correctly rounded, so the result is the same to the bit on any machine: the GPU kernels are held to
it. A NaN makes its block's scale NaN and an Inf makes it Inf, so that all of the block dequantises
to a non-finite value and none of it to a number.

Layouts. Every GEMM is NT: the contracted dimension is last and contiguous in both operands, the
only form that Hopper's FP8 tensor cores take. Activations and gradients (M tokens by K channels)
are contracted along both dimensions, hence the two layouts of one tensor:

    rows         q (M, K), as the tensor itself; scales along K
    columns _t   q (K, Mt), transposed; scales along the tokens

In the transposed copy each group of tokens (an expert's) starts at a multiple of 128, so that no
block holds tokens of two experts, and what no token fills is zero. When the caller knows the groups
to be aligned already (`aligned=True`), or when there is just one (`offs=None`), token m stands in
column m and Mt is M rounded up to 128 (rowwise without groups: to 16); otherwise
Mt = ⌊(M + 127E) / 128⌋ · 128, which is enough for any E groups and needs no look at their sizes.

Scales. 1x128 scales are (rows, blocks), stride 1 along the rows, whose count is padded to a
multiple of 4 in memory (TMA wants strides of 16 bytes; cuBLAS the same order). 128x128 scales are
(..., row blocks, column blocks), stride 1 along the columns, padded to a multiple of 4 likewise.

Groups. `offs` (E,) int32 holds the group ends, non-decreasing; an end beyond M means M. Tokens
behind the last end belong to no group: their outputs are zero and nothing depends on their values.

GEMMs multiply the dequantised operands in FP32 and round once, to `out_dtype`. The products of
real tensor cores differ from that in summation order alone.
"""

import contextlib

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
AMAX_MIN = 1e-12
BLOCK = 128
"""Elements that share a scale along a dimension; the token alignment of groups."""
ROW_ALIGNMENT = 16
"""Token alignment of the rowwise recipe without groups: 16 bytes of FP8."""


def cdiv(a: int, b: int) -> int:
    return (a + b - 1) // b


def round_up(a: int, b: int) -> int:
    return cdiv(a, b) * b


def transposed_width(m: int, offs: Tensor | None, aligned: bool, alignment: int) -> int:
    """Mt, the token columns of a transposed copy of M tokens (see the top of this file).

    `alignment` is that of a copy without groups: BLOCK or ROW_ALIGNMENT.
    """
    if offs is None:
        return round_up(m, alignment)
    return round_up(m, BLOCK) if aligned else (m + (BLOCK - 1) * offs.shape[0]) // BLOCK * BLOCK


def scale_of(amax: Tensor) -> Tensor:
    """The scale of blocks with these FP32 absolute maxima; same shape."""
    # A tensor as divisor: dividing by a Python number, CUDA multiplies by its reciprocal.
    return amax.clamp(min=AMAX_MIN) / torch.full_like(amax, E4M3_MAX)


def cast(x: Tensor, s: Tensor) -> Tensor:
    """e4m3(x · (1 / s)); x FP32 and s broadcastable to it."""
    return (x * (torch.ones_like(s) / s)).to(E4M3)


def group_bounds(offs: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """First row and end row (E,) of each group, within [0, m] whatever `offs` holds."""
    ends = offs.long().clamp(0, m).cummax(0).values
    return torch.cat([ends.new_zeros(1), ends[:-1]]), ends


def column_starts(starts: Tensor, ends: Tensor, aligned: bool) -> Tensor:
    """First column (E,) of each group in a transposed copy."""
    if aligned:
        return starts
    widths = (ends - starts + BLOCK - 1) // BLOCK * BLOCK
    return widths.cumsum(0) - widths


def lay_out(
    x_MK: Tensor, offs: Tensor | None, aligned: bool, alignment: int
) -> tuple[Tensor, Tensor | None]:
    """The tokens where a transposed copy has them, untransposed, zeros where none stands.

    Returns x (Mt, K) and, with groups, the group of each of the Mt places (E where none stands).
    """
    m = x_MK.shape[0]
    width = transposed_width(m, offs, aligned, alignment)
    if offs is None:
        return torch.nn.functional.pad(x_MK, (0, 0, 0, width - m)), None
    starts, ends = group_bounds(offs, m)
    firsts = column_starts(starts, ends, aligned)
    place = torch.arange(width, device=x_MK.device)
    group = torch.searchsorted(firsts, place, right=True) - 1
    row = starts[group] + place - firsts[group]
    filled = row < ends[group]
    if m == 0:
        return x_MK.new_zeros(width, x_MK.shape[1]), torch.full_like(group, offs.shape[0])
    laid = torch.where(filled[:, None], x_MK[row.clamp(max=m - 1)], 0)
    return laid, torch.where(filled, group, offs.shape[0])


def pad_blocks(x: Tensor, *dims: int) -> Tensor:
    """`x` with zeros behind, so that each of `dims` is a multiple of 128."""
    padding = [0] * (2 * x.dim())
    for dim in dims:
        padding[2 * (-1 - dim) + 1] = -x.shape[dim] % BLOCK
    return torch.nn.functional.pad(x, padding)


def stride_1_along_rows(s: Tensor) -> Tensor:
    """A (rows, blocks) scale in the layout of 1x128 scales."""
    rows, blocks = s.shape
    storage = s.new_zeros(blocks, round_up(rows, 4))
    storage[:, :rows] = s.t()
    return storage[:, :rows].t()


def padded_columns(s: Tensor) -> Tensor:
    """A (..., row blocks, column blocks) scale in the layout of 128x128 scales."""
    storage = s.new_zeros(*s.shape[:-1], round_up(s.shape[-1], 4))
    storage[..., : s.shape[-1]] = s
    return storage[..., : s.shape[-1]]


# Blockwise quantisers


def quantize_1x128(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises x (M, K) in blocks of 1x128: q (M, K), s (M, ⌈K/128⌉). The last may be short."""
    m, k = x.shape
    blocks = pad_blocks(x.float(), -1).reshape(m, cdiv(k, BLOCK), BLOCK)
    s = scale_of(blocks.abs().amax(-1))
    q = cast(blocks, s.unsqueeze(-1)).view(m, round_up(k, BLOCK))[:, :k]
    return q.contiguous(), stride_1_along_rows(s)


def quantize_128x1_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantises x (M, K) in blocks of 128x1, written transposed: q (K, Mt), s (K, Mt/128)."""
    laid, group = lay_out(x, offs, aligned, BLOCK)
    q, s = quantize_1x128(laid.t())
    return zero_unfilled(q, x.shape[0], offs, group), s


def quantize_1x128_128x1_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both of the above: q (M, K), s (M, ⌈K/128⌉), q (K, Mt), s (K, Mt/128)."""
    return (*quantize_1x128(x), *quantize_128x1_t(x, offs, aligned))


def quantize_128x128(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises w (..., N, K) in tiles of 128x128: q (..., N, K), s (..., ⌈N/128⌉, ⌈K/128⌉)."""
    *lead, n, k = w.shape
    tiles = pad_blocks(w.float(), -2, -1)
    tiles = tiles.reshape(*lead, cdiv(n, BLOCK), BLOCK, cdiv(k, BLOCK), BLOCK)
    s = scale_of(tiles.abs().amax((-3, -1)))
    q = cast(tiles, s[..., :, None, :, None])
    q = q.view(*lead, round_up(n, BLOCK), round_up(k, BLOCK))[..., :n, :k]
    return q.contiguous(), padded_columns(s)


def quantize_128x128_t(w: Tensor) -> tuple[Tensor, Tensor]:
    """The same tiles, written transposed: q (..., K, N), s (..., ⌈K/128⌉, ⌈N/128⌉)."""
    q, s = quantize_128x128(w)
    return q.mT.contiguous(), padded_columns(s.mT)


# SwiGLU and its gradient, quantised: what lies between the GEMMs of a feed-forward


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


def swiglu_1x128(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_1x128` of h = silu(a) · b for a, b (M, H): q (M, H), s (M, ⌈H/128⌉)."""
    return quantize_1x128(swiglu(a, b))


def swiglu_backward_1x128_128x1_t(
    dh: Tensor, a: Tensor, b: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """What backward reads of a SwiGLU of a, b (M, H), given dh (M, H).

    `quantize_1x128_128x1_t` of da (4 tensors) and of db (4), `quantize_128x1_t` of h (2).
    """
    da, db = swiglu_backward(dh, a, b)
    return (
        *quantize_1x128_128x1_t(da, offs, aligned),
        *quantize_1x128_128x1_t(db, offs, aligned),
        *quantize_128x1_t(swiglu(a, b), offs, aligned),
    )


# Rowwise quantisers


def quantize_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises x (..., R, C) with one scale a row: q (..., R, C), s (..., R)."""
    x = x.float()
    s = scale_of(x.abs().amax(-1))
    return cast(x, s.unsqueeze(-1)), s


def quantize_col_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantises x (M, K) with one scale a column and group, written transposed.

    q (K, Mt); s (K,), with groups (E, K). A group without tokens has the scale of zeros.
    """
    laid, group = lay_out(x.float(), offs, aligned, ROW_ALIGNMENT)
    if offs is None:
        s = scale_of(torch.nn.functional.pad(laid, (0, 0, 0, 1)).abs().amax(0))
        q = cast(laid, s)
    else:
        # One row more than groups: the places where no token stands.
        amax = laid.new_zeros(offs.shape[0] + 1, x.shape[1])
        index = group.unsqueeze(-1).expand_as(laid)
        s = scale_of(amax.scatter_reduce(0, index, laid.abs(), "amax"))
        q, s = cast(laid, s[group]), s[:-1]
    return zero_unfilled(q.t().contiguous(), x.shape[0], offs, group), s.contiguous()


def quantize_row_col_t(
    x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both of the above for x (M, K): q (M, K), s (M,), q (K, Mt), s (K,) or (E, K)."""
    return (*quantize_row(x), *quantize_col_t(x, offs, aligned))


def quantize_row_col_t_pair(
    g: Tensor, x: Tensor, offs: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows and columns of g (M, N), and columns of x (M, K): what dgrad and wgrad read."""
    return (*quantize_row_col_t(g, offs, aligned), *quantize_col_t(x, offs, aligned))


def quantize_weight_col_t(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises w (..., N, K) with one scale a column, transposed: q (..., K, N), s (..., K)."""
    return quantize_row(w.mT.contiguous())


def zero_unfilled(q_KM: Tensor, m: int, offs: Tensor | None, group: Tensor | None) -> Tensor:
    """Zeros in the columns of a transposed copy where no token stands, beside a NaN scale too."""
    if offs is None:
        unfilled = torch.arange(q_KM.shape[1], device=q_KM.device) >= m
    else:
        unfilled = group == offs.shape[0]
    # Through the bytes: few ops take FP8.
    return q_KM.view(torch.uint8).masked_fill(unfilled, 0).view(E4M3)


# Dequantisers: not ops, but what the GEMMs below and the tests mean by q · s


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
def full_fp32(device: torch.device):
    """FP32 products stay FP32: no autocast, no TF32."""
    # The one setting for all backends can be neither read nor put back once they differ.
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
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
    """a (M, K) times b (N, K) or each group of rows times its b (E, N, K); FP32 in, (M, N) out."""
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
    """a (N, tokens) times b (K, tokens) for each group, FP32 in; (N, K), with groups (E, N, K)."""
    with full_fp32(groups[0][0].device):
        products = [(a @ b.mT).to(out_dtype) for a, b in groups]
    return products[0] if offs is None else torch.stack(products)


def column_slices(q_KM: Tensor, offs: Tensor | None, aligned: bool) -> list[slice]:
    """The columns of each group in a transposed copy.

    A copy knows its width alone, not M; clamping the ends to the width is the same, for the
    columns between M and the width hold no token.
    """
    width = q_KM.shape[1]
    if offs is None:
        return [slice(0, width)]
    starts, ends = group_bounds(offs, width)
    firsts = column_starts(starts, ends, aligned)
    sizes = (ends - starts).tolist()
    return [
        slice(first, min(first + round_up(size, BLOCK), width))
        for first, size in zip(firsts.tolist(), sizes, strict=True)
    ]


def blockwise_mm(
    a: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """fprop and dgrad, 1x128 by 128x128: a (M, K), b (N, K), with groups (E, N, K); (M, N)."""
    return matmul_nt(dequantize_1x128(a, sa), dequantize_128x128(b, sb), offs, out_dtype)


def blockwise_fprop(
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a Wᵀ for a (M, K) and W (N, K) or (E, N, K), quantised in tiles of 128x128; (M, N)."""
    return blockwise_mm(a, sa, *quantize_128x128(w.contiguous()), offs, aligned, out_dtype)


def blockwise_dgrad(
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a W for a (M, N) and W (N, K) or (E, N, K), quantised in tiles of 128x128; (M, K)."""
    return blockwise_mm(a, sa, *quantize_128x128_t(w.contiguous()), offs, aligned, out_dtype)


def blockwise_dgrad_pair(
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    a2: Tensor,
    sa2: Tensor,
    w2: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a W + a2 W2, for operands as in `blockwise_dgrad`, added in FP32; (M, K)."""
    layout = offs, aligned, torch.float32
    dx = blockwise_dgrad(a, sa, w, *layout) + blockwise_dgrad(a2, sa2, w2, *layout)
    return dx.to(out_dtype)


def blockwise_wgrad(
    a: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """wgrad, 1x128 by 1x128 along tokens: a (N, Mt), b (K, Mt); (N, K), with groups (E, N, K)."""
    left, right = dequantize_1x128(a, sa), dequantize_1x128(b, sb)
    columns = column_slices(a, offs, aligned)
    return matmul_tokens([(left[:, c], right[:, c]) for c in columns], offs, out_dtype)


def rowwise_mm(
    a: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """fprop and dgrad, a scale for each row of a (M, K) and b (N, K) or (E, N, K); (M, N)."""
    return matmul_nt(dequantize_row(a, sa), dequantize_row(b, sb), offs, out_dtype)


def rowwise_fprop(
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a Wᵀ for a (M, K) and W (N, K) or (E, N, K), quantised with a scale a row; (M, N)."""
    return rowwise_mm(a, sa, *quantize_row(w.contiguous()), offs, aligned, out_dtype)


def rowwise_dgrad(
    a: Tensor,
    sa: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a W for a (M, N) and W (N, K) or (E, N, K), quantised with a scale a column; (M, K)."""
    return rowwise_mm(a, sa, *quantize_weight_col_t(w.contiguous()), offs, aligned, out_dtype)


def rowwise_wgrad(
    a: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """wgrad, a scale for each row and group of a (N, Mt) and b (K, Mt); (N, K) or (E, N, K)."""
    groups = []
    for e, c in enumerate(column_slices(a, offs, aligned)):
        left, right = (sa, sb) if offs is None else (sa[e], sb[e])
        groups.append((dequantize_row(a[:, c], left), dequantize_row(b[:, c], right)))
    return matmul_tokens(groups, offs, out_dtype)


def bf16_wgrad(
    g: Tensor,
    x: Tensor,
    offs: Tensor | None = None,
    aligned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
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
    """The row of x (M, K) that has each of the slots, k slots a row, times the slot's weight.

    slots (R,) integers: slot s is of row ⌊s/k⌋, zeros where x has no such row; weight (M, k) FP32,
    if given. Returns (R, K) in x's dtype.
    """
    inside = _inside(slots, x.shape[0] * k)
    slots = torch.where(inside, slots, 0)
    rows = torch.nn.functional.pad(x, (0, 0, 0, 1))  # so that there is a row to take
    rows = torch.where(inside[:, None], rows[slots // k], 0)
    if weight is None:
        return rows
    weight = torch.nn.functional.pad(weight.flatten(), (0, 1))[slots]
    weight = torch.where(inside, weight, 0)
    return (weight[:, None] * rows.float()).to(x.dtype)


def combine_rows(y: Tensor, index: Tensor, weight: Tensor | None = None) -> Tensor:
    """The sum of the rows index[t] of y (M, K), each times its weight if given, in FP32.

    index (T, k) integers, -1 for none, weight (T, k) FP32; (T, K), rounded once to y's dtype.
    """
    rows = gather_rows(y, index.flatten()).float().view(*index.shape, y.shape[1])
    if weight is None:
        return rows.sum(1).to(y.dtype)
    weight = torch.where(_inside(index, len(y)), weight, 0)
    with full_fp32(y.device):
        return torch.bmm(weight[:, None], rows).squeeze(1).to(y.dtype)


def dot_rows(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    """Row t of a (T, K) times row index[t, i] of b (M, K), summed in FP32, 0 where b has none.

    index (T, k) integers; (T, k) FP32.
    """
    rows = gather_rows(b, index.flatten()).float().view(*index.shape, b.shape[1])
    with full_fp32(a.device):
        products = torch.bmm(a.float()[:, None], rows.mT).squeeze(1)
    return torch.where(_inside(index, len(b)), products, 0)
