"""The time of a training step, put together from its parts.

    GPU    layers, attention, elementwise kernels, permutation and exchange of routed tokens,
           collectives of tensor parallelism, what is exposed of FSDP2's, and the optimizer
    CPU    a fixed time per block, and the time of the linears and grouped products in it

The slower of the two is the step. Not modelled: the ring of context parallelism, the all-reduces of
DDP and HSDP, and differences between the ranks of a pipeline. These take as long in bf16.
"""

from dataclasses import dataclass, replace

from titan_fp8.plan.costs import Cost, cost_of, layer_us
from titan_fp8.plan.run import Layer, Run
from titan_fp8.plan.times import Times
from titan_fp8.recipe import BF16

FSDP_COPIES = (4, 6)
"""Bytes per element that FSDP2 moves around a gather, in bf16, and around a reduction to FP32."""
BASELINE = 'recipe = "bf16"'


@dataclass(frozen=True)
class Row:
    """A layer beside bf16. `speed` is that of its GPU time, what checkpointing repeats included."""

    layer: Layer
    cost: Cost
    bf16: Cost
    speed: float


@dataclass(frozen=True)
class Step:
    """A predicted step.

    Attributes:
        rows: one for each layer.
        parts: {part: ms of GPU time}; what they sum up to is `gpu`.
        host: ms of CPU time.
    """

    rows: tuple[Row, ...]
    parts: dict[str, float]
    host: float

    @property
    def gpu(self) -> float:
        return sum(self.parts.values())

    @property
    def ms(self) -> float:
        return max(self.gpu, self.host)


def predict(run: Run, times: Times) -> Step:
    """The step of a run on a GPU with these times."""
    rows = tuple(_row(layer, run, times) for layer in run.layers)
    repeated_gemms, repeated_rest = run.checkpointing
    again = 1 + repeated_rest / 3  # forward is a third of the elementwise work
    bubble = 1 + (run.dims.pp - 1) / run.micro_batches
    scale = run.micro_batches * bubble / run.dims.pp / 1e3  # us of a micro-batch to ms of a step

    def layers(of_experts: bool, kind: str) -> float:
        us = 0.0
        for row in rows:
            if bool(row.layer.groups) == of_experts:
                all_of_it = layer_us(row.layer, row.cost, run)
                plain = replace(row.cost, quantise_forward=0.0, quantise_backward=0.0)
                gemm = layer_us(row.layer, plain, run)
                us += row.layer.count * (gemm if kind == "gemm" else all_of_it - gemm)
        return us * scale

    full = 3.5 + (1.0 if run.checkpointing == (1.0, 1.0) else 0.0)
    elementwise = times.dense_ps * run.tokens / run.dims.tp * run.dim * run.blocks / 1e6
    routed = run.rows * run.dim * run.moe_blocks
    parts = {
        "GEMMs of linears": layers(False, "gemm"),
        "GEMMs of experts": layers(True, "gemm"),
        "quantisers": layers(False, "quantise") + layers(True, "quantise"),
        "attention": full * run.attention_flop / times.attention_tflops / 1e6 * scale,
        "elementwise": elementwise * again * scale,
        "permutation": times.moe_ps[run.permutation] * routed / 1e6 * again * scale,
        "TP and EP": times.link_us(_exchanged_bytes(run)) * scale,
    }
    computation = sum(parts.values())
    parts["FSDP"] = _fsdp_ms(run, rows, times, computation)
    parts["optimizer"] = sum(
        elements / ranks * times.optimizer_ps[run.dtype] / run.dims.pp / 1e9
        for ranks, elements in run.parameters.items()
    )
    parts["quantisers"] += sum(r.layer.count * r.cost.once for r in rows) / run.dims.pp / 1e3
    host = sum(row.layer.count * row.cost.host for row in rows)
    dense_blocks = run.blocks - run.moe_blocks
    host += dense_blocks * times.host["block_us"] + run.moe_blocks * times.host["moe_block_us"]
    host *= run.micro_batches / run.dims.pp / 1e3
    return Step(rows, {part: ms for part, ms in parts.items() if ms}, host)


def baseline(run: Run) -> Run:
    """The same run in bf16, with torchtitan's own permutation."""
    layers = tuple(layer.in_bf16(BASELINE) for layer in run.layers)
    return replace(run, layers=layers, permutation="host")


def _row(layer: Layer, run: Run, times: Times) -> Row:
    cost, bf16 = cost_of(layer, run, times), cost_of(layer.in_bf16(BASELINE), run, times)
    speed = layer_us(layer, bf16, run) / layer_us(layer, cost, run)
    return Row(layer, cost, bf16, speed if layer.recipe != BF16 else 1.0)


def _exchanged_bytes(run: Run) -> float:
    """Bytes that a rank receives for tensor and expert parallelism in a micro-batch."""
    dims, total = run.dims, 0.0
    if dims.ep_enabled:
        # There and back, in forward and in backward; checkpointing saves what forward got.
        total += 4 * 2 * run.rows * run.dim * run.moe_blocks * (1 - 1 / dims.ep)
    if dims.tp_enabled:
        # Gather and scatter around attention and feed-forward, in forward and in backward.
        total += 8 * 2 * run.tokens * run.dim * run.blocks * (1 - 1 / dims.tp)
    return total


def _fsdp_ms(run: Run, rows: tuple[Row, ...], times: Times, computation: float) -> float:
    """What FSDP2 adds to a step: its copies, and what its collectives cost beside computation."""
    received = copied = 0.0
    for ranks, elements in run.parameters.items():
        if ranks > 1:
            received += elements * (2 * run.gathers + run.reduce_bytes) * (1 - 1 / ranks)
            copied += elements * (FSDP_COPIES[0] * run.gathers + FSDP_COPIES[1])
    collectives = times.link_us(received)
    for row in rows:
        collectives -= row.layer.count * (row.bf16.gather - row.cost.gather)
    steps = run.micro_batches / run.dims.pp / 1e3
    collectives *= steps
    slowed = times.exposed * min(collectives, computation)
    exposed = max(slowed, collectives - computation)
    return exposed + times.copy_us(copied) * steps
