"""What a layer costs, in bf16 and in FP8: GEMMs, quantisers, gathers, CPU time, memory.

A linear or a product of experts has three GEMMs, fprop (m, n, k), dgrad (m, k, n) and wgrad
(m, n, k). In FP8 quantisers run before them: forward quantises x for fprop and wgrad in one read,
and W; backward quantises g for dgrad and wgrad in one read, and W transposed. Linears that read one
input share its quantisation. In a fused feed-forward the SwiGLU kernels quantise what they write,
so w1 and w3 have no g to quantise, and w2 no h.
"""

from dataclasses import dataclass, replace

from titan_fp8.plan.run import Layer, Run
from titan_fp8.plan.times import Times, family, op_name, wgrad_is_fp8
from titan_fp8.recipe import BF16, Recipe, get_recipe

SWIGLU_BYTES = (6, 10)
"""Bytes per element of bf16's compiled SwiGLU: h of a and b; da and db of dh, a and b."""
TRANSPOSE_BYTES = 2
"""Bytes per element of a weight that was gathered in FP8 and that dgrad transposes."""


@dataclass(frozen=True)
class Cost:
    """Times in us of one layer, forward and backward, once."""

    gemm_forward: float = 0.0
    gemm_backward: float = 0.0
    quantise_forward: float = 0.0
    quantise_backward: float = 0.0
    gather: float = 0.0
    host: float = 0.0
    kept: float = 0.0
    """Bytes kept from forward to backward, without checkpointing."""
    once: float = 0.0
    """Per step, however many micro-batches it has."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(**{key: value + getattr(other, key) for key, value in vars(self).items()})

    def gemm(self, repeated: float) -> float:
        return self.gemm_forward * (1 + repeated) + self.gemm_backward

    def quantise(self, repeated: float) -> float:
        return self.quantise_forward * (1 + repeated) + self.quantise_backward


def repeated(layer: Layer, run: Run) -> tuple[float, float]:
    """The shares of forward's GEMMs and quantisers that backward repeats for this layer."""
    gemms, others = run.checkpointing
    nothing_saved = layer.in_moe and run.compiled or layer.groups
    return (others if nothing_saved else gemms), others


def layer_us(layer: Layer, cost: Cost, run: Run) -> float:
    """GPU time of a layer in one micro-batch, with what checkpointing repeats."""
    gemms, others = repeated(layer, run)
    return cost.gemm(gemms) + cost.quantise(others)


def cost_of(layer: Layer, run: Run, times: Times) -> Cost:
    """What one of these layers costs per micro-batch, in its recipe."""
    if not layer.groups:
        cost = _product(layer, layer.n, layer.k, layer.leaf, layer.share, times)
    else:
        hidden, dim = layer.n, layer.k
        cost = Cost()
        for name, n, k in (("w1", hidden, dim), ("w3", hidden, dim), ("w2", dim, hidden)):
            cost += _product(layer, n, k, name, 1.0 if name == "w2" else 0.5, times)
    gathered = _gathered_bytes(layer) * (1 - 1 / layer.ranks) * run.gathers
    if layer.groups:
        host = 3 * times.host_us("grouped", layer.recipe)
    else:
        host = times.host_us("linear, compiled" if run.compiled else "linear, eager", layer.recipe)
    return replace(cost, gather=times.link_us(gathered), host=host)


def _product(layer: Layer, n: int, k: int, name: str, share: float, times: Times) -> Cost:
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
    forward, backward, once = _weights(layer, recipe, weight, times)
    both = recipe.rows_and_columns if wgrad_is_fp8(recipe) else recipe.rows
    is_h, is_hidden = layer.fused and name == "w2", layer.fused and name in ("w1", "w3")
    if is_h:
        assert recipe.swiglu is not None
        swiglu, gradient = recipe.swiglu.rows, recipe.swiglu.backward
        forward += times.quantise_us(op_name(swiglu), m * k) - times.copy_us(
            SWIGLU_BYTES[0] * m * k
        )
        backward += times.quantise_us(op_name(gradient), m * k)
        backward -= times.copy_us(SWIGLU_BYTES[1] * m * k)
        cost = replace(cost, kept=0.0)
    else:
        forward += share * times.quantise_us(op_name(both), m * k)
    if not is_hidden:
        backward += times.quantise_us(op_name(both), m * n)
    return cost + Cost(quantise_forward=forward, quantise_backward=backward, once=once)


def _weights(
    layer: Layer, recipe: Recipe, elements: int, times: Times
) -> tuple[float, float, float]:
    """us to quantise a weight in forward, in backward, and once a step."""
    forward = times.quantise_us(op_name(recipe.weight), elements)
    backward = times.quantise_us(op_name(recipe.weight_t), elements)
    if not layer.gathers_fp8:
        return forward, backward, 0.0
    if recipe.swiglu is None:  # rows and columns are gathered
        return 0.0, 0.0, (forward + backward) / layer.ranks
    return 0.0, times.copy_us(TRANSPOSE_BYTES * elements), forward / layer.ranks


def _gathered_bytes(layer: Layer) -> float:
    """Bytes of the weights of a layer as FSDP2 gathers them."""
    halves = layer.gathers_fp8 and get_recipe(layer.recipe).swiglu is not None
    return layer.elements * (1 if halves else 2)


def _padded(layer: Layer) -> int:
    """Tokens, of experts with groups padded to the alignment of the recipe."""
    if not layer.groups:
        return layer.m
    alignment = 8 if layer.recipe == BF16 else get_recipe(layer.recipe).alignment
    each = -(-layer.m // layer.groups)
    return -(-each // alignment) * alignment * layer.groups


def _kept_per_element(recipe: Recipe | None) -> float:
    if recipe is None or not wgrad_is_fp8(recipe):
        return 2.0
    return 1 + 4 / 128 if family(recipe.wgrad.left) == "blockwise" else 1.0
