"""The exchange of tokens with their experts' ranks, on all GPUs of this host, without the experts.
In the shapes of Qwen3-30B-A3B: 8192 tokens a rank, 8 of 128 experts a token, 2048 channels, routed
at random. Copies in bf16 by all-to-alls, tokens in FP8 by all-to-alls, and tokens in FP8 by writes
into the memory of other GPUs.

A result that differs between the two ways in FP8 ends the benchmark, and so do rows for fprop that
differ from those of copies in bf16.

- dispatch: from tokens to the operands of the experts' GEMMs, quantizing and counts included.
- combine: from the experts' outputs to weighted sums.
- backward: of both, from the gradient of the sums to the operands of dgrad and wgrad, and from the
  gradients of the experts' inputs to that of the tokens; the gradients of the scores included.

A call starts on all ranks at once. "us" is the median from its first launch to the end of its last
kernel, waiting of the CPU included; "CPU us" is the time until the call returns. Bytes are those
that leave a GPU for another.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench.common import Result
from tables import Row

from titan_fp8.host import permute
from titan_fp8.host.all_to_all import AllToAllExchange, all_to_all, exchange_counts, wait_for
from titan_fp8.host.peer_exchange import PeerExchange, rows_for
from titan_fp8.kernels import hopper
from titan_fp8.ops import call

TOKENS, TOP_K, DIM, EXPERTS, HIDDEN = 8192, 8, 2048, 128, 768
CAPACITY, CALLS = 1.25, 20
TITLE = "Exchange of tokens"

Step = Callable[[], Any]


def in_fp8(way: Any, routing: tuple, x: Any, g: Any, scores: Any, y: Any) -> dict[str, Step]:
    def operands(x: Any, plan: Any, weighted: bool) -> tuple:  # and the scores of rows
        arrived = way.arrive(*hopper.quantize_1x128(x), scores, plan)
        read = *arrived[:3], plan.ends, arrived.weight if weighted else None, arrived.k
        return *hopper.gather_1x128_128x1_t(*read), arrived.weight

    plan = way.plan(*routing)
    y = y[: len(operands(x, plan, False)[0])]
    hidden = [y[:, HIDDEN * i : HIDDEN * (i + 1)].contiguous() for i in range(2)]

    def combine() -> torch.Tensor:
        return call("combine_rows", way.deliver(y, plan, scores)[0], plan.rows)

    def backward() -> tuple:
        *of_rows, weight = operands(g, plan, True)
        dscores = hopper.swiglu_dscores(hidden[0], *hidden, weight, False)
        sums, dscores = way.deliver(y, plan, None, dscores)
        return of_rows, call("combine_rows", sums, plan.rows), dscores

    dispatch = lambda: operands(x, way.plan(*routing), False)  # noqa: E731
    return {"dispatch": dispatch, "combine": combine, "backward": backward}


def in_bf16(group: Any, routing: tuple, x: Any, g: Any, scores: Any, y: Any) -> dict[str, Step]:
    order, _, counts, slots = routing

    def exchange(rows: Any, received: list[int], sent: list[int]) -> Any:
        return wait_for(all_to_all(rows, received, sent, group.group_name))

    def send(tokens: Any, weight: Any, received: list[int], sent: list[int]) -> Any:
        copies = call("gather_rows", tokens, slots, weight, TOP_K)
        return exchange(copies, received, sent)

    received, (sent, arriving) = exchange_counts(counts, group)
    of_rank = group.size(), sum(arriving), 128
    permutation, sizes = permute.permutation_by_expert(received, *of_rank)
    ends, y = sizes.cumsum(0, dtype=torch.int32), y[: len(permutation.tokens)]

    def quantized(rows: Any, order: Any, ends: Any) -> Any:
        return hopper.quantize_1x128_128x1_t(call("gather_rows", rows, order), ends, True)

    def dispatch() -> Any:
        received, (sent, arriving) = exchange_counts(counts, group)
        rows = send(x, None, arriving, sent)
        permutation, sizes = permute.permutation_by_expert(received, *of_rank)
        return quantized(rows, permutation.tokens, sizes.cumsum(0, dtype=torch.int32))

    def returned() -> Any:
        return exchange(call("gather_rows", y, permutation.places), sent, arriving)

    kept = returned()

    def backward() -> tuple:
        rows = quantized(send(g, scores, arriving, sent), permutation.tokens, ends)
        dx = call("combine_rows", returned(), order, None)
        return rows, dx, call("dot_rows", g, kept, order)

    combine = lambda: call("combine_rows", returned(), order, scores)  # noqa: E731
    return {"dispatch": dispatch, "combine": combine, "backward": backward}


def check_equal(ways: dict[str, dict[str, Step]], end: int) -> None:
    """Ends the process if results differ that must be equal."""
    bf16, fp8, peers = ({what: step() for what, step in way.items()} for way in ways.values())
    for what, got, want in (("FP8", fp8, bf16), ("peers", peers, fp8)):
        pairs = [(a[:end], b[:end]) for a, b in zip(got["dispatch"][:2], want["dispatch"][:2])]
        if want is fp8:
            pairs += [(got["combine"], want["combine"])]
            pairs += zip(got["backward"][1:], want["backward"][1:])
        if not all(torch.equal(a.float(), b.float()) for a, b in pairs):
            raise SystemExit(f"{what}: the exchange is wrong")


def measure_step(step: Step) -> Row:
    for _ in range(3):
        step()
    times = []
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(CALLS):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        events[0].record()
        step()
        events[1].record()
        cpu = time.perf_counter() - begin
        torch.cuda.synchronize()
        times.append((events[0].elapsed_time(events[1]) * 1e3, cpu * 1e6))
    return dict(zip(("us", "CPU us"), map(statistics.median, zip(*times))))


def measure_rank(rank: int, ranks: int, store: str, results: Any) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store, rank=rank, world_size=ranks, device_id=device)
    torch.manual_seed(rank)
    chosen = torch.rand(TOKENS, EXPERTS, device=device).topk(TOP_K).indices
    scores = torch.rand(TOKENS, TOP_K, device=device)
    slots = permute.slots_by_expert(chosen, EXPERTS)
    order = permute.rows_of_slots(slots, scores)
    counts = chosen.flatten().bincount(minlength=EXPERTS)
    routing, group = (order, chosen, counts, slots), dist.group.WORLD
    sizes = {"tokens": TOKENS, "top_k": TOP_K, "dim": DIM, "experts": EXPERTS}
    capacity = rows_for(TOKENS, TOP_K, EXPERTS, ranks, CAPACITY)
    peers = PeerExchange(group, **sizes, capacity=capacity, timeout_s=60.0)
    x, g = (torch.randn(TOKENS, DIM, device=device).bfloat16() for _ in range(2))
    y = torch.randn(peers.capacity, DIM, device=device).bfloat16()
    tensors = routing, x, g, scores, y
    ways = {
        "all-to-alls, bf16": in_bf16(group, *tensors),
        "all-to-alls, FP8": in_fp8(AllToAllExchange(group), *tensors),
        "peers, FP8": in_fp8(peers, *tensors),
    }
    check_equal(ways, int(peers.plan(*routing).ends[-1]))
    # Between peers a token goes once to a rank, and returns once, for all of its experts there.
    away = chosen // (EXPERTS // ranks) != rank
    owners = torch.zeros(TOKENS, ranks, device=device).scatter_(1, chosen * ranks // EXPERTS, 1.0)
    copies, once = int(away.sum()), int(owners.sum() - owners[:, rank].sum())
    in_bytes = {"bf16": 2 * DIM, "FP8": DIM + DIM // 32}
    rows: list[Row] = []
    for way, steps in ways.items():
        rows_sent = once if way.startswith("peers") else copies
        sent, back = rows_sent * in_bytes[way.split()[-1]], rows_sent * 2 * DIM
        moved = {"dispatch": sent, "combine": back, "backward": sent + back}
        for what, step in steps.items():
            times = measure_step(step)
            rows.append({"step": f"{what}, {way}", **times, "GB sent": moved[what] / 1e9})
            if rank == 0:
                print(rows[-1], file=sys.stderr, flush=True)
    peers.check()
    if rank == 0:
        results.put((rows, peers.memory.nbytes / 2**20))
    dist.barrier()
    dist.destroy_process_group()


def measure() -> Result:
    ranks = torch.cuda.device_count()
    if ranks < 2:
        sys.exit("bench: the exchange of tokens needs two GPUs")
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure_rank, (ranks, f"file://{folder}/store", results), ranks)
    rows, mebibytes = results.get()
    return rows, {"ranks": ranks, "symmetric memory": f"{mebibytes:.0f} MiB"}
