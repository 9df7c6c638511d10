"""Measures a table of GEMM speeds for `titan_fp8.plan` on one Hopper GPU, in about a minute.

    python scripts/bench kernel_table

Writes titan_fp8/plan/tables/CARD.json, such as h200.json. Results are not checked here: gemm.py
checks the same kernels.
"""

import argparse
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

from bench import gemm
from bench.common import Step, environment, median_us, require_hopper, sets_beyond_l2
from bench.shapes import uneven_ends

from titan_fp8.recipe import BF16

TABLES = Path(__file__).parents[2] / "titan_fp8" / "plan" / "tables"
KINDS = (BF16, "blockwise", "rowwise")
TOKENS = (1024, 8192)
DENSE = (
    *((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336)),
    *((2048, 2048), (512, 2048), (4096, 512)),
)
"""(N, K) of linears: Llama3-8B's, and those of a hidden dimension of 2048."""
GROUPS = ((8, 32768), (32, 98304), (32, 8192))
"""(E, M)."""
GROUPED = ((1408, 2048), (2048, 1408), (2048, 7168))
"""(N, K) of experts: DeepSeek-V3 16B's, and 671B's."""


def product(kind: str, op: str, e: int, m: int, n: int, k: int) -> Step:
    """A GEMM with operands of its own; e = 0: no groups. Group ends are multiples of 128."""
    offs, dims = uneven_ends(e, m, 128).cuda() if e else None, (max(e, 1), m, n, k)
    if kind == BF16:
        return gemm.in_bf16(op == "wgrad", dims, offs)
    return gemm.ours(f"{kind}_{op}", dims, offs, aligned=e > 0)


def rows() -> Iterator[list]:
    shapes = [(0, m, n, k) for m, (n, k) in itertools.product(TOKENS, DENSE)]
    shapes += [(e, m, n, k) for (e, m), (n, k) in itertools.product(GROUPS, GROUPED)]
    for shape, op in itertools.product(shapes, ("mm", "wgrad")):
        _, m, n, k = shape
        count = min(sets_beyond_l2(m * (n + k)), 8)
        # Calls in one graph, since a graph of one short call waits for its launch.
        arms = [[product(kind, op, *shape) for _ in range(count)] for kind in KINDS]
        times = [median_us([lambda arm=arm: [each() for each in arm]]) / count for arm in arms]
        yield [op, *shape, *(float(f"{us:.4g}") for us in times)]


def file_of(card: str) -> Path:
    """Where the table of a card belongs: h200.json for "NVIDIA H200"."""
    found = re.search(r"\b[HBAL]\d{2,3}\w?\b", card)
    if found is None:
        raise ValueError(f"card {card!r}: allowed are names with a word such as H200 or B200")
    return TABLES / f"{found[0].lower()}.json"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("python scripts/bench kernel_table", None, __doc__)
    parser.parse_args(argv)
    require_hopper()
    facts = environment()
    head = {key: facts[key] for key in ("card", "torch", "date", "commit", "command")}
    head |= {"groups": "uneven", "columns": ["op", *"EMNK", *KINDS]}
    lines = ",\n  ".join(map(json.dumps, rows()))
    file = file_of(facts["card"])
    file.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "us": [\n  {lines}\n ]\n}}\n')
    print(f"written to {file}")
