"""What vLLM, SGLang and transformers ask of block-FP8 weights, beyond their format.

vLLM and SGLang merge some linears into one, and all experts of a layer. Read in their sources:

- The parts of a merged layer are all in FP8, or all listed in `modules_to_not_convert`.
- Each part but the last has whole blocks of 128 rows, since the blocks of the next one follow.
  Tensor parallelism splits weights, experts included, at whole blocks only.
- Each weight has whole blocks of 128 columns: inputs are quantized in groups of 128.
- vLLM dequantizes `kv_b_proj` by whole blocks.
- The output layer and the router's gate are in high precision.
- SGLang computes the one shared expert beside 256 others as one more of them.

transformers dequantizes a weight as if all of its blocks had the same size: where the last one is
short it refuses the weight or, if the blocks divide the size, reads wrong values.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from titan_fp8.export.run import Run
from titan_fp8.export.tensors import HFTensor
from titan_fp8.layouts import BLOCK, cdiv

MERGED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""SGLang's names of merged linears, and their parts in order."""

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")
"""How tensor parallelism splits a linear; ranks have whole copies of others."""

Layer = Sequence[HFTensor]
"""The weights of one layer of vLLM or SGLang: one, or those that are merged, in order."""


def in_fp8(layer: Layer) -> list[HFTensor]:
    return [weight for weight in layer if weight.quantized]


def _faults_of(run: Run, layer: Layer, tp: int) -> Iterator[str]:
    """What is wrong with a layer at a degree of tensor parallelism; its name is to follow."""
    fp8 = in_fp8(layer)
    refused = "vLLM and SGLang refuse this export, or read it wrongly: "
    if 0 < len(fp8) < len(layer):
        yield f"{refused}of these merged layers only the parts in brackets are in FP8: "
    elif any(_leaf(weight) in ("lm_head", "gate") for weight in fp8):
        yield f"{refused}they have these layers in high precision only: "
    elif _is_cut(run, layer, tp):
        yield (
            f"{refused}they need whole blocks of {BLOCK} of what they merge, multiply or, with "
            f"tensor parallelism {tp}, split, unlike "
        )
    short = [n for weight in fp8 for n in weight.shape if n > BLOCK and n % BLOCK]
    if any(n % cdiv(n, BLOCK) for n in short):
        yield "transformers cannot dequantize weights whose last block is short: "
    if not all(n % cdiv(n, BLOCK) for n in short):
        yield (
            "transformers dequantizes to wrong values, without an error, weights whose last block "
            "is short and whose size is a multiple of the number of blocks: "
        )


def _is_cut(run: Run, layer: Layer, tp: int) -> bool:
    """Whether a rank has a part of a block where the loaders need all of it."""
    for weight in in_fp8(layer):
        leaf = _leaf(weight)
        rows, columns = map(float, weight.shape)
        if leaf in ("k_proj", "v_proj"):  # a rank has one head at least
            heads = run.args.n_kv_heads or run.args.n_heads
            rows *= max(1, heads // tp) / heads
        elif leaf in _BY_ROWS:
            rows /= tp
        elif leaf in _BY_COLUMNS:
            columns /= tp
        is_split = tp > 1 and leaf in _BY_ROWS
        rows_matter = is_split or leaf == "kv_b_proj" or weight is not layer[-1]
        if columns % BLOCK or (rows_matter and rows % BLOCK):
            return True
    return False


def layers_of(run: Run, tensors: Iterable[HFTensor]) -> dict[str, Layer]:
    """The layers that hold the weights of linears and experts, by name."""
    groups: dict[str, list[HFTensor]] = {}
    for tensor in tensors:
        if tensor.source in run.linears:
            groups.setdefault(_layer_name(run, tensor), []).append(tensor)
    order = {part: i for parts in MERGED.values() for i, part in enumerate(parts)}
    return {
        name if len(layer) > 1 else _module(layer[0]): sorted(
            layer, key=lambda weight: order.get(_leaf(weight), 0)
        )
        for name, layer in groups.items()
    }


def _layer_name(run: Run, weight: HFTensor) -> str:
    """The layer that the weight is merged into, if others are, too."""
    parent, _, leaf = _module(weight).rpartition(".")
    if weight.expert is not None:
        return parent.rpartition(".experts.")[0] + ".experts"
    if parent.endswith(".shared_experts"):
        moe = run.args.moe_args
        if (moe.num_experts, moe.num_shared_experts) == (256, 1):
            return parent.removesuffix(".shared_experts") + ".experts"
    merged = (name for name, parts in MERGED.items() if leaf in parts)
    return f"{parent}.{next(merged, leaf)}" if parent else leaf


def _faulty(run: Run, tensors: Iterable[HFTensor], tp: int) -> dict[str, dict[str, Layer]]:
    """The layers that a loader refuses or misreads, by what is wrong and by name."""
    found: dict[str, dict[str, Layer]] = {}
    for name, layer in layers_of(run, tensors).items():
        for fault in _faults_of(run, layer, tp):
            found.setdefault(fault, {})[name] = layer
    return found


def warnings_of(run: Run, tensors: Sequence[HFTensor], tp: int) -> list[str]:
    """One warning for each kind of fault, with the layers.

    `tp` is the degree of tensor parallelism in vLLM and SGLang.
    """
    return [
        f"{fault}{_names(layers)}. Pass --fuse to write them in high precision"
        for fault, layers in _faulty(run, tensors, tp).items()
    ]


def fused(run: Run, tensors: Sequence[HFTensor], tp: int) -> tuple[list[HFTensor], str]:
    """The tensors, those of faulty layers in high precision, and the names of these layers."""
    faulty = {
        n: layer for layers in _faulty(run, tensors, tp).values() for n, layer in layers.items()
    }
    left = {weight.name for layer in faulty.values() for weight in layer}
    result = [dataclasses.replace(t, quantized=t.quantized and t.name not in left) for t in tensors]
    return result, _names(faulty)


def _module(weight: HFTensor) -> str:
    return weight.name.removesuffix(".weight")


def _leaf(weight: HFTensor) -> str:
    return _module(weight).rpartition(".")[2]


def _names(layers: Mapping[str, Layer]) -> str:
    """The layers' names and sizes in FP8; layers that differ only in their number as one."""
    alike: dict[str, list[str]] = {}
    for name, layer in layers.items():
        parts = [f"{_leaf(w)} {' x '.join(map(str, w.shape))}" for w in in_fp8(layer)]
        text = f"{name} ({', '.join(dict.fromkeys(parts))})"
        alike.setdefault(re.sub(r"\.\d+\.", ".*.", text), []).append(text)
    return ", ".join(
        texts[0] if len(texts) == 1 else f"{pattern} in {len(texts)} layers"
        for pattern, texts in alike.items()
    )
