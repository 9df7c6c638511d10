"""What a layer costs, in bf16 and in FP8: GEMMs, quantizers, gathers, CPU time, memory.

A linear or a product of experts has three GEMMs, fprop (m, n, k), dgrad (m, k, n) and wgrad
(m, n, k). In FP8 quantizers run before them: forward quantizes x for fprop and wgrad in one read,
and W; backward quantizes g for dgrad and wgrad in one read, and W transposed. Linears that read one
input share its quantization. In a fused feed-forward the SwiGLU kernels quantize what they write,
so w1 and w3 have no g to quantize, and w2 no h.

Where compiled code quantizes x again in backward, forward writes only the rows, for fprop, and
backward only the columns, for wgrad, or both if it repeats fprop (`graph_passes.py`). Experts are
not compiled. A checkpointed block with experts is compiled in parts, and repeats forward as it was.

With `fsdp_all_gather` a rank quantizes its shard of W once a step instead, and backward transposes
the gathered W.
"""

from dataclasses import dataclass, replace

from titan_fp8.plan.run import Layer, Run
from titan_fp8.plan.times import Times, family, op_name
from titan_fp8.recipe import BF16, Recipe, get_recipe

SWIGLU_BYTES = (6, 10)
"""Bytes per element of bf16's compiled SwiGLU: h of a and b; da and db of dh, a and b."""
TRANSPOSE_BYTES = 2
"""Bytes per element of a weight that was gathered in FP8 and that dgrad transposes."""
HIGH_PRECISION_BYTES = 2
"""Bytes per element of a weight that FSDP2 gathers in bf16."""


@dataclass(frozen=True)
class Cost:
    """Times in us of one layer, forward and backward, once."""

    gemm_forward: float = 0.0
    gemm_backward: float = 0.0
    quantize_forward: float = 0.0
    with_gemm: float = 0.0
    """Quantizers of forward that backward repeats only together with the GEMM."""
    quantize_backward: float = 0.0
    gather: float = 0.0
    host: float = 0.0
    kept: float = 0.0
    """Bytes kept from forward to backward, without checkpointing."""
    once: float = 0.0
    """Per step, however many micro-batches it has."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(**{key: value + getattr(other, key) for key, value in vars(self).items()})


def gemm_us(layer: Layer, cost: Cost) -> float:
    """Time of a layer's GEMMs in one micro-batch, with what checkpointing repeats."""
    return cost.gemm_forward * (1 + layer.repeats) + cost.gemm_backward


def quantize_us(layer: Layer, cost: Cost, run: Run) -> float:
    """Time of its quantizers, likewise."""
    inputs = cost.quantize_forward * (1 + run.repeated_rest)
    return inputs + cost.with_gemm * (1 + layer.repeats) + cost.quantize_backward


def forward_us(cost: Cost) -> float:
    """GPU time of forward of a layer in one micro-batch."""
    return cost.gemm_forward + cost.quantize_forward + cost.with_gemm


def layer_us(layer: Layer, cost: Cost, run: Run) -> float:
    """GPU time of a layer in one micro-batch, with what checkpointing repeats."""
    return gemm_us(layer, cost) + quantize_us(layer, cost, run)


def cost_of(layer: Layer, run: Run, times: Times) -> Cost:
    """What one of these layers costs per micro-batch, in its recipe."""
    if not layer.groups:
        cost = _product(layer, layer.n, layer.k, layer.leaf, layer.share, run, times)
    else:
        hidden, dim = layer.n, layer.k
        cost = Cost()
        for name, n, k in (("w1", hidden, dim), ("w3", hidden, dim), ("w2", dim, hidden)):
            cost += _product(layer, n, k, name, 1.0 if name == "w2" else 0.5, run, times)
    received = layer.elements * gathered_bytes(layer, run) * (1 - 1 / layer.ranks)
    received *= run.gathers / run.batches.micro_batches
    if layer.groups:
        host, weights = 3 * times.host_us("grouped", layer.recipe), 3
    else:
        kind = "linear, compiled" if run.compiled else "linear, eager"
        host, weights = times.host_us(kind, layer.recipe), 1
    if layer.gathers_fp8:
        host += weights * times.host_us("fsdp_all_gather", layer.recipe)
    return replace(cost, gather=times.link_us(received), host=host)


def _product(layer: Layer, n: int, k: int, name: str, share: float, run: Run, times: Times) -> Cost:
    m = _padded(layer)
    weight = n * k * max(layer.groups, 1)
    recipe = None if layer.recipe == BF16 else get_recipe(layer.recipe)
    left = family(recipe.fprop.left) if recipe else BF16
    last = family(recipe.wgrad.left) if recipe else BF16
    cost = Cost(
        gemm_forward=times.gemm_us(left, "mm", layer.groups, m, n, k),
        gemm_backward=times.gemm_us(left, "mm", layer.groups, m, k, n)
        + times.gemm_us(last, "wgrad", layer.groups, m, n, k),
        kept=_kept_per_element(recipe) * share * m * k,
    )
    if recipe is None:
        return cost
    with_gemm, backward, once = _weights(layer, recipe, weight, times)
    forward = 0.0
    both = recipe.quantize_rows if recipe.wgrad_in_bf16 else recipe.quantize_rows_and_columns
    is_h, is_hidden = layer.fused and name == "w2", layer.fused and name in ("w1", "w3")
    if is_h:
        assert recipe.feed_forward is not None
        swiglu, gradient = recipe.feed_forward.swiglu, recipe.feed_forward.swiglu_backward
        # Backward computes h again in its own kernel, so forward's runs once.
        with_gemm += times.quantize_us(op_name(swiglu), m * k)
        forward -= times.copy_us(SWIGLU_BYTES[0] * m * k)
        backward += times.quantize_us(op_name(gradient), m * k)
        backward -= times.copy_us(SWIGLU_BYTES[1] * m * k)
        cost = replace(cost, kept=0.0)
    elif _is_narrowed(layer, run):
        rows, columns = _rows_and_columns(recipe, m * k, times)
        in_one_read = times.quantize_us(op_name(both), m * k)
        with_gemm += share * rows
        # What repeats the GEMM needs the rows as well, and reads x only once for both.
        repeated = layer.repeats * (in_one_read - rows)
        backward += share * (repeated + (1 - layer.repeats) * columns)
    else:
        forward += share * times.quantize_us(op_name(both), m * k)
    if not is_hidden:
        backward += times.quantize_us(op_name(both), m * n)
    return cost + Cost(
        quantize_forward=forward, with_gemm=with_gemm, quantize_backward=backward, once=once
    )


def _is_narrowed(layer: Layer, run: Run) -> bool:
    """Whether forward quantizes only the rows of the layer's input."""
    in_parts = layer.in_moe and run.repeated_rest == 1
    return run.compiled and not layer.groups and not in_parts


def _rows_and_columns(recipe: Recipe, elements: int, times: Times) -> tuple[float, float]:
    """us to quantize the rows of an input, and to quantize the columns that wgrad reads."""
    rows = times.quantize_us(op_name(recipe.quantize_rows), elements)
    if recipe.wgrad_in_bf16:
        return rows, 0.0
    return rows, times.quantize_us(op_name(recipe.quantize_columns), elements)


def _weights(
    layer: Layer, recipe: Recipe, elements: int, times: Times
) -> tuple[float, float, float]:
    """us to quantize a weight in forward, in backward, and once a step."""
    if layer.gathers_fp8:
        once = times.shard_us(layer.recipe, elements / layer.ranks)
        return 0.0, times.copy_us(TRANSPOSE_BYTES * elements), once
    forward = times.quantize_us(op_name(recipe.quantize_weight), elements)
    return forward, times.quantize_us(op_name(recipe.quantize_weight_t), elements), 0.0


def gathered_bytes(layer: Layer, run: Run) -> float:
    """Bytes per element of the weights of a layer, the mean of FSDP2's gathers.

    Blocks of 128x128 serve fprop and dgrad. Of a rowwise weight, rows and columns are gathered, in
    forward only the rows if there is another gather in backward.
    """
    if not layer.gathers_fp8:
        return HIGH_PRECISION_BYTES
    if get_recipe(layer.recipe).has_weight_blocks:
        return 1
    return 1.5 if run.reshards else 2


def _padded(layer: Layer) -> int:
    """Tokens, of experts with groups padded to the alignment of the recipe."""
    if not layer.groups:
        return layer.m
    alignment = 8 if layer.recipe == BF16 else get_recipe(layer.recipe).alignment
    each = -(-layer.m // layer.groups)
    return -(-each // alignment) * alignment * layer.groups


def _kept_per_element(recipe: Recipe | None) -> float:
    if recipe is None or recipe.wgrad_in_bf16:
        return 2.0
    return 1 + 4 / 128 if family(recipe.wgrad.left) == "blockwise" else 1.0
