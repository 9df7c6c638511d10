"""The kernels of the exchange compile for Hopper without spills, with wide loads and stores."""

import pytest
import torch
from compile_utils import Compiler, cases, needs_cuobjdump

from titan_fp8.kernels import exchange
from titan_fp8.kernels.hopper import gather

RANKS, LOCAL, TOKENS, CAPACITY = 4, 32, 64, 512


@pytest.fixture
def compiled(monkeypatch):
    results: list = []
    for module in (exchange, gather):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Compiler(getattr(module, name), results))
    return results


def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@needs_cuobjdump
@pytest.mark.parametrize("ranks, experts", cases((4, 128), (2, 8), (8, 256)))
def test_counts_and_places(compiled, ranks, experts):
    flags, failure = integers(exchange.FLAG_WORDS), integers(2)
    deltas, table = integers(ranks, dtype=torch.int64), integers(ranks, experts)
    for counts in (None, integers(experts, dtype=torch.int64)):
        exchange.barrier(flags, deltas, failure, 1, 10**11, counts, table)
    exchange.places(table, failure, 1, 128, 4096)
    print(*compiled, sep="\n")
    assert len(compiled) == 3 and not any(result.spills for result in compiled)
    for wait in compiled[:2]:
        assert all(word in wait.sass for word in ("STRONG.SYS", "GLOBALTIMER", "BPT.TRAP"))


@needs_cuobjdump
@pytest.mark.parametrize("dim, top", cases((2048, 8), (576, 6)))
def test_rows(compiled, dim, top):
    q, arrived = (torch.zeros(n, dim).to(torch.float8_e4m3fn) for n in (TOKENS, RANKS * TOKENS))
    s, arrived_s = (torch.zeros(-(-dim // 128), len(t)).t() for t in (q, arrived))
    y, back = (torch.zeros(n, dim, dtype=torch.bfloat16) for n in (CAPACITY, TOKENS * top))
    order, chosen = integers(TOKENS, top), integers(TOKENS, top, dtype=torch.int64)
    offset, ends, slots = integers(RANKS * LOCAL), integers(LOCAL), integers(CAPACITY)
    deltas, weights = integers(RANKS, dtype=torch.int64), torch.zeros(CAPACITY)
    scores, places = torch.zeros(TOKENS, top), integers(RANKS * TOKENS, top)
    exchange.send(
        q, s, scores, order, chosen, offset, ends, ends, deltas, 1,
        arrived, arrived_s.contiguous(), weights, slots, places, order,
    )  # fmt: skip
    for weight, dscores in ((weights, None), (None, weights)):
        exchange.deliver(y, weight, dscores, slots, places, ends, deltas, back, scores, True)
    print(*compiled, sep="\n")
    assert not any(result.spills for result in compiled)
    copies, sums = exchange.COPY_LOADS, exchange.SUM_LOADS
    accesses = [(r.name, r.wide("ld"), r.wide("st")) for r in compiled]
    assert accesses == [
        ("exchange_send_kernel", copies, copies),
        *[("exchange_deliver_kernel", top * sums, sums)] * 2,
    ]


@needs_cuobjdump
@pytest.mark.parametrize("dim, top", cases((2048, 8), (576, 6)))
def test_rows_in_bf16(compiled, dim, top):
    x, arrived, y, back = (
        torch.zeros(n, dim, dtype=torch.bfloat16)
        for n in (TOKENS, RANKS * TOKENS, CAPACITY, TOKENS * top)
    )
    order, chosen = integers(TOKENS, top), integers(TOKENS, top, dtype=torch.int64)
    offset, ends, slots = integers(RANKS * LOCAL), integers(LOCAL), integers(CAPACITY)
    deltas, places = integers(RANKS, dtype=torch.int64), integers(RANKS * TOKENS, top)
    scores, weights = torch.zeros(TOKENS, top), torch.zeros(RANKS * TOKENS, top)
    for weight in (None, scores):
        exchange.send(
            x, None, weight, order, chosen, offset, ends, ends, deltas, 1,
            arrived, None, weights, slots, places, order,
        )  # fmt: skip
    exchange.deliver(y, None, None, slots, places, ends, deltas, back, scores, False)
    print(*compiled, sep="\n")
    assert not any(result.spills for result in compiled)
    copies = exchange.COPY_LOADS
    accesses = [(r.name, r.wide("ld"), r.wide("st")) for r in compiled]
    assert accesses == [
        *[("exchange_send_kernel", copies, copies)] * 2,
        ("exchange_deliver_kernel", top * copies, top * copies),
    ]


@needs_cuobjdump
@pytest.mark.parametrize("dim, scale_fmt", cases((2048, "fp32"), (576, "ue8m0")))
def test_operands_of_experts(compiled, dim, scale_fmt):
    q, s = torch.zeros(512, dim).to(torch.float8_e4m3fn), torch.zeros(512, -(-dim // 128))
    for weight in (None, torch.zeros(1024)):
        gather.gather_1x128_128x1_t(
            q, s, integers(1024), integers(8), weight, 8, scale_fmt=scale_fmt
        )
    print(*compiled, sep="\n")
    for result in compiled:
        assert result.spills == 0 and result.registers <= 96, str(result)
        # Rows and columns.
        assert (result.wide("ld"), result.wide("st")) == (8, 8 + 8)
