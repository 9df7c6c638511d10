"""Measures on one GPU the times that `titan_fp8.plan` predicts from, in less than 90 seconds.

    python scripts/measure_plan.py --json docs/benchmarks/plan/measure_h100.json
    python scripts/plan_table.py

Times of the GEMMs in bf16 and FP8 and of the quantizers over a range of shapes, copy bandwidth,
attention, and the CPU time of layers. The second command writes the tables in
titan_fp8/plan/tables/. Results are not checked here: bench_gemm.py and bench_quantize.py check the
same kernels.
"""

import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator

import torch
from bench_common import (
    Layer,
    Step,
    call_us,
    copy_gbps,
    environment,
    event_ms,
    median_us,
    parser,
    randn,
    require_hopper,
    sets_beyond_l2,
)
from bench_host import grouped_step, linear_product, linear_step
from shapes import HOST_SMALL, uneven_ends
from torch import Tensor

from titan_fp8.kernels import hopper
from titan_fp8.recipe import BF16

TOKENS = (1024, 8192)
DENSE = (
    *((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336)),
    *((2048, 2048), (512, 2048), (4096, 512)),
)
"""(N, K) of linears: Llama3-8B's, and those of a hidden dimension of 2048."""
GROUPS = ((8, 32768), (32, 98304), (32, 8192))
"""(E, M)."""
GROUPED = ((1408, 2048), (2048, 1408), (2048, 7168))
"""(N, K) of experts: DeepSeek-V3 16B's, and 671B's."""
ELEMENTS = (1 << 20, 1 << 23, 1 << 26, 1 << 28)
WIDTH = 2048
"""Features of what is quantized."""
MAX_ELEMENTS = 1 << 31
"""Of all sets of inputs of a kernel together; a single set may have more."""
ATTENTION = (1, 32, 8192, 128)
"""(batch, heads, tokens, head dim) of Llama3-8B."""
CALLS, ROUNDS, CHAIN = 60, 3, 7
"""Host: calls in a loop, loops, and linears in a compiled function, as many as a block has."""
KINDS = (BF16, "blockwise", "rowwise")


def gemm(kind: str, op: str, e: int, m: int, n: int, k: int) -> Step:
    """A GEMM with operands of its own; e = 0: no groups."""
    lead = (e,) if e else ()
    offs = uneven_ends(e, m, 16 if kind == "rowwise" else 128).cuda() if e else None
    if op == "mm":
        x, w = randn(m, k), randn(*lead, n, k)
        if kind == BF16:
            return lambda: torch._grouped_mm(x, w.mT, offs=offs) if e else x @ w.T
        if kind == "rowwise":
            rows = *hopper.quantize_row(x), *hopper.quantize_row(w)
            return lambda: hopper.rowwise_mm(*rows, offs)
        blocks = *hopper.quantize_1x128(x), *hopper.quantize_128x128(w)
        return lambda: hopper.blockwise_mm(*blocks, offs)
    g, x = randn(m, n), randn(m, k)
    if kind == BF16:
        return lambda: torch._grouped_mm(g.T, x, offs=offs) if e else g.T @ x
    quantize = hopper.quantize_col_t if kind == "rowwise" else hopper.quantize_128x1_t
    wgrad = hopper.rowwise_wgrad if kind == "rowwise" else hopper.blockwise_wgrad
    columns = *quantize(g, offs), *quantize(x, offs)
    return lambda: wgrad(*columns, offs)


def kernel_us(products: list[Step]) -> float:
    """Time of one of equal calls, in one graph, since a graph of one short call waits for its
    launch."""

    def all_of_them() -> list[object]:
        return [product() for product in products]

    return median_us([all_of_them], replays=8) / len(products)


def gemm_rows() -> Iterator[list]:
    shapes = [(0, m, n, k) for m, (n, k) in itertools.product(TOKENS, DENSE)]
    shapes += [(e, m, n, k) for (e, m), (n, k) in itertools.product(GROUPS, GROUPED)]
    for shape, op, kind in itertools.product(shapes, ("mm", "wgrad"), KINDS):
        e, m, n, k = shape
        size = m * k + (max(e, 1) * n * k if op == "mm" else m * n)
        count = min(sets_beyond_l2(size), max(1, MAX_ELEMENTS // size))
        yield [kind, op, *shape, kernel_us([gemm(kind, op, *shape) for _ in range(count)])]


def quantize_times() -> dict[str, list[list[float]]]:
    """{op: [elements, us]}; of SwiGLU, elements of h."""
    inputs = {"swiglu_1x128": 2, "swiglu_backward_1x128_128x1_t": 3}
    ops = (
        *("quantize_1x128", "quantize_1x128_128x1_t", "quantize_128x128", "quantize_128x128_t"),
        *("quantize_row", "quantize_row_col_t", "quantize_weight_col_t"),
        *inputs,
    )
    times: dict[str, list[list[float]]] = {}
    for op, elements in itertools.product(ops, ELEMENTS):
        shape = (elements // WIDTH, WIDTH)
        count = min(sets_beyond_l2(3 * elements), max(1, MAX_ELEMENTS // elements))
        sets = [[randn(*shape) for _ in range(inputs.get(op, 1))] for _ in range(count)]
        function = getattr(hopper, op)
        us = kernel_us([functools.partial(function, *each) for each in sets])
        times.setdefault(op, []).append([elements, us])
    return times


def attention_tflops() -> float:
    from torchtitan.models.attention import ScaledDotProductAttentionWrapper

    batch, heads, tokens, dim = ATTENTION
    attend = ScaledDotProductAttentionWrapper()
    q, k, v, g = (randn(*ATTENTION, requires_grad=i < 3) for i in range(4))
    layer = Layer(lambda q: attend(q, k, v), (k, v))
    ms = event_ms([functools.partial(layer.step, q, g)], calls=5, untimed=2)
    # Causal: half of 4 FLOP per pair and feature; backward takes 2.5 times as much.
    return 3.5 * 2 * batch * heads * tokens**2 * dim / ms / 1e9


def chain_step(kind: str) -> Step:
    """CHAIN small linears, one after the other, compiled together."""
    m, n, _ = HOST_SMALL
    x, g = randn(m, n, requires_grad=True), randn(m, n)
    weights = tuple(randn(n, n, requires_grad=True) for _ in range(CHAIN))
    product = linear_product(kind)

    def chain(x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        for w in weights:
            x = product(x, w)
        return x

    compiled = torch.compile(chain, fullgraph=True)
    return functools.partial(Layer(lambda x: compiled(x, weights), weights).step, x, g)


def host_times(commit: str) -> dict[str, object]:
    """us per layer that is too small for the GPU to matter, forward and backward."""
    steps = {
        "linear, eager": (1, functools.partial(linear_step, *HOST_SMALL, False)),
        "linear, compiled": (CHAIN, chain_step),
        "grouped": (1, grouped_step),
    }
    times: dict[str, object] = {}
    for name, (layers, make) in steps.items():
        torch._dynamo.reset()
        times[name] = {kind: call_us([make(kind)], CALLS, ROUNDS)[0] / layers for kind in KINDS}
    return times | {"code": commit}


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__.partition("\n")[0])
    args = arguments.parse_args(argv)
    require_hopper(arguments)
    begin = time.perf_counter()
    facts = environment()
    measured: dict[str, object] = {}
    parts: dict[str, Callable[[], object]] = {
        "copy_gbps": copy_gbps,
        "gemm": lambda: list(gemm_rows()),
        "quantize": quantize_times,
        "attention_tflops": attention_tflops,
        "host": lambda: host_times(facts["commit"]),
    }
    for name, measure in parts.items():
        measured[name] = measure()
        torch.cuda.empty_cache()
        print(f"{name}: done after {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    text = json.dumps({**facts, "cpus": os.cpu_count(), "measured": measured}, indent=1) + "\n"
    if args.json is not None:
        args.json.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
