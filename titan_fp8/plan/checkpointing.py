"""What of forward is computed again in backward, under activation checkpointing."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

from titan_fp8.plan.run import Layer


def repeated_shares(checkpoint: Any) -> tuple[float, float]:
    """The shares of forward's attention and of its other operations that backward repeats."""
    if checkpoint.mode == "full":
        return 1.0, 1.0
    if checkpoint.mode == "selective":
        if checkpoint.selective_ac_option == "op":
            return 0.0, 1.0
        if not checkpoint.selective_ac_option.isdecimal():
            raise ValueError(
                f"activation_checkpoint.selective_ac_option = {checkpoint.selective_ac_option!r}: "
                "allowed are 'op' and whole numbers"
            )
        share = 1 / max(1, int(checkpoint.selective_ac_option))
        return share, share
    return 0.0, 0.0


def with_repeats(layers: list[Layer], checkpoint: Any, compiled: bool) -> list[Layer]:
    """The layers, each with the share of its forward GEMMs that backward repeats.

    Blocks are checkpointed, and the output layer is not. At the level of ops every second linear of
    a block is saved, in the order of their calls; experts, and the linears of blocks with experts
    if they are compiled, are not (`titan_fp8/activation_checkpointing.py`).
    """
    share, by_op = repeated_shares(checkpoint)[1], checkpoint.selective_ac_option == "op"
    by_op = by_op and checkpoint.mode == "selective"
    blocks: dict[str, list[str]] = defaultdict(list)
    for layer in layers:
        if not layer.groups:
            blocks[block_of(layer.fqns[0])].append(layer.fqns[0])
    calls: dict[str, int] = {}
    for names in blocks.values():
        # w2 is defined before w3, and called after it.
        order = sorted(enumerate(names), key=lambda at: at[0] + 1.5 * at[1].endswith(".w2"))
        calls |= {name: position for position, (_, name) in enumerate(order, start=1)}

    def repeats(layer: Layer) -> float:
        name = layer.fqns[0]
        if not block_of(name):
            return 0.0
        if not by_op or layer.groups or (layer.in_moe and compiled):
            return share
        return float(calls[name] % 2 == 0)

    return [replace(layer, repeats=repeats(layer)) for layer in layers]


def block_of(name: str) -> str:
    """The block that a module is in, such as "layers.3"; "" for the output layer."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else ""
