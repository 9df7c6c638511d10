"""What the FP8 experts of both adapters share: what they compute, and which ones are converted."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_fp8.functional.swiglu import fp8_swiglu
from titan_fp8.modules.report import ConversionReport
from titan_fp8.recipe import BF16

_NO_EXPERTS = ", which has no grouped experts: leave out the converter for experts, and its keys"


def run_experts(
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    x: Tensor,
    num_tokens_per_expert: Tensor,
    recipe: str,
    emulate: bool,
    aligned: bool = False,
) -> Tensor:
    """w2(silu(w1 x) * w3 x) for each expert's tokens.

    x (M, dim), sorted by expert; w1 and w3 (E, hidden, dim), w2 (E, dim, hidden). Returns (M, dim).
    """
    offs = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
    y = fp8_swiglu(x, w1, w2, w3, offs, recipe=recipe, emulate=emulate, aligned=aligned)
    return y.type_as(x)


class Candidate(NamedTuple):
    """Experts that may be converted."""

    fqn: str
    shapes: str
    """Of the parameters."""
    why_left: str | None
    """Why they cannot be converted; None if they can."""
    experts: Any
    """The module, or the config and its place."""
    was_selected: bool = False
    """They have been converted to this recipe before: left, and no pattern of theirs is wrong."""


def select(
    candidates: Iterable[Candidate], recipe: str, fqns: Sequence[str]
) -> tuple[ConversionReport, list[Candidate]]:
    """The report on all candidates, and those to convert: their names contain one of `fqns`.

    Raises:
        ValueError: a pattern of fqns that matches no experts that can be converted.
    """
    report, selected, convertible = ConversionReport(), list[Candidate](), set[str]()
    for candidate in candidates:
        fqn, shapes, reason, *_ = candidate
        hits = {pattern for pattern in fqns if pattern in fqn}
        if reason is None or candidate.was_selected:
            convertible |= hits
        if not hits:
            reason = "no pattern of fqns matches"
        elif reason is None and recipe == BF16:
            reason = 'recipe = "bf16"'
        if report.add(fqn, shapes, recipe, reason):
            selected.append(candidate)
    for pattern in fqns:
        if pattern not in convertible:
            raise ValueError(
                f"fqns = {list(fqns)!r}: {pattern!r} converts nothing in this model"
                + (f":\n{report}" if report.converted or report.left else _NO_EXPERTS)
            )
    return report, selected


def shapes_of(parameters: Iterable[Tensor]) -> str:
    """As reports show them."""
    return ", ".join(" x ".join(map(str, p.shape)) for p in parameters)
