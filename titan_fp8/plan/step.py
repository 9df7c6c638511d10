"""The time of a training step, put together from its parts.

    GPU    layers, attention, elementwise kernels, permutation and exchange of routed tokens,
           collectives of tensor parallelism, and FSDP2's copies and what is exposed of its gathers
    CPU    a fixed time per block, and the time of the linears and grouped products in it
    END    the optimizer, and quantizing the shards that FSDP2 gathers in FP8

GPU (without END) and CPU are each divided into forward and backward. In bf16 torchtitan copies each
batch to the GPU by a call that waits until the GPU has finished all work before it, so forward
begins on both at once, and takes the longer of both. Backward on the GPU begins after that, and
ends after the CPU has launched it. END follows.

In a dense model with FP8 layers the CPU does not wait for the optimizer
(`torchtitan_0_2/input_stream.py`), so it begins the first forward of a step with a lead, except
after a step that is logged. It does not wait between micro-batches either. In a model with experts
it has no lead, because each MoE block waits for its number of tokens.

FSDP2's copies of sharded gradients count as in bf16, although FP8 runs make them in another way.

Not modeled: the ring of context parallelism, the all-reduces of DDP and HSDP, and differences
between the ranks of a pipeline. These take as long in bf16.
"""

from dataclasses import dataclass, replace

from titan_fp8.plan.costs import (
    HIGH_PRECISION_BYTES,
    Cost,
    cost_of,
    forward_us,
    gathered_bytes,
    gemm_us,
    layer_us,
    quantize_us,
)
from titan_fp8.plan.run import Layer, Run
from titan_fp8.plan.times import Times
from titan_fp8.recipe import BF16

CAST_BYTES = 6
"""Bytes per element of a shard that FSDP2 casts from FP32 to bf16 before it gathers it."""
GRADIENT_BYTES = 2
"""Bytes per element of a gradient before it is reduced."""
END = ("quantizing shards", "optimizer")
"""Parts of a step that begin when backward has ended."""
FORWARD_HOST = 0.43
"""Forward's share of the CPU time of forward and backward: 0.37 (bf16) to 0.44 in Llama3-8B with
FSDP2 and next to empty kernels (docs/log.md, FSDP2 with small batches on one GPU)."""
LEAD = 0.89
"""The CPU's lead in forward, as a share of the optimizer's time: 42 of 47 ms (docs/log.md, The CPU
ahead of the optimizer)."""
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
        gpu_forward: ms of GPU time of forward.
        host: ms of CPU time of forward and backward.
        waits: the share of the micro-batches whose forward the CPU begins only when the GPU has
            finished what comes before.
        lead: ms by which the CPU begins the step's forward before the GPU, unless the step before
            was logged.
        log_freq: every so many steps are logged.
    """

    rows: tuple[Row, ...]
    parts: dict[str, float]
    gpu_forward: float
    host: float
    waits: float
    lead: float
    log_freq: int

    @property
    def gpu(self) -> float:
        return sum(self.parts.values())

    @property
    def end(self) -> float:
        """ms of GPU time after backward, in which the CPU has nothing to do."""
        return sum(self.parts.get(part, 0.0) for part in END)

    @property
    def passes(self) -> float:
        """ms of GPU time of forward and backward."""
        return self.gpu - self.end

    @property
    def host_forward(self) -> float:
        """ms of CPU time of forward."""
        return FORWARD_HOST * self.host

    @property
    def waiting(self) -> float:
        """ms in which the GPU waits for the CPU, a mean over the steps."""
        logged = 1 / self.log_freq
        return (1 - logged) * self._waiting(self.lead) + logged * self._waiting(0.0)

    def _waiting(self, lead: float) -> float:
        forward = self.waits * (self.host_forward - self.gpu_forward)
        return max(forward - lead, self.host - self.passes - lead, 0.0)

    @property
    def ms(self) -> float:
        return self.gpu + self.waiting


def predict(run: Run, times: Times) -> Step:
    """The step of a run on a GPU with these times."""
    rows = tuple(_row(layer, run, times) for layer in run.layers)
    parts = _gpu_parts(run, rows, times)
    runs_ahead = any(row.layer.recipe != BF16 for row in rows) and not run.moe_blocks
    return Step(
        rows,
        {part: ms for part, ms in parts.items() if ms},
        gpu_forward=_gpu_forward_ms(run, rows, parts),
        host=_host_ms(run, rows, times),
        waits=1 / run.batches.micro_batches if runs_ahead else 1.0,
        lead=LEAD * parts["optimizer"] if runs_ahead else 0.0,
        log_freq=run.log_freq,
    )


def _ms_per_us(run: Run) -> float:
    """ms of a step for each us of a micro-batch of the whole model, pipeline bubble included."""
    batches, ranks = run.batches, run.dims.pp
    bubble = 1 + (ranks - 1) * batches.rounds / batches.micro_batches / batches.stages
    return batches.micro_batches * bubble / ranks / 1e3


def _attention_passes(run: Run) -> float:
    """Attention in a step, as a multiple of its forward; backward takes 2.5 times as long."""
    return 3.5 + run.repeated_attention


def _elementwise_passes(run: Run) -> float:
    """Elementwise work in a step, as a multiple of forward and backward; forward is a third."""
    return 1 + run.repeated_rest / 3


def _gpu_parts(run: Run, rows: tuple[Row, ...], times: Times) -> dict[str, float]:
    """{part: ms of GPU time in a step}, those of no time included."""
    scale, passes = _ms_per_us(run), _elementwise_passes(run)

    def gemms(of_experts: bool) -> float:
        own = (row for row in rows if bool(row.layer.groups) == of_experts)
        return sum(row.layer.count * gemm_us(row.layer, row.cost) for row in own) * scale

    quantizers = sum(row.layer.count * quantize_us(row.layer, row.cost, run) for row in rows)
    attention_flop = _attention_passes(run) * run.attention_flop
    elementwise = times.dense_ps * run.tokens / run.dims.tp * run.dim * run.blocks / 1e6
    routed = run.rows * run.dim * run.moe_blocks
    parts = {
        "GEMMs of linears": gemms(of_experts=False),
        "GEMMs of experts": gemms(of_experts=True),
        "quantizers": quantizers * scale,
        "attention": attention_flop / times.attention_tflops / 1e6 * scale,
        "elementwise": elementwise * passes * scale,
        "permutation": times.moe_ps[run.permutation] * routed / 1e6 * passes * scale,
        "TP and EP": times.link_us(_exchanged_bytes(run)) * scale,
    }
    computation = sum(parts.values())
    parts["FSDP"] = _fsdp_ms(run, rows, times, computation)
    parts["quantizing shards"] = sum(r.layer.count * r.cost.once for r in rows) / run.dims.pp / 1e3
    parts["optimizer"] = sum(
        elements / ranks * times.optimizer_ps[run.dtype] / run.dims.pp / 1e9
        for ranks, elements in run.parameters.items()
    )
    return parts


def _gpu_forward_ms(run: Run, rows: tuple[Row, ...], parts: dict[str, float]) -> float:
    """GPU time of forward in a step whose parts are `parts`."""
    layers = sum(row.layer.count * forward_us(row.cost) for row in rows) * _ms_per_us(run)
    attention = parts["attention"] / _attention_passes(run)
    others = (parts["elementwise"] + parts["permutation"]) / 3 / _elementwise_passes(run)
    gathers = run.gathers / 2 if run.reshards else run.gathers
    fsdp = parts["FSDP"] * gathers / (run.gathers + run.batches.rounds)
    return layers + attention + others + (parts["TP and EP"] / 2 + fsdp)


def _host_ms(run: Run, rows: tuple[Row, ...], times: Times) -> float:
    """CPU time of forward and backward in a step."""
    us = sum(row.layer.count * row.cost.host for row in rows)
    block_us = times.host["block_us"] + times.host["fsdp_block_us"] * run.is_sharded
    us += (run.blocks - run.moe_blocks) * block_us
    if run.is_sharded and not run.moe_blocks:
        us *= times.host["several_ranks"]
    us += run.moe_blocks * times.host["moe_tp_block_us" if run.dims.tp_enabled else "moe_block_us"]
    return us * (run.batches.micro_batches / run.dims.pp / 1e3)


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
    """What FSDP2 adds to a step: its copies, and what its gathers cost beside computation.

    It copies parameters and gradients even where a rank has them whole, as with expert parallelism.

    Shards are cast, copied into the buffers of the collectives and sent on streams of their own.
    Gathered weights are copied out, and gradients copied in, between the kernels of the model.
    """
    if not run.is_sharded:
        return 0.0
    rounds, from_fp32 = run.batches.rounds, CAST_BYTES if run.dtype == "float32" else 0
    # (elements before FSDP2 shards them, ranks, bytes per element of the gather, of the cast)
    high_precision, weights = dict(run.parameters), []
    for layer in (row.layer for row in rows if row.layer.gathers_fp8):
        elements = layer.count * layer.elements
        high_precision[layer.ranks] -= elements
        weights.append((elements, layer.ranks, gathered_bytes(layer, run), 0))
    weights += [
        (each, ranks, HIGH_PRECISION_BYTES, from_fp32) for ranks, each in high_precision.items()
    ]
    in_fp8 = any(row.layer.recipe != BF16 for row in rows)
    exchanges = in_fp8 and run.can_exchange_gradients
    sent = GRADIENT_BYTES if exchanges else run.reduce_bytes
    aside = between = 0.0
    for elements, ranks, size, cast in weights:
        if ranks == 1:
            between += rounds * elements * times.whole_ps["fp8" if in_fp8 else BF16] / 1e6
        else:
            aside += run.gathers * times.copy_us(elements / ranks * (cast + 2 * size))
            received = elements * (size * run.gathers + sent * rounds)
            aside += times.link_us(received * (1 - 1 / ranks))
            if exchanges:
                summed = elements / ranks * (sent * ranks + run.reduce_bytes)
                aside += rounds * times.copy_us(summed)
            between += run.gathers * times.copy_us(elements * 2 * size)
            between += rounds * elements * times.reduce_ps * (GRADIENT_BYTES + sent) / 6 / 1e6
    aside, between = aside / run.dims.pp / 1e3, between / run.dims.pp / 1e3
    share = times.exposed["fp8" if in_fp8 else BF16]
    exposed = max(share * min(aside, computation), aside - computation)
    return exposed + between
