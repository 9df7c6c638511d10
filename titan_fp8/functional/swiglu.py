"""The gated feed-forward, y = W2 (silu(W1 x) · W3 x).

With a blockwise recipe it is one autograd function, around a forward and a backward of `bodies.py`,
and h, da and db exist in FP8 only. Some values are rounded once where separate operations would
round twice: h, da, db, and dx, whose two products are one GEMM. If the recipe has no SwiGLU ops,
three separate products run instead, of which W1 and W3 share the quantized x. Elsewhere layers that
read one input share nothing in eager mode, and torch.compile computes equal quantizations once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_fp8.functional.bodies import quantized
from titan_fp8.functional.checks import checked_offs
from titan_fp8.functional.product import product, spec_of
from titan_fp8.functional.weights import Weight
from titan_fp8.ops import run


def fp8_swiglu(
    x: Tensor,
    w1: Weight,
    w2: Weight,
    w3: Weight,
    offs: Tensor | None = None,
    *,
    recipe: str = "blockwise",
    emulate: bool = False,
    aligned: bool = False,
) -> Tensor:
    """W2 (silu(W1 x) · W3 x) with its nine GEMMs in FP8, dense or for groups; differentiable.

    Args:
        x: (..., K), bfloat16 or float32; with groups (M, K), sorted by group.
        w1, w3: (H, K); with groups (E, H, K). All dimensions are multiples of 16, dtypes as in
            `fp8_linear`.
        w2: (N, H); with groups (E, N, H).
        offs: None, or (E,) int32, the end of each group, as in `fp8_grouped_mm`.
        recipe, emulate, aligned: as in `fp8_grouped_mm`.

    Returns:
        y (..., N), with groups (M, N), in the dtype of F.linear.

    Raises:
        ValueError, RuntimeError: as `fp8_linear` and `fp8_grouped_mm`.
    """
    spec = spec_of(x, {"w1": w1, "w2": w2, "w3": w3}, recipe, emulate, aligned, offs=offs)
    _check_shapes(x, w1, w2, w3, offs)
    if offs is not None:
        offs = checked_offs(offs, w1.shape[0])
    x_MK = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if spec.recipe.feed_forward is not None:
        y_MN = product(x_MK, (w1, w2, w3), None, offs, spec)
    else:
        for_wgrad = torch.is_grad_enabled() and (w1.requires_grad or w3.requires_grad)
        x_cast = x_MK.detach().to(spec.dtype).contiguous()
        x_quantized = run(quantized, x_cast, offs, for_wgrad, spec, emulate=emulate)
        a_MH, b_MH = (product(x_MK, (w,), None, offs, spec, x_quantized) for w in (w1, w3))
        y_MN = product(F.silu(a_MH) * b_MH, (w2,), None, offs, spec)
    return y_MN if x.dim() == 2 else y_MN.view(*x.shape[:-1], w2.shape[-2])


def _check_shapes(x: Tensor, w1: Weight, w2: Weight, w3: Weight, offs: Tensor | None) -> None:
    """Raises ValueError unless the shapes match."""
    grouped = offs is not None
    fit = (
        (x.dim() == 2 if grouped else x.dim() > 0)
        and len(w1.shape) == len(w2.shape) == (3 if grouped else 2)
        and w1.shape == w3.shape
        and w1.shape[:-2] == w2.shape[:-2]
        and (w1.shape[-2], w1.shape[-1]) == (w2.shape[-1], x.shape[-1])
    )
    if not fit:
        allowed = "(M, K) and (E, H, K), (E, N, H)" if grouped else "(..., K) and (H, K), (N, H)"
        raise ValueError(
            f"x has shape {tuple(x.shape)} and w1, w2, w3 {tuple(w1.shape)}, {tuple(w2.shape)}, "
            f"{tuple(w3.shape)}: allowed are {allowed}, w3 as w1"
        )
