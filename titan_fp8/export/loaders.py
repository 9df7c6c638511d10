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
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

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

_REFUSED = "vLLM and SGLang refuse this export, or read it wrongly: "
_PARTIAL = _REFUSED + "of these merged layers only the parts in brackets are in FP8: "
_CUT = _REFUSED + (
    "they need whole blocks of 128 of what they merge, multiply or, with tensor parallelism {tp}, "
    "split, unlike "
)
_NO_FP8 = _REFUSED + "they have these layers in high precision only: "
_UNEQUAL = "transformers cannot dequantize weights whose last block is short: "
_MISREAD = (
    "transformers dequantizes to wrong values, without an error, weights whose last block is short "
    "and whose size is a multiple of the number of blocks: "
)


@dataclasses.dataclass(frozen=True)
class Layer:
    """The weights of one layer of vLLM or SGLang: one, or those that are merged, in order."""

    name: str
    weights: tuple[HFTensor, ...]

    @property
    def is_left(self) -> bool:
        """Whether all of it is in high precision."""
        return not any(weight.quantized for weight in self.weights)


def layers_of(run: Run, tensors: Iterable[HFTensor]) -> list[Layer]:
    """The layers that hold the weights of linears and experts."""
    groups: dict[str, list[HFTensor]] = {}
    for tensor in tensors:
        if tensor.source in run.linears:
            groups.setdefault(_layer_name(run, tensor), []).append(tensor)
    order = {part: i for parts in MERGED.values() for i, part in enumerate(parts)}
    return [
        Layer(
            name if len(weights) > 1 else _module(weights[0]),
            tuple(sorted(weights, key=lambda weight: order.get(_leaf(weight), 0))),
        )
        for name, weights in groups.items()
    ]


def check(run: Run, tensors: Sequence[HFTensor], tp: int) -> dict[str, list[Layer]]:
    """The layers that a loader refuses or misreads, by what is wrong.

    Args:
        tp: the degree of tensor parallelism in vLLM and SGLang.
    """
    found: dict[str, list[Layer]] = {
        fault: [] for fault in (_PARTIAL, _NO_FP8, _CUT, _UNEQUAL, _MISREAD)
    }
    for layer in layers_of(run, tensors):
        for fault in _faults(run, layer, tp):
            found[fault].append(layer)
    return {fault: layers for fault, layers in found.items() if layers}


def warnings_of(run: Run, tensors: Sequence[HFTensor], tp: int) -> list[str]:
    """One warning for each kind of fault, with the layers and the filter that avoids it."""
    return [
        f"{fault.format(tp=tp)}{_names(layers)}. {_advice(run, tensors, layers)}"
        for fault, layers in check(run, tensors, tp).items()
    ]


def fused(run: Run, tensors: Sequence[HFTensor], tp: int) -> tuple[list[HFTensor], str]:
    """The tensors, those of faulty layers in high precision, and the names of these layers."""
    layers = {layer.name: layer for faulty in check(run, tensors, tp).values() for layer in faulty}
    faulty = {weight.name for layer in layers.values() for weight in layer.weights}
    result = [
        dataclasses.replace(t, quantized=t.quantized and t.name not in faulty) for t in tensors
    ]
    return result, _names(layers.values())


def _module(weight: HFTensor) -> str:
    return weight.name.removesuffix(".weight")


def _leaf(weight: HFTensor) -> str:
    return _module(weight).rpartition(".")[2]


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


def _faults(run: Run, layer: Layer, tp: int) -> list[str]:
    found = []
    quantized = [weight for weight in layer.weights if weight.quantized]
    if quantized and len(quantized) < len(layer.weights):
        found.append(_PARTIAL)
    elif quantized and _leaf(quantized[0]) in ("lm_head", "gate"):
        found.append(_NO_FP8)
    elif any(_is_cut(run, layer, weight, tp) for weight in quantized):
        found.append(_CUT)
    sizes = [n for weight in quantized for n in weight.shape if n > BLOCK and n % BLOCK]
    if any(n % cdiv(n, BLOCK) for n in sizes):
        found.append(_UNEQUAL)
    if any(n % cdiv(n, BLOCK) == 0 for n in sizes):
        found.append(_MISREAD)
    return found


def _is_cut(run: Run, layer: Layer, weight: HFTensor, tp: int) -> bool:
    """Whether a rank has a part of a block where the loaders need all of it."""
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
    rows_matter = is_split or leaf == "kv_b_proj" or weight is not layer.weights[-1]
    return columns % BLOCK != 0 or (rows_matter and rows % BLOCK != 0)


def _names(layers: Iterable[Layer]) -> str:
    """The layers' names and sizes in FP8; layers that differ only in their number as one."""
    alike: dict[str, list[str]] = {}
    for layer in layers:
        fp8 = (weight for weight in layer.weights if weight.quantized)
        parts = dict.fromkeys(f"{_leaf(w)} {' x '.join(map(str, w.shape))}" for w in fp8)
        name = f"{layer.name} ({', '.join(parts)})"
        alike.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    return ", ".join(
        names[0] if len(names) == 1 else f"{pattern} in {len(names)} layers"
        for pattern, names in alike.items()
    )


def _advice(run: Run, tensors: Sequence[HFTensor], layers: Sequence[Layer]) -> str:
    """How to export these layers in high precision."""
    faulty = {w.source for layer in layers for w in layer.weights if w.quantized}
    quantized = {t.source for t in tensors if t.quantized}
    linears, experts = (
        {name.rpartition(".")[0] for name in run.linears if (run.state[name].dim() == 3) == stacked}
        for stacked in (False, True)
    )
    left, kept = (
        {name.rpartition(".")[0] for name in names} for names in (faulty, quantized - faulty)
    )
    settings = []
    if left & linears:
        allowed = linears - kept
        patterns = [*run.filter_fqns, *_patterns(left & linears, allowed, linears)]
        settings.append(f"filter_fqns = {json.dumps(patterns)}")
    if left & experts:
        if not kept & experts:
            return "Pass --fuse to write them in high precision."
        patterns = _patterns(kept & experts, kept & experts, experts)
        settings.append(f"fqns = {json.dumps(patterns)}")
    return f"Pass --fuse, or set {' and '.join(settings)}, to write them in high precision."


def _patterns(
    wanted: Collection[str], allowed: Collection[str], names: Collection[str]
) -> list[str]:
    """Few short substrings that are in all `wanted` names, and in no names but the `allowed`."""
    hits: dict[str, set[str]] = {}
    for name in sorted(wanted):
        parts = name.split(".")
        for i in range(len(parts)):
            for j in range(i + 1, len(parts) + 1):
                if not (parts[i].isdecimal() or parts[j - 1].isdecimal()):
                    hits.setdefault(".".join(parts[i:j]), set())
    for pattern, found in hits.items():
        found.update(name for name in names if pattern in name)
    hits = {p: found for p, found in hits.items() if found <= set(allowed) or p in wanted}
    result, rest = [], set(wanted)
    while rest:
        best = max(hits, key=lambda pattern: (len(hits[pattern] & rest), -len(pattern)))
        result.append(best)
        rest -= hits[best]
    return result
