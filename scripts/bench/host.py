"""Layers called in a loop, host included; forward and backward unless the row says otherwise.

The other benchmarks replay CUDA graphs, so they see the GPU alone. Here a layer is called as a
model calls it, forward and backward. The tensors of the first rows are so small that the GPU waits
for the CPU; the other rows are layers and a block of production size. A time is the median of
ROUNDS loops of CALLS calls each; bf16 and the recipes take turns. As in jobs with FP8 layers,
autograd's multithreading is off, for bf16 as well, and the compiler merges FP8 ops.

"x bf16" is the speed relative to bf16 in the same mode: below 1 is slower.
"""

import functools
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from bench.block import TransformerModelArgs, block_layer
from bench.common import Layer, Result, Step, call_us, randn
from bench.shapes import HOST_BLOCK, HOST_GROUPED, HOST_LINEAR, HOST_SMALL
from torch import Tensor

import titan_fp8
from titan_fp8.compile.graph_passes import SmallerQuantizers
from titan_fp8.patches import SMALLER_QUANTIZERS
from titan_fp8.recipe import BF16

KINDS = (BF16, "blockwise", "rowwise")
CALLS, ROUNDS = 300, 5
TITLE = "Host cost"


def linear_product(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """What a linear layer of this kind calls with its input and its weight."""
    return F.linear if kind == BF16 else functools.partial(titan_fp8.fp8_linear, recipe=kind)


def linear_step(m: int, n: int, k: int, compiled: bool, kind: str) -> Step:
    x, g, w = randn(m, k, requires_grad=True), randn(m, n), randn(n, k, requires_grad=True)
    product = linear_product(kind)
    if compiled:
        SMALLER_QUANTIZERS.apply(SmallerQuantizers.after)
        # A function of its own for each kind, so that none counts as another's recompilation.
        product = torch.compile(lambda x, w, product=product: product(x, w), fullgraph=True)
    return functools.partial(Layer(lambda x: product(x, w), (w,)).step, x, g)


def forward_step(kind: str) -> Step:
    m, n, k = HOST_SMALL
    x, w = randn(m, k), randn(n, k)
    product = linear_product(kind)

    def step() -> Tensor:
        with torch.no_grad():
            return product(x, w)

    return step


def grouped_step(kind: str) -> Step:
    groups, m, n, k = HOST_GROUPED
    offs = torch.arange(1, groups + 1, device="cuda", dtype=torch.int32) * (m // groups)
    x, g, w = randn(m, k, requires_grad=True), randn(m, n), randn(groups, n, k, requires_grad=True)
    if kind == BF16:
        layer = Layer(lambda x: torch._grouped_mm(x, w.transpose(-2, -1), offs), (w,))
    else:
        product = functools.partial(titan_fp8.fp8_grouped_mm, recipe=kind, aligned=True)
        layer = Layer(lambda x: product(x, w, offs), (w,))
    return functools.partial(layer.step, x, g)


def block_step(kind: str) -> Step:
    """A compiled transformer block of torchtitan's Llama3."""
    tokens, dim = HOST_BLOCK
    args = TransformerModelArgs(dim=dim, n_layers=1, n_heads=16, n_kv_heads=8)
    layer = block_layer(args, tokens, kind, compiled=True)
    x, g = randn(1, tokens, dim, requires_grad=True), randn(1, tokens, dim)
    return functools.partial(layer.step, x, g)


def cases() -> dict[str, Callable[[str], Step]]:
    """What is measured: name -> a function that makes the step of a kind."""
    made: dict[str, Callable[[str], Step]] = {
        "small linear, eager": functools.partial(linear_step, *HOST_SMALL, False),
        "small linear, compiled": functools.partial(linear_step, *HOST_SMALL, True),
        "small linear, forward without gradients": forward_step,
        "small grouped product, eager": grouped_step,
    }
    for shape in HOST_LINEAR:
        name = f"linear {','.join(map(str, shape))}"
        made[f"{name}, eager"] = functools.partial(linear_step, *shape, False)
        made[f"{name}, compiled"] = functools.partial(linear_step, *shape, True)
    tokens, dim = HOST_BLOCK
    made[f"Llama3 block, dim {dim}, {tokens} tokens, compiled"] = block_step
    return made


def measure() -> Result:
    torch.autograd.set_multithreading_enabled(False)
    rows = []
    for name, make in cases().items():
        torch._dynamo.reset()
        us_of_kinds = call_us([make(kind) for kind in KINDS], CALLS, ROUNDS)
        times = dict(zip(KINDS, us_of_kinds, strict=True))
        for kind, us in times.items():
            rows.append({"case": name, "kind": kind, "us": us, "x bf16": times[BF16] / us})
        print(f"{name}: {times}", file=sys.stderr)
    return rows, {"calls": f"{ROUNDS} x {CALLS}"}
