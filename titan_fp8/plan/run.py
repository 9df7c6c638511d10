"""What a rank computes in a training step, as `model.py` reads it from a config."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torchtitan.distributed import ParallelDims

from titan_fp8.plan.batches import Batches
from titan_fp8.recipe import BF16

GPUS_OF_HOST = 8
"""How many GPUs a host is taken to have."""
SHARED_INPUTS = (("wq", "wk", "wv", "wkv_a", "wq_a"), ("w1", "w3"))
"""Names of linears of one module that read one input, which is then quantized once."""


@dataclass(frozen=True)
class Layer:
    """Linears, or groups of experts, that are equal on a rank.

    Attributes:
        name: their common name, with * for the index of the block.
        fqns: their names in the model.
        groups: local experts; 0 for a linear.
        m: tokens per micro-batch, of all local experts together.
        n, k: output and input features of the rank's shard; of experts, hidden and model dimension.
        recipe: "bf16" if it is not converted.
        reason: why it is not converted, or "".
        fits: whether FP8 GEMMs can run it: n and k are positive multiples of 16.
        share: its share, in proportion to n, of quantizing an input that other layers of its recipe
            read, too.
        fused: a feed-forward, or a part of one, whose SwiGLU and quantizers are one kernel.
        in_moe: in a block with experts.
        repeats: the share of its forward GEMMs that backward repeats, by activation checkpointing.
        ranks: the number of ranks over which FSDP2 shards its weights.
        gathers_fp8: whether FSDP2 gathers its weights in FP8.
    """

    name: str
    fqns: tuple[str, ...]
    groups: int
    m: int
    n: int
    k: int
    recipe: str
    reason: str
    fits: bool
    share: float
    fused: bool
    in_moe: bool
    repeats: float
    ranks: int
    gathers_fp8: bool

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.fqns)

    @property
    def leaf(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def elements(self) -> int:
        """Elements of the weights of one of them, of one rank before FSDP2 shards them."""
        return self.n * self.k * (3 * self.groups if self.groups else 1)

    def in_bf16(self, reason: str) -> "Layer":
        """This layer, not converted."""
        return replace(self, recipe=BF16, reason=reason, fused=False, gathers_fp8=False)


@dataclass(frozen=True)
class Run:
    """A training run on one rank.

    Attributes:
        description: model, flavor and plan.
        layers: linears and experts.
        dims: the degrees of parallelism.
        blocks, moe_blocks: transformer blocks of the model, and those of them with experts.
        dim: features of the residual stream.
        tokens: tokens that the linears of a rank see per micro-batch.
        rows: tokens that the experts of a rank see per micro-batch and block.
        attention_flop: forward FLOP of attention per micro-batch, all blocks.
        batches: micro-batches, rounds of accumulation and stages of the pipeline.
        parameters: {ranks: elements} per rank before FSDP2 shards them, by the number of ranks that
            it shards them over.
        dtype, mixed_precision_param: as in torchtitan's [training].
        reduce_bytes: bytes per element of reduced gradients.
        compiled: whether the blocks are compiled.
        repeated_attention, repeated_rest: the share of forward's attention, and of its other
            operations except GEMMs, that backward repeats.
        reshards: whether FSDP2 frees gathered weights after forward, and gathers them again.
        permutation: "gather", or "host" for torchtitan's.
        log_freq: torchtitan logs every so many steps, and then waits for the GPU.
        filter_fqns: those of the linear section.
    """

    description: str
    layers: tuple[Layer, ...]
    dims: ParallelDims
    blocks: int
    moe_blocks: int
    dim: int
    tokens: int
    rows: int
    attention_flop: float
    batches: Batches
    parameters: dict[int, int]
    dtype: str
    mixed_precision_param: str
    reduce_bytes: int
    compiled: bool
    repeated_attention: float
    repeated_rest: float
    reshards: bool
    permutation: str
    log_freq: int
    filter_fqns: tuple[str, ...]

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards parameters over several ranks."""
        return any(ranks > 1 for ranks in self.parameters)

    @property
    def can_exchange_gradients(self) -> bool:
        """Whether FP8 runs send bf16 gradients as bf16 (`gradient_reduction.py`).

        Under pipeline parallelism FSDP2 adds them up in FP32 first.
        """
        dims, to_fp32 = self.dims, self.reduce_bytes == 4
        on_one_host = dims.dp_shard * dims.cp * dims.tp <= GPUS_OF_HOST
        from_bf16 = self.mixed_precision_param == "bfloat16" and not dims.pp_enabled
        return from_bf16 and to_fp32 and on_one_host

    @property
    def mixed_precision(self) -> bool:
        """Whether torchtitan computes in `mixed_precision_param`: by FSDP2, or by autocast."""
        return self.dims.fsdp_enabled or not (self.dims.tp_enabled or self.dims.pp_enabled)

    @property
    def gathers(self) -> int:
        """All-gathers of a weight per step. A pipeline keeps what it has gathered."""
        return 2 * self.batches.micro_batches if self.reshards else self.batches.rounds


def sharing_inputs(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """The layers, each with the share of its input that follows from the others' recipes."""
    layers = tuple(layers)
    widths: dict[tuple, int] = defaultdict(int)
    for layer in layers:
        widths[_input_of(layer)] += layer.n
    return tuple(replace(layer, share=layer.n / widths[_input_of(layer)]) for layer in layers)


def readers_of_input(name: str) -> tuple[str, ...]:
    """The module that a layer is in, and the names of its linears that read the layer's input."""
    parent, _, leaf = name.rpartition(".")
    return parent, *next((names for names in SHARED_INPUTS if leaf in names), (leaf,))


def _input_of(layer: Layer) -> tuple:
    return readers_of_input(layer.name), layer.k, layer.in_moe, layer.count, layer.recipe
