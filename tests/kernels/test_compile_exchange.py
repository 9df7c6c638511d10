"""The exchange kernels compile for Hopper without spills, with wide loads and stores."""

import pytest
import torch
from compile_utils import Compiler, needs_cuobjdump

from titan_fp8.kernels import exchange
from titan_fp8.kernels.hopper import requantize

E4M3 = torch.float8_e4m3fn


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
    rows = torch.zeros(capacity, dim, dtype=torch.bfloat16)
    index = torch.zeros(tokens, top, dtype=torch.int32)
    chosen = torch.zeros(tokens, top, dtype=torch.int64)
    offset = torch.zeros(ranks * local, dtype=torch.int32)
    ends = torch.zeros(local, dtype=torch.int32)
    deltas = torch.zeros(ranks, dtype=torch.int64)
    weight, origin = torch.zeros(tokens, top), torch.zeros(capacity, dtype=torch.int32)
    scores = torch.zeros(capacity)
    plan = index, chosen, offset, ends, ends, deltas, 1
    exchange.send(x, *plan, rows, origin)
    exchange.send(x, *plan, rows, origin, weight)
    exchange.send(x, *plan, rows, None, weight, scores)
    sections = -(-dim // 128)
    scales = torch.zeros(sections, tokens).t(), torch.zeros(capacity, sections)
    exchange.send(x.to(E4M3).view(torch.int8), *plan, rows.view(torch.int8)[:, :dim], origin,
                  None, None, *scales)  # fmt: skip
    exchange.deliver(rows, origin, ends, deltas, torch.zeros(tokens * top, dim, dtype=rows.dtype))
    exchange.weigh(rows, rows, scores, origin, ends, deltas, weight)
    rows_fp8 = rows.view(torch.int8)[:, :dim].contiguous()
    exchange.weigh(rows_fp8, rows, scores, origin, ends, deltas, weight, scales[1])
    exchange.take(rows, ends)
    print(*compiled, sep="\n")
    assert len(compiled) == 8 and not any(result.spills for result in compiled)
    for result in compiled:
        print(result.name, result.sass.count("LDG.E.128"), result.sass.count("STG.E.128"))


@needs_cuobjdump
@pytest.mark.parametrize("scale_fmt", ["fp32", "ue8m0"])
@pytest.mark.parametrize("dim", [2048, 576])
def test_columns_of_rows_in_fp8(monkeypatch, dim, scale_fmt):
    compiled: list = []
    kernel = requantize.requantize_128x1_t_kernel
    monkeypatch.setattr(requantize, "requantize_128x1_t_kernel", Compiler(kernel, compiled))
    q, s = torch.zeros(512, dim).to(E4M3), torch.zeros(512, -(-dim // 128))
    offs = torch.zeros(8, dtype=torch.int32)
    for weight in (None, torch.zeros(512)):
        requantize.requantize_128x1_t(q, s, offs, weight, scale_fmt=scale_fmt)
    print(*compiled, sep="\n")
    assert [result.spills for result in compiled] == [0, 0]
