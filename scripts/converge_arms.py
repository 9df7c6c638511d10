"""The arms of the convergence experiment: runs of one model that differ in one thing each.

Except for that, all start from the same weights and read the same text. "blockwise_ulp" and others
with this ending repeat an arm from the weights of "bf16_ulp". `converge.py` runs them, and
`converge_verdict.py` judges them by their roles:

    baseline  bf16, what the others are compared with
    bf16      bf16 again, with another order of the data, with weights one ulp off or rounded with
              other random bits: shows how far apart equally good runs are
    fp8       must not differ from bf16 by more than that
    errors    bf16 with random errors as large as those of FP8: shows what these do to the loss
    control   must differ from bf16 by more than that, or the experiment detects no such difference
    resumed   another arm again, killed in the middle and resumed
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_logs import InputError

SETTINGS = "experiment.json"


@dataclass(frozen=True)
class Arm:
    """One arm.

    Attributes:
        recipe: `recipe` of the linear section.
        reordered: reads the lines of the training text in another order, of this number.
        perturbed: starts from weights that are one ulp off, in directions drawn from this seed.
        rounding: rounds new weights with other random bits, of this number; only where parameters
            are bf16.
        converter: of converge_plugin, applied after those of the TOML; none if empty.
        twin: for a resumed arm, the arm that it repeats.
    """

    role: str
    recipe: str = "bf16"
    reordered: int = 0
    perturbed: int = 0
    rounding: int = 0
    converter: str = ""
    twin: str | None = None


ARMS = {
    "bf16": Arm("baseline"),
    "bf16_order": Arm("bf16", reordered=1),
    "bf16_order_2": Arm("bf16", reordered=2),
    "bf16_ulp": Arm("bf16", perturbed=1),
    "bf16_ulp_2": Arm("bf16", perturbed=2),
    "bf16_rounding": Arm("bf16", rounding=1),
    "bf16_rounding_2": Arm("bf16", rounding=2),
    "blockwise": Arm("fp8", "blockwise"),
    "rowwise": Arm("fp8", "rowwise"),
    "blockwise_pow2": Arm("fp8", "blockwise_pow2"),
    "rowwise_with_gw_hp": Arm("fp8", "rowwise_with_gw_hp"),
    "blockwise_ulp": Arm("fp8", "blockwise", perturbed=1),
    "rowwise_ulp": Arm("fp8", "rowwise", perturbed=1),
    "blockwise_pow2_ulp": Arm("fp8", "blockwise_pow2", perturbed=1),
    "bf16_errors": Arm("errors", converter="converge.random_errors"),
    "bf16_errors_ulp": Arm("errors", converter="converge.random_errors", perturbed=1),
    "control": Arm("control", converter="converge.control"),
    "control_6_bits": Arm("control", converter="converge.control_6_bits"),
    "bf16_resumed": Arm("resumed", twin="bf16"),
    "blockwise_resumed": Arm("resumed", "blockwise", twin="blockwise"),
}
BASELINE = "bf16"
DEFAULT_ARMS = ("bf16", "bf16_order", "bf16_ulp", "blockwise", "rowwise", "blockwise_pow2")
DEFAULT_ARMS += ("control",)


@dataclass(frozen=True)
class Settings:
    """What all arms of a results folder have in common.

    Attributes:
        steps, warmup, every: of training, of its warm-up, and between two evaluations.
        tokens: in one step, over all ranks.
        config, text: digests of the TOML and of the training and held-out text.
        flags: given to torchtitan besides the TOML, for every arm.
        tokenizer: digest of the tokenizer; empty in results from before it was recorded.
    """

    model: str
    steps: int
    warmup: int
    every: int
    tokens: int
    config: str
    text: str
    flags: list[str]
    tokenizer: str = ""


def read_settings(results: Path) -> Settings | None:
    """The settings of a results folder; None if it has none.

    Raises:
        InputError: the file is damaged.
    """
    file = results / SETTINGS
    if not file.exists():
        return None
    try:
        settings = Settings(**json.loads(file.read_text()))
        for name in ("steps", "warmup", "every", "tokens"):
            if not isinstance(value := getattr(settings, name), int):
                raise ValueError(f"{name} must be an integer, not {value!r}")
        if min(settings.steps, settings.every) < 1:
            raise ValueError("steps and every must be positive")
    except (ValueError, TypeError) as error:
        raise InputError(f"{file}: {error}") from None
    return settings


def write_settings(results: Path, settings: Settings) -> None:
    part = results / f"{SETTINGS}.part"
    part.write_text(json.dumps(asdict(settings), indent=2) + "\n")
    part.rename(results / SETTINGS)
