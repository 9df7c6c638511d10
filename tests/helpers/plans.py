"""The models, converters and parallel plans under test, one table for all tests."""

import dataclasses
from dataclasses import dataclass

RECIPES = ("blockwise", "rowwise")
LINEAR = "quantize.linear.titan_fp8"
GROUPED_MM = "quantize.grouped_mm.titan_fp8"
BOTH = (LINEAR, GROUPED_MM)
CONVERTERS = {"llama3": (LINEAR,), "deepseek_v3": BOTH}
"""The converters that have something to convert, by model."""


@dataclass(frozen=True)
class Plan:
    """Degrees of parallelism, as in torchtitan's [parallelism].

    `replicate` is data_parallel_replicate_degree and `fsdp` data_parallel_shard_degree. HSDP has
    both above 1, DDP only the first.
    """

    model: str
    replicate: int = 1
    fsdp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1

    @property
    def name(self) -> str:
        degrees = dataclasses.asdict(self)
        model = degrees.pop("model")
        return "-".join([model, *(f"{k}{v}" for k, v in degrees.items() if v > 1)])

    @property
    def shares(self) -> int:
        """The number of parts into which the ranks divide a batch."""
        return self.replicate * self.fsdp

    @property
    def sequences(self) -> int:
        """The sequences of a batch. A rank has one or, without FSDP, two.

        Under tensor parallelism with etp 1, torchtitan's gradients are wrong for two
        (docs/history/log_2026-11-20.md).
        """
        return 2 * self.replicate

    @property
    def ranks(self) -> int:
        return self.shares * self.tp * self.pp

    @property
    def converters(self) -> tuple[str, ...]:
        return CONVERTERS[self.model]

    @property
    def degrees(self) -> dict[str, int]:
        """The keys of [parallelism]."""
        return {
            "data_parallel_replicate_degree": self.replicate,
            "data_parallel_shard_degree": self.fsdp,
            "tensor_parallel_degree": self.tp,
            "expert_parallel_degree": self.ep,
            "expert_tensor_parallel_degree": self.etp,
            "pipeline_parallel_degree": self.pp,
        }

    def flags(self, recipe: str) -> list[str]:
        """torchtitan's flags for the model, the plan and the recipe."""
        flags = ["--job.custom_config_module", "titan_fp8.plugin", "--model.name", self.model]
        flags += ["--model.converters", ",".join(self.converters)]
        flags += [f"--{LINEAR}.recipe", recipe]
        for name, degree in self.degrees.items():
            flags += [f"--parallelism.{name}", str(degree)]
        return flags


PLANS = (
    Plan("llama3", fsdp=2),
    Plan("llama3", replicate=2),
    Plan("llama3", fsdp=2, tp=2),
    Plan("llama3", pp=2),
    Plan("deepseek_v3", fsdp=2),
    Plan("deepseek_v3", tp=2),
    Plan("deepseek_v3", fsdp=2, ep=2),
    Plan("deepseek_v3", replicate=2, fsdp=2, ep=2),
    Plan("deepseek_v3", fsdp=2, tp=2, ep=2, etp=1),
    Plan("deepseek_v3", fsdp=2, tp=2, ep=2, etp=2),
    Plan("deepseek_v3", pp=2),
)
