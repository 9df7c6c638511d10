"""The exchange kernels compile for Hopper without spills, with wide loads and stores."""

import pytest
import torch
from compile_utils import Compiler, needs_cuobjdump

from titan_fp8.kernels import exchange
from titan_fp8.kernels.hopper import requantize


@pytest.fixture
def compiled(monkeypatch):
    results: list = []
    for name in vars(exchange).copy():
        if name.endswith("_kernel"):
            monkeypatch.setattr(exchange, name, Compiler(getattr(exchange, name), results))
    return results


@needs_cuobjdump
@pytest.mark.parametrize("ranks, experts", [(2, 8), (4, 128), (8, 256)])
def test_counts_and_places(compiled, ranks, experts):
    flags = torch.zeros(exchange.FLAG_WORDS, dtype=torch.int32)
    deltas = torch.zeros(ranks, dtype=torch.int64)
    failure = torch.zeros(2, dtype=torch.int32)
    table = torch.zeros(ranks, experts, dtype=torch.int32)
    for counts in (None, torch.zeros(experts, dtype=torch.int64)):
        exchange.barrier(flags, deltas, failure, 1, 10**11, counts, table)
    exchange.places(table, failure, 1, 128, 4096)
    print(*compiled, sep="\n")
    assert len(compiled) == 3 and not any(result.spills for result in compiled)
    waits = [result.sass for result in compiled[:2]]
    assert all("LD.E.STRONG.SYS" in sass or "STRONG.SYS" in sass for sass in waits)
    assert all("GLOBALTIMER" in sass and "BPT.TRAP" in sass for sass in waits)


@needs_cuobjdump
@pytest.mark.parametrize("dim, top", [(2048, 8), (576, 6)])
def test_rows(compiled, dim, top):
    ranks, local, tokens, capacity = 4, 32, 64, 512
    x = torch.zeros(tokens, dim, dtype=torch.bfloat16)
    rows = torch.zeros(ranks * tokens, dim, dtype=torch.bfloat16)
    y = torch.zeros(capacity, dim, dtype=torch.bfloat16)
    index = torch.zeros(tokens, top, dtype=torch.int32)
    chosen = torch.zeros(tokens, top, dtype=torch.int64)
    offset = torch.zeros(ranks * local, dtype=torch.int32)
    ends = torch.zeros(local, dtype=torch.int32)
    deltas = torch.zeros(ranks, dtype=torch.int64)
    weight, origin = torch.zeros(tokens, top), torch.zeros(capacity, dtype=torch.int32)
    weights, sections = torch.zeros(capacity), -(-dim // 128)
    plan = index, chosen, offset, ends, ends, deltas, 1
    in_fp8 = [torch.zeros(t.shape, dtype=torch.int8) for t in (x, rows)]
    scales = torch.zeros(sections, tokens).t(), torch.zeros(ranks * tokens, sections)
    exchange.send(x, *plan, rows, origin)
    exchange.send(x, *plan, rows, None, weight, weights)
    exchange.send(in_fp8[0], *plan, in_fp8[1], origin, weight, weights, *scales)
    for w in (None, weights):
        exchange.expand(rows, origin, ends, ranks, top, w)
    exchange.weigh(rows, y, weights, origin, ends, deltas, top, weight)
    exchange.weigh(in_fp8[1], y, weights, origin, ends, deltas, top, weight, scales[1])
    exchange.deliver(y, origin, ends, deltas, torch.zeros(tokens * top, dim, dtype=y.dtype))
    print(*compiled, sep="\n")
    assert not any(result.spills for result in compiled)
    copies, summands = exchange.COPY_LOADS, exchange.SUM_LOADS
    accesses = [(r.name, r.sass.count("LDG.E.128"), r.sass.count("STG.E.128")) for r in compiled]
    assert accesses == [
        *[("exchange_send_kernel", copies, copies)] * 3,
        *[("exchange_expand_kernel", copies, copies)] * 2,
        ("exchange_weigh_kernel", 2 * summands, summands),
        ("exchange_weigh_kernel", summands, 0),
        ("exchange_deliver_kernel", copies, copies),
    ]


@needs_cuobjdump
@pytest.mark.parametrize("scale_fmt", ["fp32", "ue8m0"])
@pytest.mark.parametrize("dim", [2048, 576])
def test_operands_of_rows_in_fp8(monkeypatch, dim, scale_fmt):
    compiled: list = []
    kernel = requantize.requantize_128x1_t_kernel
    monkeypatch.setattr(requantize, "requantize_128x1_t_kernel", Compiler(kernel, compiled))
    rows, s = torch.zeros(512, dim, dtype=torch.int8), torch.zeros(512, -(-dim // 128))
    offs, origin = torch.zeros(8, dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
    for weight in (None, torch.zeros(1024)):
        requantize.requantize_128x1_t(rows, s, origin, offs, 4, 8, weight, scale_fmt=scale_fmt)
    print(*compiled, sep="\n")
    assert [result.spills for result in compiled] == [0, 0]
