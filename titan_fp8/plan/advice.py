"""Changes to a config that make FP8 pay more, found by predicting the step with each of them."""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from titan_fp8.plan.costs import cost_of, layer_us
from titan_fp8.plan.run import Layer, Run, readers_of_input, sharing_inputs
from titan_fp8.plan.step import Step, baseline, predict
from titan_fp8.plan.times import Times
from titan_fp8.recipe import BF16, get_recipe

WORTH = 0.001
"""A change is advised if it saves at least this share of a step."""
IDLE = 0.01
"""Waiting for the CPU is worth a word where it takes more than this share of a step."""
FEW_TOKENS = 0.15
"""Tokens are few where quantizing the weights takes more than this share of a layer's time."""
FILTERED = "advised by --filter auto"
MOE_UNDER_TP = (
    "Measure this run before you rely on the prediction. MoE blocks under TP have been measured in "
    "two runs only, DeepSeekV3-16B with TP 2 on 4 H200s. With EP 4 it ran at 0.94x of bf16. With "
    "EP 2 and expert TP 2 it ran at 1.55x, though 0.98x is predicted: bf16 took 1.4 times as long "
    "as predicted."
)


class Changes(NamedTuple):
    """What to change in a run, each change on top of those before it.

    Attributes:
        refused: layers that the config converts and at which training would stop.
        runnable: the run with these in bf16.
        setting: the line of `fsdp_all_gather` that makes the step shorter, "" if none does.
        gathered: `runnable` with this setting.
        left_out: names of layers without which the step is shorter still.
        best: `gathered` with these in bf16, too.
    """

    refused: list[Layer]
    runnable: Run
    setting: str
    gathered: Run
    left_out: list[str]
    best: Run


def changes(run: Run, times: Times) -> Changes:
    """The changes that make the step shorter, each found after those before it."""
    refused = [layer for layer in run.layers if layer.recipe != BF16 and not layer.fits]
    runnable = without(run, [layer.name for layer in refused])
    gathered, setting = _best_gather(runnable, times)
    names = left_out(gathered, times)
    return Changes(refused, runnable, setting, gathered, names, without(gathered, names))


def left_out(run: Run, times: Times) -> list[str]:
    """Names of layers to leave in bf16.

    Again and again, the layer or the group of layers without which the step is shortest, as long
    as that makes the step shorter. Groups are layers that read one input, which is quantized once,
    layers of one module, and all layers.
    """
    names: list[str] = []
    current = run
    while groups := list(_groups(current)):
        tried = {group: predict(without(current, list(group)), times).ms for group in groups}
        best = min(tried, key=lambda group: tried[group])
        if tried[best] > (1 - WORTH) * predict(current, times).ms:
            break
        names += best
        current = without(current, list(best))
    return names


def _groups(run: Run) -> Iterator[tuple[str, ...]]:
    """Names of layers in FP8 that may gain more together than each alone; single ones first."""
    names = sorted({layer.name for layer in run.layers if layer.recipe != BF16})
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in names:
        readers = readers_of_input(name)
        for key in ((name,), readers, readers[:1], ()):
            groups[key].append(name)
    yield from dict.fromkeys(map(tuple, sorted(groups.values(), key=len)))


def without(run: Run, names: list[str]) -> Run:
    """The run with these layers in bf16."""
    parents = {name.rpartition(".")[0] for name in names}
    layers = []
    for layer in run.layers:
        if layer.name in names and layer.recipe != BF16:
            layer = layer.in_bf16(FILTERED)
        elif not layer.groups and layer.name.rpartition(".")[0] in parents:
            layer = replace(layer, fused=False)  # the feed-forward is no longer fused
        layers.append(layer)
    return replace(run, layers=sharing_inputs(layers))


def gathering(run: Run, fp8: bool) -> Run:
    """The run with `fsdp_all_gather` in both sections."""
    layers = tuple(
        replace(layer, gathers_fp8=fp8 and layer.recipe != BF16 and layer.ranks > 1)
        for layer in run.layers
    )
    return replace(run, layers=layers)


def _best_gather(run: Run, times: Times) -> tuple[Run, str]:
    """The run with the better `fsdp_all_gather`, and what to change, "" if nothing."""
    for fp8 in (True, False):
        changed = gathering(run, fp8)
        if predict(changed, times).ms < (1 - WORTH) * predict(run, times).ms:
            return changed, f"fsdp_all_gather = {str(fp8).lower()}"
    return run, ""


def advice(run: Run, advised: Changes, times: Times) -> list[str]:
    """Sentences for the user. `advised` are the changes to `run`."""
    found = [*_refusals(advised.refused), *_precision(run)]
    if run.moe_blocks and run.dims.tp_enabled:
        found.append(MOE_UNDER_TP)
    bf16, now = predict(baseline(run), times), predict(advised.runnable, times)
    gathered, then = predict(advised.gathered, times), predict(advised.best, times)
    if advised.setting:
        found.append(f"Set {advised.setting}: {_change(now, gathered, bf16)}.")
    else:
        found += _gathers(advised.runnable, times)
    if advised.left_out:
        change = _change(gathered, then, bf16)
        if all(layer.recipe == BF16 for layer in advised.best.layers):
            found.append(f"FP8 pays for no layer here. With all of them in bf16 {change}.")
        else:
            too = ", too" if advised.setting else ""
            found.append(
                f"Leave out {', '.join(advised.left_out)}{too}: {change}. "
                "--filter auto prints the setting."
            )
    found += _multiples(run)
    found += _tokens(advised.best, times)
    if now.waiting > IDLE * now.ms:
        done = then.waiting <= IDLE * then.ms
        remedy = (
            "After these changes it does not."
            if done
            else "Give each rank more tokens, by a larger local_batch_size or seq_len or by fewer "
            "ranks of TP."
        )
        found.append(
            f"The GPU waits {now.waiting:.0f} ms for the CPU: forward takes the CPU "
            f"{now.host_forward:.0f} ms and the GPU {now.gpu_forward:.0f} ms, forward and backward "
            f"{now.host:.0f} and {now.passes:.0f} ms. {remedy} CPU times differ between machines "
            "by up to 80 %."
        )
    return found


def _change(now: Step, then: Step, bf16: Step) -> str:
    speed = f"{bf16.ms / then.ms:.2f}x of bf16"
    return f"the step takes {then.ms:.0f} ms instead of {now.ms:.0f} ({speed})"


def fragment(run: Run, advised: Changes, times: Times) -> str:
    """TOML sections with the changes to `run`, as far as patterns can name the layers."""
    setting = advised.setting
    names = [*dict.fromkeys(layer.name for layer in advised.refused), *advised.left_out]
    patterns = list(run.filter_fqns)
    grouped = {layer.name for layer in run.layers if layer.groups}
    skipped = []
    for name in names:
        if name in grouped:
            continue
        pattern = name.partition("*.")[2] or name
        others = {f for layer in run.layers if layer.name != name for f in layer.fqns}
        if any(pattern in fqn for fqn in others):
            skipped.append(name)
        elif pattern not in patterns:
            patterns.append(pattern)
    left = [name for name in names if name not in skipped]
    changed = without(advised.gathered, left)
    speed = predict(baseline(run), times).ms / predict(changed, times).ms
    lines = [f"# Advised by titan_fp8.plan: predicted speed {speed:.2f}x of bf16."]
    lines += [
        f"# {name} is not left out: its pattern would match other layers, too." for name in skipped
    ]
    lines += ["[quantize.linear.titan_fp8]", *([setting] if setting else []), "filter_fqns = ["]
    lines += [*(f"    {json.dumps(pattern)}," for pattern in patterns), "]"]
    if any(name in grouped for name in names):
        # Without the second line the permutation would follow the recipe.
        lines += ["", "[quantize.grouped_mm.titan_fp8]", f'recipe = "{BF16}"']
        lines += [f'permutation = "{run.permutation}"']
    elif setting and grouped:
        lines += ["", "[quantize.grouped_mm.titan_fp8]", setting]
    return "\n".join(lines) + "\n"


def _refusals(refused: list[Layer]) -> Iterator[str]:
    for layer in refused:
        sizes = ", ".join(
            f"{dim} = {size}" for dim, size in (("N", layer.n), ("K", layer.k)) if size % 16
        )
        yield (
            f"Training stops at {layer.name}: {sizes} on a rank must be a multiple of 16. Use "
            "another degree of parallelism, or leave the layer out (--filter auto)."
        )


def _precision(run: Run) -> Iterator[str]:
    option, dtype, why = "mixed_precision_param", run.mixed_precision_param, ""
    if not run.mixed_precision:
        option, dtype = "dtype", run.dtype
        why = ": under TP or PP without FSDP, torchtitan has no mixed precision"
    if dtype != "bfloat16":
        yield (
            f"The model computes in {dtype}{why}. The times above are those of bf16; with "
            f'training.{option} = "bfloat16" they hold.'
        )


def _multiples(run: Run) -> Iterator[str]:
    odd: dict[int, list[str]] = defaultdict(list)
    for layer in run.layers:
        if layer.recipe == BF16 and "multiple" in layer.reason:
            for size in {layer.n, layer.k}:
                if size % 16:
                    odd[size].append(layer.name)
    for size, names in odd.items():
        low = size // 16 * 16
        near = f"{low} or {low + 16}" if low else "16"
        yield (
            f"{size} is not a multiple of 16, so {', '.join(dict.fromkeys(names))} must stay in "
            f"bf16. With {near} they can run in FP8."
        )


def _tokens(run: Run, times: Times) -> Iterator[str]:
    few = []
    for layer in run.layers:
        if layer.recipe == BF16 or layer.gathers_fp8:
            continue
        cost = cost_of(layer, run, times)
        weights = 2 * times.copy_us(3 * layer.elements)  # read in bf16, written in FP8, twice
        if weights > FEW_TOKENS * layer_us(layer, cost, run):
            few.append(layer.name)
        alignment = get_recipe(layer.recipe).alignment
        if layer.groups and layer.m < alignment * layer.groups:
            yield (
                f"{layer.name}: {layer.m / layer.groups:.0f} tokens per expert are padded to "
                f"{alignment}. Give each rank more tokens or fewer experts."
            )
    if few:
        yield (
            f"A rank has few tokens for {', '.join(dict.fromkeys(few))}: quantizing the weights "
            f"takes more than {FEW_TOKENS:.0%} of their time. Use a larger local_batch_size or "
            "seq_len."
        )


def _gathers(run: Run, times: Times) -> Iterator[str]:
    """Why FP8 gathers would not help, though the GPU would be faster."""
    now, then = predict(run, times), predict(gathering(run, True), times)
    if then.gpu < now.gpu - 1:
        yield (
            f"fsdp_all_gather = true would save the GPU {now.gpu - then.gpu:.0f} ms a step, but "
            f"the GPU would wait for the CPU: {then.ms:.0f} ms instead of {now.ms:.0f}."
        )
