"""The exchange of tokens between GPUs equals that by all-to-alls bit for bit, and fails loudly.

In FP8 as in bf16, whatever the routing.

tests/parallel/test_exchange.py compares all-to-alls with the reference. Symmetric memory holds NaN
before each exchange.
"""

import datetime
import functools
import os
import signal
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_utils import no_sync
from rows import exchanged_rows
from torch import Tensor

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
pytest.importorskip("torchtitan")

from torchtitan.models.moe.moe import _run_experts_grouped_mm

from titan_fp8 import reference
from titan_fp8.functional.swiglu import fp8_swiglu
from titan_fp8.host.all_to_all import AllToAllExchange
from titan_fp8.host.exchange import Plan
from titan_fp8.host.fp8_exchange import exchanged_swiglu
from titan_fp8.host.peer_exchange import PeerExchange, rows_for
from titan_fp8.kernels import hopper

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
HIDDEN = 256
TIMEOUT_S = 5


def run_ranks(worker: Callable, *args: object, deadline_s: float = 300) -> list[int]:
    """The exit codes of `worker(rank, *args)` on all ranks; those still running are killed."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_run_rank, args=(worker, rank, f"{folder}/store", args))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + deadline_s
        for process in ranks:
            process.join(max(0.1, end - time.monotonic()))
            process.kill()
            process.join()
    return [process.exitcode for process in ranks]


def _run_rank(worker: Callable, rank: int, store: str, args: tuple) -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
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
    """What a rank has: tokens x, gradients g (T, dim), scores (T, k), and the copies it sends."""

    x: Tensor
    g: Tensor
    scores: Tensor
    order: Tensor
    chosen: Tensor
    counts: Tensor
    slots: Tensor

    @property
    def routing(self) -> tuple[Tensor, ...]:
        return self[3:]


def draw_batch(rank: int, seed: int, dim: int, local: int, top_k: int, most: int) -> Batch:
    """The n-th of the batches, whose kinds take turns."""
    experts, kind = RANKS * local, KINDS[seed % len(KINDS)]
    target = seed % RANKS
    generator = torch.Generator("cuda").manual_seed(RANKS * seed + rank)
    draw = {"generator": generator, "device": "cuda"}
    tokens = int(torch.randint(0, most + 1, (), **draw))
    tokens = 0 if kind == "no tokens" and rank == target else tokens
    preference = torch.rand(tokens, experts, **draw)
    if kind == "one rank":
        preference[:, target * local : (target + 1) * local] += 2
    elif kind == "one expert":
        preference[:, target * local] += 2
    elif kind == "empty experts":
        preference[:, ::2] -= 2
    chosen = preference.topk(top_k).indices
    sent = torch.rand(chosen.shape, **draw) < (0.5 if kind == "part" else 2)
    slots = torch.where(sent, chosen, experts).flatten().argsort(stable=True)[: sent.sum()]
    order = reference.invert_index(slots, chosen.numel()).view_as(chosen)
    x, g = torch.randn(2, tokens, dim, **draw).bfloat16()
    scores = torch.rand(tokens, top_k, **draw)
    counts = chosen[sent].bincount(minlength=experts)
    return Batch(x, g, scores, order, chosen, counts, slots)


def make_exchange(dim: int, local: int, top_k: int, most: int, **options: object) -> PeerExchange:
    factor = options.pop("factor", RANKS)
    capacity = rows_for(most, top_k, RANKS * local, RANKS, factor)
    sizes = {"tokens": most, "top_k": top_k, "dim": dim, "experts": RANKS * local}
    return PeerExchange(dist.group.WORLD, **sizes, capacity=capacity, **options)


def poison(exchange: PeerExchange) -> None:
    for buffer in (exchange.back, exchange.s, exchange.weight, exchange.dscores):
        buffer.fill_(float("nan"))
    exchange.q.view(torch.uint8).fill_(0xFF)  # NaN in FP8 and in bf16
    exchange.slots.fill_(77)
    exchange.places.fill_(5)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def assert_same(what: str, got: Tensor, want: Tensor) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    got, want = (t.contiguous().flatten().view(torch.uint8) for t in (got, want))
    different = got != want
    assert not different.any(), f"{what}: {different.sum()} of {different.numel()} bytes differ"


def in_groups(operands: tuple[Tensor, ...], plan: Plan) -> dict[str, Tensor]:
    """The operands of GEMMs up to the last end."""
    (q, s, q_t, s_t), end = operands, int(plan.ends[-1])
    columns = {"columns": q_t[:, :end], "scales of columns": s_t[:, : end // 128]}
    return {"ends": plan.ends, "rows": q[:end], "scales": s[:end], **columns}


def compare(rank: int, *shape: int) -> None:
    """What experts read, and what they and their gradients are, against all-to-alls."""
    dim, local, top_k, _ = shape
    exchange, other = make_exchange(*shape, timeout_s=60.0), AllToAllExchange(dist.group.WORLD)
    generator = torch.Generator("cuda").manual_seed(rank)
    draw = {"generator": generator, "device": "cuda"}
    w1, w3 = (torch.randn(2, local, HIDDEN, dim, **draw) / dim**0.5).bfloat16()
    w2 = (torch.randn(local, dim, HIDDEN, **draw) / 16).bfloat16()
    for seed in range(ROUTINGS):
        batch = draw_batch(rank, seed, *shape)
        before, fmt = bool(seed // len(KINDS) % 2), ("fp32", "ue8m0")[seed % 2]
        poison(exchange)
        q, s = reference.quantize_1x128(batch.x, scale_fmt=fmt)
        arrived = []
        for way in (other, exchange):
            plan = way.plan(*batch.routing)
            q_of, s_of, slots, weight, k = way.arrive(q, s, batch.scores, plan)
            read = q_of, s_of, slots, plan.ends, weight if before else None, k
            operands = hopper.gather_1x128_128x1_t(*read, scale_fmt=fmt)
            if way is other:
                arrived.append(
                    in_groups(reference.gather_1x128_128x1_t(*read, scale_fmt=fmt), plan)
                )
            # What is sent returns, the scores as if they were their gradients.
            rows = reference.dequantize_1x128(*operands[:2]).bfloat16()
            sums, returned = way.deliver(rows, plan, None if before else batch.scores, weight)
            assert_same("scores", returned, torch.where(batch.order < 0, 0, batch.scores))
            sums = reference.gather_rows(sums, plan.rows.flatten())
            arrived.append({**in_groups(operands, plan), "sums": sums})
        wanted, by_all_to_alls, by_peers = arrived
        for name, want in wanted.items():
            assert_same(f"{name}, kernel", by_all_to_alls[name], want)
        for name, want in by_all_to_alls.items():
            assert_same(name, by_peers[name], want)

        results = []
        for way in (exchange, other):
            leaves = [t.clone().requires_grad_() for t in (batch.x, batch.scores, w1, w2, w3)]
            recipe = "blockwise_pow2" if fmt == "ue8m0" else "blockwise"
            out = exchanged_swiglu(
                *leaves, way, way.plan(*batch.routing), recipe=recipe, score_before_experts=before
            )
            out.backward(batch.g)
            results.append([out.detach(), *(leaf.grad for leaf in leaves)])
        for name, got, want in zip(("out", "x", "scores", "w1", "w2", "w3"), *results, strict=True):
            assert_same(f"{name}, {KINDS[seed % len(KINDS)]}", got, want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_routings_equal_all_to_alls(shape):
    assert run_ranks(compare, *shape) == [0] * RANKS


def in_bf16(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, sizes: Tensor) -> Tensor:
    return _run_experts_grouped_mm(w1, w2, w3, x, sizes)


def in_fp8(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, sizes: Tensor) -> Tensor:
    ends = sizes.cumsum(0, dtype=torch.int32)
    return fp8_swiglu(x, w1, w2, w3, ends, recipe="blockwise", aligned=True)


def compare_rows(rank: int, *shape: int) -> None:
    """What experts and their gradients are if rows travel in bf16, against all-to-alls."""
    dim, local, *_ = shape
    ways = [
        (run, n, make_exchange(*shape, timeout_s=60.0, dtype=torch.bfloat16, alignment=n))
        for run, n in ((in_bf16, 8), (in_fp8, 128))
    ]
    generator = torch.Generator("cuda").manual_seed(rank)
    draw = {"generator": generator, "device": "cuda"}
    w1, w3 = (torch.randn(2, local, HIDDEN, dim, **draw) / dim**0.5).bfloat16()
    w2 = (torch.randn(local, dim, HIDDEN, **draw) / 16).bfloat16()
    for seed in range(ROUTINGS):
        batch, before = draw_batch(rank, seed, *shape), bool(seed // len(KINDS) % 2)
        run, alignment, exchange = ways[seed // len(KINDS) // 2 % 2]
        poison(exchange)
        results = []
        for peers in (exchange, None):
            x, scores, *weights = (
                t.clone().requires_grad_() for t in (batch.x, batch.scores, w1, w2, w3)
            )
            experts = functools.partial(run, *weights)
            out = exchanged_rows(x, scores, batch.routing, experts, before, alignment, peers)
            out.backward(batch.g)
            results.append([out.detach(), *(leaf.grad for leaf in (x, scores, *weights))])
        for name, got, want in zip(("out", "x", "scores", "w1", "w2", "w3"), *results, strict=True):
            assert_same(f"{name}, {KINDS[seed % len(KINDS)]}, {run.__name__}", got, want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_routings_of_rows_equal_all_to_alls(shape):
    assert run_ranks(compare_rows, *shape) == [0] * RANKS


def train_without_waiting(rank: int, rows: bool, *shape: int) -> None:
    options = {"dtype": torch.bfloat16, "alignment": 8} if rows else {}
    exchange = make_exchange(*shape, timeout_s=60.0, **options)
    batch, (dim, local, *_) = draw_batch(rank, 0, *shape), shape
    w1, w3 = torch.randn(2, local, HIDDEN, dim, device="cuda").bfloat16()
    w2 = torch.randn(local, dim, HIDDEN, device="cuda").bfloat16()
    leaves = [t.requires_grad_() for t in (batch.x, batch.scores, w1, w2, w3)]

    def step() -> None:
        if rows:
            experts = functools.partial(in_bf16, *leaves[2:])
            out = exchanged_rows(*leaves[:2], batch.routing, experts, False, 8, exchange)
        else:
            out = exchanged_swiglu(*leaves, exchange, exchange.plan(*batch.routing))
        out.backward(batch.g)

    for _ in range(3):  # compiles the kernels, and records the launches
        step()
    with no_sync():
        step()


@pytest.mark.parametrize("rows", [False, True], ids=["fp8", "bf16"])
def test_nothing_waits_for_the_device(rows):
    assert run_ranks(train_without_waiting, rows, *SHAPES[0]) == [0] * RANKS


def fail(rank: int, how: str) -> None:
    """Exits with 7 if what has happened is raised as it should be."""
    shape = 256, 8, 4, 512
    exchange = make_exchange(*shape, factor=1.25, timeout_s=float(TIMEOUT_S))
    x = torch.randn(512, 256, device="cuda").bfloat16()

    def send(one_rank: bool) -> None:
        preference = torch.rand(512, 8 * RANKS, device="cuda")
        preference[:, :8] += 2 * one_rank
        chosen = preference.topk(4).indices
        slots = chosen.flatten().argsort(stable=True)
        order = reference.invert_index(slots, slots.numel()).view_as(chosen)
        counts = chosen.flatten().bincount(minlength=8 * RANKS)
        plan = exchange.plan(order, chosen, counts, slots)
        exchange.arrive(*hopper.quantize_1x128(x), torch.ones(512, 4, device="cuda"), plan)
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
        exchange.failure.check()
    os._exit(7)


@pytest.mark.parametrize("how", ["killed", "overflow"])
def test_failures_are_errors_that_say_what_happened(how):
    begin = time.monotonic()
    codes = run_ranks(fail, how, deadline_s=90)
    assert codes == [7] * (RANKS - 1) + [-signal.SIGKILL if how == "killed" else 7]
    assert time.monotonic() - begin < 80
