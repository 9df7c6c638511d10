"""The health of one step over all ranks, as metrics, as text and as warnings.

Ranks are combined by one sum and one maximum over all of them; tokens per expert are few enough to
be gathered. Shares and errors are those of all sampled elements together: each rank counts with as
many as it has sampled. Ranks that compute the same, as data-parallel ranks do with a weight, do not
change a share. The spread of an operand's scales is over all ranks.
"""

import re
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titan_fp8.health.observer import OPERANDS
from titan_fp8.health.statistics import MAXIMA, SUMS, Stat
from titan_fp8.modules.report import text_table

UNDERFLOW_BOUND = 0.05
"""A warning names the layers in which more than this share of an operand's elements became zero."""
NAMED = 5
"""Layers that a warning names, and lines of the worst ones in the log."""


def kind_of(layer: str) -> str:
    """A layer's name without numbers: layers.3.attention.wq is an attention.wq."""
    return re.sub(r"^layers\.|(?<=\.)\d+\.|^\d+\.", "", layer)


@dataclass
class Report:
    """The statistics of a step.

    Attributes:
        names: of the layers, on whatever ranks they are.
        table: (layers, OPERANDS, Stat), float64.
        tokens: by module of experts, the mean, the most and the fewest tokens of one expert in one
            product, padding included.
    """

    names: list[str]
    table: Tensor
    tokens: dict[str, tuple[float, float, float]]

    @classmethod
    def of_ranks(
        cls, own: list[str], own_table: Tensor, sizes: list[list[Tensor]], device: torch.device
    ) -> "Report":
        """What `Observer.table` has returned for the layers `own`, and for those of other ranks.

        The ranks reduce on `device`.
        """
        counts = {
            layer.rpartition(".")[0]: torch.cat(products)
            for layer, products in zip(own, sizes, strict=True)
            if products
        }
        ranks = [(own, counts)]
        if dist.is_initialized():
            ranks *= dist.get_world_size()
            dist.all_gather_object(ranks, (own, counts))
        names = list(dict.fromkeys(name for of_rank, _ in ranks for name in of_rank))
        table = torch.zeros(len(names), len(OPERANDS), len(Stat), dtype=torch.float64)
        table[..., MAXIMA] = -torch.inf
        table[[names.index(name) for name in own]] = own_table
        if dist.is_initialized():
            for op, columns in ((dist.ReduceOp.SUM, SUMS), (dist.ReduceOp.MAX, MAXIMA)):
                part = table[..., columns].contiguous().to(device)
                dist.all_reduce(part, op)
                table[..., columns] = part.cpu()
        tokens = {}
        for module in dict.fromkeys(module for _, of_rank in ranks for module in of_rank):
            every = torch.cat([of_rank[module] for _, of_rank in ranks if module in of_rank])
            tokens[module] = every.double().mean().item(), every.max().item(), every.min().item()
        return cls(names, table, tokens)

    # Shares and errors

    def kinds(self) -> dict[str, list[int]]:
        """The rows of the layers of each kind."""
        kinds = defaultdict(list)
        for row, name in enumerate(self.names):
            kinds[kind_of(name)].append(row)
        return kinds

    def metrics(self) -> dict[str, float]:
        """The scalars for TensorBoard, by tag. What nothing was seen of is left out."""
        scalars: dict[str, float] = {}
        spreads = _spread(self.table).amax(1)
        for kind, rows in self.kinds().items():
            for name, shares in _ratios(self.table[rows].sum(0)).items():
                for operand, share in zip(OPERANDS, shares.tolist()):
                    scalars[f"health_{name}/{kind}/{operand.replace(' ', '_')}"] = share
            scalars[f"health_scale_spread/{kind}"] = spreads[rows].max().item()
        of_layers = {name: _worst(shares) for name, shares in _ratios(self.table).items()}
        for name, values in (of_layers | {"scale_spread": spreads}).items():
            for layer, value in zip(self.names, values.tolist()):
                scalars[f"health_layer_{name}/{layer}"] = value
        for module, (mean, most, fewest) in self.tokens.items():
            start = f"health_tokens_per_expert/{module}"
            scalars |= {f"{start}/mean": mean, f"{start}/max": most, f"{start}/min": fewest}
        return {tag: value for tag, value in scalars.items() if value == value}

    def underflow(self) -> list[tuple[int, float, str]]:
        """(row, share, operand) of each layer at the operand that is worst; worst layers first."""
        shares, operands = _ratios(self.table)["underflow"].nan_to_num(0).max(1)
        worst = zip(range(len(shares)), shares.tolist(), (OPERANDS[i] for i in operands))
        return sorted(worst, key=lambda each: -each[1])

    def warnings(self, step: int) -> list[str]:
        """What is wrong, in words, naming layers."""
        messages = []
        if found := [each for each in self.underflow() if each[1] > UNDERFLOW_BOUND]:
            layers = [f"{self.names[i]} ({share:.1%} of {operand})" for i, share, operand in found]
            messages.append(
                f"step {step}: more than {UNDERFLOW_BOUND:.0%} of non-zero elements became zero "
                f"in FP8 in {_listed(layers)}"
            )
        if broken := [f"{layer} ({', '.join(operands)})" for layer, operands in self.non_finite()]:
            messages.append(f"step {step}: NaN or Inf in the GEMM operands of {_listed(broken)}")
        return messages

    def non_finite(self) -> list[tuple[str, list[str]]]:
        """Layers and their operands that hold NaN or Inf.

        They come in the order in which NaN spreads: in forward from the first layer on, and if it
        does not begin there, from the last layer back.
        """
        found = [
            (layer, [operand for operand, count in zip(OPERANDS, counts) if count])
            for layer, counts in zip(self.names, self.table[..., Stat.NON_FINITE].tolist())
        ]
        forward = [each for each in found if any("fprop" in operand for operand in each[1])]
        backward = [each for each in reversed(found) if each[1] and each not in forward]
        return forward + backward

    def __str__(self) -> str:
        """A line for each kind of layers, and one for each of the worst layers."""
        rows: list[tuple[str, ...]] = [("", "underflow", "at 448", "error", "scale spread")]
        rows += [(kind, *_cells(self.table[of_kind])) for kind, of_kind in self.kinds().items()]
        worst = [row for row, share, _ in self.underflow()[:NAMED] if share > 0]
        rows += [("worst layers",)] if worst else []
        rows += [(self.names[row], *_cells(self.table[row : row + 1])) for row in worst]
        lines = text_table(rows).splitlines()
        uneven = sorted(self.tokens.items(), key=lambda each: -each[1][1] / max(each[1][0], 1))
        for module, (mean, most, fewest) in uneven[:NAMED]:
            lines.append(
                f"{module}: {fewest:.0f} to {most:.0f} tokens per expert, {mean:.0f} on average"
            )
        return "\n".join(lines)


def _ratios(table: Tensor) -> dict[str, Tensor]:
    """Shares and relative errors of (..., Stat); NaN where nothing was counted."""
    stats = table.unbind(-1)
    nonzero = stats[Stat.NONZERO]
    return {
        "underflow": stats[Stat.UNDERFLOW] / nonzero,
        "at_448": stats[Stat.AT_MAX] / nonzero,
        "error": (stats[Stat.ERROR] / stats[Stat.SQUARES]).sqrt(),
        "non_finite": stats[Stat.NON_FINITE] / stats[Stat.BLOCKS],
    }


def _spread(table: Tensor) -> Tensor:
    """log2 of the largest scale of a tensor over its smallest; 0 where there is none."""
    spread = table[..., Stat.LOG2_MAX] + table[..., Stat.LOG2_MIN]
    return torch.where(spread.isfinite(), spread, 0)


def _worst(values: Tensor) -> Tensor:
    """The largest of each row that is not NaN; NaN if all are."""
    worst = values.nan_to_num(-1).amax(-1)
    return torch.where(worst < 0, torch.nan, worst)


def _cells(table: Tensor) -> tuple[str, ...]:
    """Of layers (n, OPERANDS, Stat) together, each statistic at the operand where it is worst."""
    cells = []
    for values in list(_ratios(table.sum(0)).values())[:3]:
        worst = values.nan_to_num(-1).argmax()
        share = values[worst].item()
        cells.append(f"{share:.2%} {OPERANDS[worst]}" if share == share else "-")
    return *cells, f"2^{_spread(table).max():.1f}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more layers" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
