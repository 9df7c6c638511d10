"""The shapes of production layers, for benchmarks and for tests.

M counts tokens, N output channels, K input channels and E experts. Group ends are `offs`: the row
at which each group of tokens ends.
"""

import torch
from torch import Tensor

DENSE = (
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (4096, 18432, 7168),
    (4096, 10944, 2048),
)
"""(M, N, K) of feed-forwards: Llama3-8B at 8192 tokens, DeepSeek-V3 671B and 16B (dense layers)."""
LINEAR = (
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (8192, 4096, 4096),
    (4096, 18432, 7168),
    (4096, 7168, 18432),
    (4096, 10944, 2048),
    (4096, 2048, 10944),
)
"""(M, N, K) of linear layers: those of DENSE, both ways, and Llama3-8B's attention."""
GROUPED = (
    (8, 32768, 2048, 7168),
    (8, 32768, 7168, 2048),
    (64, 24576, 1408, 2048),
    (64, 24576, 2048, 1408),
)
"""(E, M, N, K): the experts of DeepSeek-V3 671B (8 local ones) and 16B (all 64)."""
EXPERT_COUNTS = tuple((e, 16640, 8192, 5120) for e in (1, 4, 16, 64))
"""(E, M, N, K): the same tokens spread over more and more experts."""
EXPERTS = ((8, 32768, 2048, 7168), (16, 24576, 1408, 2048))
"""(E, M, hidden, dim): the local experts of DeepSeek-V3 671B and 16B."""

QUANTIZE = ((32768, 7168), (8192, 14336), (32768, 2048), (8192, 8192))
"""(M, K) of activations and gradients: 64 M elements and more."""
QUANTIZE_WEIGHTS = ((1, 32768, 7168), (4, 8192, 7168), (16, 2048, 7168), (64, 2048, 1408))
"""(E, N, K) of expert weights."""
SWIGLU = ((8192, 14336), (32768, 2048))
"""(M, hidden): Llama3-8B at 8192 tokens, the experts of DeepSeek-V3 671B."""

HOST_SMALL = (16, 128, 128)
"""(M, N, K) of a layer whose kernels take less time than their launches."""
HOST_GROUPED = (4, 512, 128, 128)
"""(E, M, N, K) of experts whose kernels take less time than their launches."""
HOST_LINEAR = ((4096, 10944, 2048), (8192, 4096, 4096))
"""(M, N, K) of layers whose kernels take 0.3 ms and more."""
HOST_BLOCK = (4096, 2048)
"""(M, dim) of a block with a hidden dimension of 5632, as of a Llama with a billion parameters."""


def uneven_ends(groups: int, m: int, alignment: int) -> Tensor:
    """Random group ends (E,) int32 at multiples of `alignment`; the last one is m.

    Equal arguments give equal ends. No group is empty, and with two or more groups the largest has
    at least 3 times the tokens of the smallest.

    Raises:
        ValueError: m is no multiple of `alignment`, or too small for such groups.
    """
    if m % alignment:
        raise ValueError(f"m = {m} must be a multiple of alignment = {alignment}")
    generator = torch.Generator().manual_seed(0)
    units = m // alignment
    for _ in range(1000):
        weight = 0.3 + torch.rand(groups, generator=generator)
        share = weight / weight.sum() * units
        size = share.floor().clamp(min=1)
        short = units - int(size.sum())
        if short >= 0:
            size[share.argsort(descending=True)[:short]] += 1
            if groups == 1 or size.max() >= 3 * size.min():
                return (size.cumsum(0) * alignment).int()
    raise ValueError(
        f"found no {groups} uneven groups of multiples of {alignment} in m = {m}; allowed are more "
        "tokens, or fewer groups"
    )
