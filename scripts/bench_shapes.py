"""The production shapes that benchmarks measure, and the group ends of the grouped ones."""

import torch
from torch import Tensor

DENSE = (
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (4096, 18432, 7168),
    (4096, 10944, 2048),
)
"""(M, N, K): feed-forwards of Llama3-8B (8192 tokens) and, dense, of DeepSeek-V3 671B and 16B."""
GROUPED = (
    (8, 32768, 2048, 7168),
    (8, 32768, 7168, 2048),
    (64, 24576, 1408, 2048),
    (64, 24576, 2048, 1408),
)
"""(E, M, N, K): the experts of DeepSeek-V3 671B (8 on a rank) and of 16B (all 64)."""
SEED = 0


def uneven_ends(groups: int, m: int, alignment: int, seed: int = SEED) -> Tensor:
    """Random group ends (E,) int32 at multiples of `alignment` that sum to m.

    The largest group is at least 3 times the smallest, if there are two, and none is empty.
    """
    generator = torch.Generator().manual_seed(seed)
    units = m // alignment
    while True:
        weight = 0.3 + torch.rand(groups, generator=generator)
        share = weight / weight.sum() * units
        size = share.floor().clamp(min=1)
        short = units - int(size.sum())
        if short >= 0:
            size[share.argsort(descending=True)[:short]] += 1
            if groups == 1 or size.max() >= 3 * size.min():
                return (size.cumsum(0) * alignment).int()
