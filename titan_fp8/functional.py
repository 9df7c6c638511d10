"""The autograd functions: a matrix product whose three GEMMs run in FP8.

    fp8_linear       x (..., K), w (N, K)                  y = x Wᵀ + b
    fp8_grouped_mm   x (M, K), w (E, N, K), offs (E,)      each group of rows with its own W

Both are one autograd function; the dense product is the case of one group. Forward quantises x in
both layouts out of one read and keeps the transposed FP8 copy, which is what wgrad contracts, in
place of x. Products that share an input, as wq, wk and wv do, share these copies: torch.compile
merges the equal calls, and without it an `InputCache` remembers them while the input lives. The
three GEMMs are functions of their own, of which `feed_forward.py` makes another autograd function.

W is quantised by the op that multiplies by it, anew in backward, from the parameter as it is then:
no FP8 copy of a weight outlives its GEMM, whether FSDP2 has freed the parameter in between or
torch.compile looks for what to keep.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from titan_fp8.ops import DTYPES
from titan_fp8.recipe import Scaling, get_recipe

_ops = torch.ops.titan_fp8


def differentiable_once(backward: Callable) -> Callable:
    """PyTorch's `once_differentiable`, which for gradients that need none gives wrong second ones
    without a word; here asking for a graph of backward is an error."""
    once = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Tensor):
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                raise RuntimeError("titan_fp8 has no second derivatives: create_graph=True")
            InputCache.backwards += 1
        return once(ctx, *gradients)

    return checked


@dataclass(frozen=True)
class _Kit:
    """The ops of one way of scaling fprop and dgrad, and of the wgrad that goes with it.

    `pair` does for g what `rows_and_columns` does and for x what `columns` does.
    """

    rows: OpOverload
    columns: OpOverload
    rows_and_columns: OpOverload
    pair: OpOverload | None
    fprop: OpOverload
    dgrad: OpOverload
    wgrad: OpOverload


_KITS = {
    Scaling.BLOCK_1X128: _Kit(
        rows=_ops.quantize_1x128.default,
        columns=_ops.quantize_128x1_t.default,
        rows_and_columns=_ops.quantize_1x128_128x1_t.default,
        pair=None,
        fprop=_ops.blockwise_fprop.default,
        dgrad=_ops.blockwise_dgrad.default,
        wgrad=_ops.blockwise_wgrad.default,
    ),
    Scaling.ROW: _Kit(
        rows=_ops.quantize_row.default,
        columns=_ops.quantize_col_t.default,
        rows_and_columns=_ops.quantize_row_col_t.default,
        pair=_ops.quantize_row_col_t_pair.default,
        fprop=_ops.rowwise_fprop.default,
        dgrad=_ops.rowwise_dgrad.default,
        wgrad=_ops.rowwise_wgrad.default,
    ),
}


class Spec(NamedTuple):
    """What a product needs to know besides its tensors; constants to torch.compile."""

    recipe: str
    emulate: bool
    aligned: bool
    dtype: torch.dtype

    @property
    def kit(self) -> _Kit:
        return _KITS[get_recipe(self.recipe).fprop.left]

    @property
    def wgrad_in_bf16(self) -> bool:
        return get_recipe(self.recipe).wgrad.left is Scaling.NONE


class InputCache:
    """The quantised copies of one input, for all products that are given this cache and that input.

    It knows its input by identity and version and forgets it when the input dies, so that it keeps
    nothing alive, or when a backward pass runs, for not all that writes to a buffer of the next
    step counts as a version (a collective does not). torch.compile needs no cache: it merges equal
    calls.
    """

    backwards = 0
    """How many backward functions have run."""

    def __init__(self) -> None:
        # One tuple, replaced whole: backward recomputes checkpointed layers in another thread.
        self._entry: tuple[weakref.ref, tuple, tuple[Tensor | None, ...]] | None = None

    def get(self, x: Tensor, key: tuple) -> tuple[Tensor, ...] | None:
        entry = self._entry
        if entry is None or entry[0]() is not x or entry[1] != (InputCache.backwards, key):
            return None
        with torch.no_grad():
            x_MK = x.reshape(-1, x.shape[-1])
        return tuple(x_MK if copy is None else copy for copy in entry[2])

    def put(self, x: Tensor, key: tuple, copies: tuple[Tensor, ...]) -> None:
        # A view of x, which is x itself for wgrad in bf16, would keep it alive.
        own = x.untyped_storage()._cdata
        made = (None if copy.untyped_storage()._cdata == own else copy for copy in copies)
        self._entry = (weakref.ref(x, self._drop), (InputCache.backwards, key), tuple(made))

    def _drop(self, dead: weakref.ref) -> None:
        if self._entry and self._entry[0] is dead:
            self._entry = None


def _kept_by_attention(x: Tensor, spec: Spec) -> bool:
    """Whether x is attention's output, which attention keeps for its own backward.

    Then x costs nothing to keep and an FP8 copy would; backward makes that copy when it needs it.
    """
    if torch.compiler.is_compiling() or x.dtype != spec.dtype or not x._is_view():
        return False
    producer = x._base.grad_fn
    return producer is not None and "Attention" in producer.name()


@torch.no_grad()
def _quantize_input(
    x: Tensor, offs: Tensor | None, for_wgrad: bool, spec: Spec
) -> tuple[Tensor, ...]:
    """q and s of the rows of x (..., K); for wgrad also those of its columns, or x itself."""
    kit, x_MK = spec.kit, x.reshape(-1, x.shape[-1]).to(spec.dtype)
    if not for_wgrad:
        return kit.rows(x_MK, emulate=spec.emulate)
    if spec.wgrad_in_bf16:
        return (*kit.rows(x_MK, emulate=spec.emulate), x_MK.bfloat16())
    if _kept_by_attention(x, spec):
        return (*kit.rows(x_MK, emulate=spec.emulate), x_MK)
    return kit.rows_and_columns(x_MK, offs, spec.aligned, emulate=spec.emulate)


def fprop(x_rows: tuple[Tensor, ...], w: Tensor, offs: Tensor | None, spec: Spec) -> Tensor:
    """y (M, N) = x Wᵀ: the rows of x (M, K) and W (N, K) or (E, N, K), contracting K."""
    w, layout = w.to(spec.dtype), (offs, spec.aligned)
    return spec.kit.fprop(*x_rows, w, *layout, spec.dtype, emulate=spec.emulate)


def dgrad(
    g_rows: tuple[Tensor, ...],
    w: Tensor,
    offs: Tensor | None,
    spec: Spec,
    out_dtype: torch.dtype,
) -> Tensor:
    """dx (M, K) = g W: the rows of g (M, N) and W (N, K) or (E, N, K), contracting N."""
    w, layout = w.to(spec.dtype), (offs, spec.aligned)
    return spec.kit.dgrad(*g_rows, w, *layout, out_dtype, emulate=spec.emulate)


def wgrad(
    g_columns: tuple[Tensor, ...],
    x_columns: tuple[Tensor, ...],
    offs: Tensor | None,
    spec: Spec,
    out_dtype: torch.dtype,
) -> Tensor:
    """dW (N, K) or (E, N, K) = gᵀ x: gᵀ (N, Mt) and xᵀ (K, Mt), contracting the tokens.

    In bf16 g and x come as they are, (M, N) and (M, K).
    """
    product = _ops.bf16_wgrad.default if spec.wgrad_in_bf16 else spec.kit.wgrad
    layout = offs, spec.aligned
    return product(*g_columns, *x_columns, *layout, out_dtype, emulate=spec.emulate)


class _FP8Product(torch.autograd.Function):
    """y (M, N) of x (M, K) and w (N, K), or of x, w (E, N, K) and the group ends offs (E,).

    Of x, forward reads the copies alone that `_quantize_input` has made.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        w: Tensor,
        bias: Tensor | None,
        offs: Tensor | None,
        spec: Spec,
        xq: Tensor,
        sx: Tensor,
        *for_wgrad: Tensor,
    ) -> Tensor:
        y_MN = fprop((xq, sx), w, offs, spec)
        ctx.save_for_backward(w, offs, *for_wgrad)
        ctx.spec, ctx.x_dtype = spec, x_MK.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y_MN if bias is None else y_MN + bias.to(spec.dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g_MN: Tensor):
        w, offs, *for_wgrad = ctx.saved_tensors
        spec = ctx.spec
        needs_dx, needs_dw, needs_db, *others = ctx.needs_input_grad
        layout, emulate = (offs, spec.aligned), spec.emulate
        x_kept = needs_dw and len(for_wgrad) == 1 and not spec.wgrad_in_bf16
        if x_kept and needs_dx and spec.kit.pair:
            copies = spec.kit.pair(g_MN, *for_wgrad, *layout, emulate=emulate)
            rows, columns, for_wgrad = copies[:2], copies[2:4], copies[4:]
        else:
            rows, columns = quantize_gradient(g_MN, offs, needs_dx, needs_dw, spec)
            if x_kept:
                for_wgrad = spec.kit.columns(*for_wgrad, *layout, emulate=emulate)
        dx_MK = dw = db = None
        if needs_dx:
            dx_MK = dgrad(rows, w, offs, spec, ctx.x_dtype)
        if needs_dw:
            dw = wgrad(columns, for_wgrad, offs, spec, w.dtype)
        if needs_db:
            db = g_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx_MK, dw, db, *(None for _ in others)


def quantize_gradient(
    g_MN: Tensor, offs: Tensor | None, for_dgrad: bool, for_wgrad: bool, spec: Spec
) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
    """What dgrad reads of g and what wgrad does; None for either if it is not to run."""
    kit, layout, emulate = spec.kit, (offs, spec.aligned), spec.emulate
    if for_wgrad and spec.wgrad_in_bf16:
        return (kit.rows(g_MN, emulate=emulate) if for_dgrad else None), (g_MN.bfloat16(),)
    if for_dgrad and for_wgrad:
        q, s, q_t, s_t = kit.rows_and_columns(g_MN, *layout, emulate=emulate)
        return (q, s), (q_t, s_t)
    if for_dgrad:
        return kit.rows(g_MN, emulate=emulate), None
    return None, kit.columns(g_MN, *layout, emulate=emulate) if for_wgrad else None


def _tells_of_changes(x: Tensor) -> bool:
    """Whether x counts a version more whenever it is written to, as far as one can tell.

    Inputs without gradients may be a buffer of somebody's, FSDP2 and others write to parameters
    through `data`, and tensors of inference count none.
    """
    return x.requires_grad and not isinstance(x, torch.nn.Parameter) and not x.is_inference()


def _is_captured(x: Tensor) -> bool:
    """Whether a CUDA graph is being made: it must not read memory that it does not own."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    offs: Tensor | None,
    spec: Spec,
    cache: InputCache | None,
) -> Tensor:
    """The autograd function on x (..., K); (M, N)."""
    for_wgrad = w.requires_grad and torch.is_grad_enabled()
    copies = None
    if torch.compiler.is_compiling() or not _tells_of_changes(x) or _is_captured(x):
        cache = None
    if cache is not None:
        key = (x._version, x.shape, for_wgrad, spec)
        copies = cache.get(x, key)
    if copies is None:
        copies = _quantize_input(x, offs, for_wgrad, spec)
        if cache is not None:
            cache.put(x, key, copies)
    return _FP8Product.apply(x.reshape(-1, x.shape[-1]), w, bias, offs, spec, *copies)


def compute_dtype(x: Tensor, **others: Tensor | None) -> torch.dtype:
    """The dtype F.linear would compute in; ValueError where it would not, or where FP8 cannot."""
    tensors = {"x": x, **others}
    dtypes = {name: t.dtype for name, t in tensors.items() if t is not None}
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise ValueError(f"{name} is {dtype}: allowed are torch.bfloat16 and torch.float32")
    device = x.device.type
    # torch.amp.is_autocast_available would know that meta has none, but breaks graphs.
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        if dtype not in DTYPES:
            raise ValueError(f"autocast to {dtype}: allowed are torch.bfloat16 and torch.float32")
        return dtype
    if len(set(dtypes.values())) > 1:
        raise ValueError(f"dtypes differ outside autocast: {dtypes}")
    return x.dtype


def check_bool(key: str, value: object) -> None:
    """ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{key} = {value!r}: allowed are true and false")


def check_devices(x: Tensor, **others: Tensor | None) -> None:
    """ValueError unless all are on x's device; a kernel would read any address it is given."""
    for name, t in others.items():
        if t is not None and t.device != x.device:
            raise ValueError(f"{name} is on {t.device} and x on {x.device}: must be the same")


def check_multiples_of_16(name: str, weight: Tensor) -> None:
    n, k = weight.shape[-2:]
    if n % 16 or k % 16 or not n or not k:
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}: FP8 GEMMs need N = {n} and K = {k} to be "
            "positive multiples of 16"
        )


def checked_offs(offs: Tensor, groups: int) -> Tensor:
    """offs, contiguous, as kernels read it; ValueError unless it suits so many groups."""
    if not groups:
        raise ValueError("weights of 0 groups: at least one is needed")
    if not isinstance(offs, Tensor):
        raise ValueError(f"offs is {offs!r}: allowed is a tensor, torch.int32 of shape ({groups},)")
    if offs.dtype != torch.int32 or offs.shape != (groups,):
        raise ValueError(
            f"offs is {offs.dtype} of shape {tuple(offs.shape)}: "
            f"allowed is torch.int32 of shape ({groups},)"
        )
    return offs.contiguous()


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: str = "blockwise",
    emulate: bool = False,
    cache: InputCache | None = None,
) -> Tensor:
    """`torch.nn.functional.linear` with its three GEMMs in FP8; differentiable.

    Args:
        x: (..., K), bfloat16 or float32, any leading dimensions, none or empty ones too.
        weight: (N, K), N and K multiples of 16; same dtype as x, but under autocast, which casts
            x and weight before they are quantised.
        bias: (N,) or None, added to the product once it has y's dtype.
        recipe: "blockwise" (DeepSeek-V3, arXiv 2412.19437), "rowwise" or "rowwise_with_gw_hp".
        emulate: the same numerics in FP32 arithmetic, on any device. CPU tensors always are.
        cache: an `InputCache` that products of the same x share, to quantise it once. Between two
            of them x may be written to, but not through `x.data`; parameters may be.

    Returns:
        y (..., N) in the dtype of F.linear. Gradients have the dtypes of what they belong to.

    Raises:
        ValueError: a recipe, shape, dtype or device other than these, with its value and what is
            allowed.
        RuntimeError: CUDA tensors on a GPU other than Hopper, without emulate.
    """
    get_recipe(recipe)
    check_bool("emulate", emulate)
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}: "
            "allowed are (..., K) and (N, K)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}: allowed is ({weight.shape[0]},)")
    check_multiples_of_16("weight", weight)
    check_devices(x, weight=weight, bias=bias)
    spec = Spec(recipe, emulate, False, compute_dtype(x, weight=weight, bias=bias))
    y = _product(x, weight, bias, None, spec, cache)
    return y.view(*x.shape[:-1], weight.shape[0])


def fp8_grouped_mm(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    *,
    recipe: str = "blockwise",
    emulate: bool = False,
    aligned: bool = False,
    cache: InputCache | None = None,
) -> Tensor:
    """Each group of rows of x times the transpose of its own weight, in FP8; differentiable.

    Args:
        x: (M, K) tokens, sorted by group, bfloat16 or float32.
        weight: (E, N, K), N and K multiples of 16; dtypes as in `fp8_linear`.
        offs: (E,) int32, the end of each group in rows of x, non-decreasing, on x's device. Rows
            past the last belong to no group: zero in y and in x's gradient, nothing in weight's.
        recipe, emulate, cache: as in `fp8_linear`; products that share a cache share offs.
        aligned: the caller's word that every group end is a multiple of 128, which spares the
            rearrangement of any other groups. It is not checked: on the GPU that would wait for
            the device. The rowwise recipes lose little without.

    Returns:
        y (M, N). Nothing waits for the device, whatever the group sizes.

    Raises:
        ValueError, RuntimeError: as `fp8_linear`; ValueError also for other dtypes of offs.
    """
    get_recipe(recipe)
    check_bool("emulate", emulate)
    check_bool("aligned", aligned)
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}: "
            "allowed are (M, K) and (E, N, K)"
        )
    offs = checked_offs(offs, weight.shape[0])
    check_multiples_of_16("weight", weight)
    check_devices(x, weight=weight, offs=offs)
    spec = Spec(recipe, emulate, aligned, compute_dtype(x, weight=weight))
    return _product(x, weight, None, offs, spec, cache)
