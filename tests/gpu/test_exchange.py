"""The exchange of tokens between GPUs equals the reference bit for bit, and fails loudly.

Each rank draws the tokens of all ranks, so it computes by itself what must arrive. Symmetric memory
holds NaN before each exchange.
"""

import datetime
import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_utils import no_sync
from torch import Tensor

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from titan_fp8 import reference
from titan_fp8.exchange import (
    CollectiveExchange,
    Combine,
    Dispatch,
    Exchange,
    exchanged_swiglu,
    rows_for,
)
from titan_fp8.ops import direct
from titan_fp8.swiglu import fp8_swiglu

RANKS = 4 if torch.cuda.device_count() >= 4 else 2
ROUTINGS = 50
KINDS = ("any", "one rank", "one expert", "empty experts", "no tokens", "part")
SHAPES = [
    (256, 16, 2, 300),
    (576, 64 // RANKS, 6, 200),
    (2048, 128 // RANKS, 8, 160),
    (7168, 3, 3, 40),
]
"""dim, local experts, experts of a token, tokens at most."""  # fmt: skip
TIMEOUT_S = 5
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def run_ranks(worker: Callable, *args: object, deadline_s: float = 300) -> list[int]:
    """The exit codes of `worker(rank, *args)` on all ranks; those still running are killed."""
    store = f"/tmp/titan_fp8_{os.getpid()}_{time.monotonic_ns()}"
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=_run_rank, args=(worker, rank, store, args)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + deadline_s
    for process in processes:
        process.join(max(0.1, end - time.monotonic()))
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def _run_rank(worker: Callable, rank: int, store: str, args: tuple) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        device_id=torch.device("cuda", rank),
        timeout=datetime.timedelta(seconds=90),
    )
    worker(rank, *args)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


class Batch(NamedTuple):
    """What each rank has: tokens x, gradients g (T, dim), weights (T, k), and its copies."""

    xs: list[Tensor]
    gs: list[Tensor]
    weights: list[Tensor]
    chosen: list[Tensor]
    indices: list[Tensor]
    counts: Tensor


def draw_batch(seed: int, dim: int, local: int, top_k: int, most: int) -> Batch:
    """The n-th of the batches, whose kinds take turns; every second one has tokens of any bits."""
    generator, experts, kind = torch.Generator().manual_seed(seed), RANKS * local, seed % len(KINDS)
    target = int(torch.randint(0, RANKS, (), generator=generator))
    ranks = []
    for rank in range(RANKS):
        tokens = int(torch.randint(0, most + 1, (), generator=generator))
        tokens = 0 if KINDS[kind] == "no tokens" and rank == target else tokens
        scores = torch.rand(tokens, experts, generator=generator)
        if KINDS[kind] == "one rank":
            scores[:, target * local : (target + 1) * local] += 2
        elif KINDS[kind] == "one expert":
            scores[:, target * local] += 2
        elif KINDS[kind] == "empty experts":
            scores[:, ::2] -= 2
        chosen = scores.topk(top_k).indices
        sent = torch.rand(chosen.shape, generator=generator) < (0.5 if KINDS[kind] == "part" else 2)
        order = torch.where(sent, chosen, experts).flatten().argsort(stable=True)[: sent.sum()]
        index = reference.invert_index(order, chosen.numel()).view_as(chosen)
        x = torch.randint(-(2**15), 2**15, (tokens, dim), generator=generator).short()
        x = x.view(torch.bfloat16)
        if seed // len(KINDS) % 2:
            x = torch.randn(tokens, dim, generator=generator).bfloat16()
        g = torch.randn(tokens, dim, generator=generator).bfloat16()
        weight = torch.randn(tokens, top_k, generator=generator)
        counts = chosen[sent].bincount(minlength=experts)
        ranks.append([t.cuda() for t in (x, g, weight, chosen, index, counts)])
    *lists, counts = map(list, zip(*ranks))
    return Batch(*lists, torch.stack(counts))


def make_exchange(dim: int, local: int, top_k: int, most: int, **options: float) -> Exchange:
    factor = options.pop("factor", RANKS)
    capacity = rows_for(most, top_k, RANKS * local, RANKS, factor)
    sizes = {"tokens": most, "top_k": top_k, "dim": dim, "experts": RANKS * local}
    return Exchange(dist.group.WORLD, **sizes, capacity=capacity, **options)


def poison(exchange: Exchange) -> None:
    for buffer in (exchange.rows, exchange.slots, exchange.scales, exchange.weight, exchange.dots):
        buffer.fill_(float("nan"))
    exchange.origin.fill_(77)


def assert_same(what: str, got: Tensor, want: Tensor) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    bits = BITS[got.itemsize]
    different = got.contiguous().view(bits) != want.contiguous().view(bits)
    assert not different.any(), f"{what}: {different.sum()} of {got.numel()} elements differ"


def compare_with_reference(rank: int, *shape: int) -> None:
    exchange, dim = make_exchange(*shape, timeout_s=60.0), shape[0]
    for seed in range(ROUTINGS):
        batch = draw_batch(seed, *shape)
        xs, gs, weights, chosen, indices, counts = batch
        routing = indices, chosen, counts, 128
        sent = reference.exchange_send(xs, *routing)
        rows, origin = sent[rank]
        end = len(rows)
        poison(exchange)
        index = indices[rank].int() if seed % 3 else indices[rank]
        plan = exchange.plan(index, chosen[rank], counts[rank])
        offset, ends, filled = reference.exchange_places(counts, 128)
        for name, want in (("offset", offset), ("ends", ends), ("filled", filled)):
            assert_same(name, getattr(plan, name).long(), want[rank])
        got = exchange.rows_of(xs[rank], plan, first=True)
        assert_same("rows", got[:end], rows)
        assert_same("origin", plan.origin[:end].long(), origin)

        finite = [x.nan_to_num(0, 0, 0).clamp(-1e4, 1e4) for x in xs]
        got = exchange.rows_of(finite[rank], plan, weights[rank])
        weighted = reference.exchange_send(finite, *routing, weights)[rank][0]
        assert_same("weighted rows", got[:end], weighted)

        fmt = ("fp32", "ue8m0")[seed % 2]
        qs, ss = zip(*(reference.quantize_1x128(x, scale_fmt=fmt) for x in finite))
        q = reference.exchange_send([q.view(torch.uint8) for q in qs], *routing)[rank][0]
        s = reference.exchange_send(list(ss), *routing)[rank][0]
        weight = torch.cat([w.flatten() for w in weights])
        begins = torch.tensor([0, *(w.numel() for w in weights)], device="cuda").cumsum(0)
        weight = weight[(begins[origin % RANKS] + origin // RANKS).clamp(min=0)]
        weight = torch.where(origin < 0, 0, weight) if seed % 4 > 1 else None
        y = torch.full((exchange.capacity, dim), float("nan"), device="cuda").bfloat16()
        ys = [torch.randn(rows.shape, device="cuda", generator=_seeded(seed)).bfloat16()
              for rows, _ in sent]  # fmt: skip
        y[:end] = ys[rank]
        operands, dots = exchange.operands_of(
            qs[rank], ss[rank], plan, weights[rank] if weight is not None else None, y,
            scale_fmt=fmt,
        )  # fmt: skip
        wanted = reference.requantize_128x1_t(
            q.view(torch.float8_e4m3fn), s, plan.ends, weight, scale_fmt=fmt
        )
        real = origin >= 0
        assert_same("q", operands[0][:end].view(torch.uint8), q)
        assert_same("scales", operands[1][:end][real], wanted[0][real])
        assert_same("columns", operands[2][:, :end].view(torch.uint8), wanted[1].view(torch.uint8))
        assert_same("scales of columns", operands[3][:, : end // 128], wanted[2])

        origins = [o for _, o in sent]
        back = reference.exchange_deliver(ys, origins, [c.numel() for c in chosen])[rank]
        delivered = exchange.deliver(y, plan)[: len(back)]
        there = (plan.slots >= 0).flatten()
        assert_same("delivered", delivered[there], back[there])
        x32 = reference.dequantize_1x128(qs[rank], ss[rank])
        want, size = (
            reference.dot_rows(f(x32), f(back.float()), plan.slots)
            for f in (torch.clone, torch.abs)
        )
        assert ((dots - want).abs() <= 1e-5 * size)[plan.slots >= 0].all()

        leaf = y.clone().requires_grad_()
        scores = weights[rank].clone().requires_grad_()
        out = Combine.call(leaf, scores, exchange, plan)
        assert_same("combined", out, direct.combine_rows(back, plan.slots, weights[rank]))
        out.backward(gs[rank])
        dy = reference.exchange_send(gs, *routing, weights)[rank][0]
        assert_same("gradient of rows", leaf.grad[:end], dy)
        assert_same("of scores", scores.grad, direct.dot_rows(gs[rank], back, plan.slots))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_routings_equal_the_reference(shape):
    assert run_ranks(compare_with_reference, *shape) == [0] * RANKS


def compare_experts(rank: int, *shape: int) -> None:
    """Experts in FP8 between GPUs that write to each other, and between those that do not."""
    dim, local, top_k, _ = shape
    exchange = make_exchange(*shape, timeout_s=60.0)
    other = CollectiveExchange(dist.group.WORLD, top_k=top_k, experts=RANKS * local)
    generator = torch.Generator("cuda").manual_seed(rank)
    w1, w3 = torch.randn(2, local, 256, dim, device="cuda", generator=generator) / dim**0.5
    w2 = torch.randn(local, dim, 256, device="cuda", generator=generator) / 16
    for seed in range(len(KINDS), 2 * len(KINDS)):  # with finite tokens
        batch = draw_batch(seed, *shape)
        x, g, weight, chosen, index = (each[rank] for each in batch[:5])
        for how in ("bf16", "fp8", "fp8, weighted before"):
            results = []
            for way in (exchange, other):
                plan = way.plan(index, chosen, batch.counts[rank])
                leaves = [t.clone().requires_grad_() for t in (x, weight.abs())]
                leaves += [w.bfloat16().requires_grad_() for w in (w1, w2, w3)]
                if how == "bf16":
                    rows = Dispatch.call(leaves[0], None, way, plan)
                    y = fp8_swiglu(rows, *leaves[2:], plan.ends, aligned=True)
                    out = Combine.call(y, leaves[1], way, plan)
                else:
                    before = how != "fp8"
                    out = exchanged_swiglu(*leaves, way, plan, score_before_experts=before)
                out.backward(g)
                results.append([out.detach(), *(leaf.grad for leaf in leaves)])
            for n, (a, b) in enumerate(zip(*results, strict=True)):
                if n == 2 and how != "fp8, weighted before":  # sums in another order
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
                else:
                    assert_same(f"{how}, {n}", a, b)


def test_experts_equal_those_with_all_to_alls():
    assert run_ranks(compare_experts, *SHAPES[2]) == [0] * RANKS


def train_without_waiting(rank: int, *shape: int) -> None:
    exchange, batch = make_exchange(*shape, timeout_s=60.0), draw_batch(0, *shape)
    x, g, weight, chosen, index = (each[rank] for each in batch[:5])
    x, weight = x.nan_to_num(0, 0, 0).requires_grad_(), weight.requires_grad_()
    for _ in range(2):
        # The first time compiles the kernels.
        with no_sync():
            plan = exchange.plan(index, chosen, batch.counts[rank])
            rows = Dispatch.call(x, None, exchange, plan)
            Combine.call(2 * rows, weight, exchange, plan).backward(g)


def test_nothing_waits_for_the_device():
    assert run_ranks(train_without_waiting, *SHAPES[0]) == [0] * RANKS


def fail(rank: int, how: str) -> None:
    """Exits with 7 if what has happened is raised as it should be."""
    shape = 256, 8, 4, 512
    exchange = make_exchange(*shape, factor=1.25, timeout_s=float(TIMEOUT_S))
    x = torch.randn(512, 256, device="cuda").bfloat16()

    def send(one_rank: bool) -> None:
        scores = torch.rand(512, 8 * RANKS, device="cuda")
        scores[:, :8] += 2 * one_rank
        chosen = scores.topk(4).indices
        order = chosen.flatten().argsort(stable=True)
        index = reference.invert_index(order, order.numel()).view_as(chosen)
        counts = chosen.flatten().bincount(minlength=8 * RANKS)
        exchange.rows_of(x, exchange.plan(index, chosen, counts), first=True)
        torch.cuda.synchronize()

    send(False)
    dist.barrier()
    torch.cuda.synchronize()
    if how == "killed" and rank == RANKS - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    words = f"for rank {RANKS - 1}, which has died" if how == "killed" else "exchange_capacity"
    with pytest.raises(RuntimeError):
        send(how == "overflow")
    with pytest.raises(RuntimeError, match=words):
        exchange.check()
    os._exit(7)


@pytest.mark.parametrize("how", ["killed", "overflow"])
def test_failures_are_errors_that_say_what_happened(how):
    begin = time.monotonic()
    codes = run_ranks(fail, how, deadline_s=90)
    assert codes == [7] * (RANKS - 1) + [-signal.SIGKILL if how == "killed" else 7]
    assert time.monotonic() - begin < 80
