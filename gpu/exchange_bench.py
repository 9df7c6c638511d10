"""The exchange alone against NCCL's all-to-alls with the two permutations, as they run today.

python gpu/exchange_bench.py 4             # 8,192 tokens x 8 copies x 2048 on each of 4 GPUs

Each call starts on all ranks at once. Times are medians of 20 on rank 0, from its first launch to
the end of its last kernel, waiting of the CPU included. "stream" is the time of a call among 20
that follow each other without a pause.
"""

import os
import statistics
import sys
import time

from ranks import launch, start

RANKS = int(sys.argv[1])
TOKENS, TOP_K, DIM, EXPERTS = 8192, 8, 2048, 128
CALLS = 20


def main(rank, ranks):
    import torch
    import torch.distributed as dist

    from titan_fp8 import exchange as ex
    from titan_fp8 import permute
    from titan_fp8.kernels.hopper.requantize import requantize_128x1_t
    from titan_fp8.ops import direct

    torch.manual_seed(rank)
    local = EXPERTS // ranks
    chosen = torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOP_K).indices
    scores = torch.rand(TOKENS, TOP_K, device="cuda")
    counts = chosen.flatten().bincount(minlength=EXPERTS)
    slots = permute.slots_by_expert(chosen, EXPERTS)
    index = permute.rows_of_slots(slots, scores)
    x, g = (torch.randn(TOKENS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    capacity = ex.rows_for(TOKENS, TOP_K, EXPERTS, ranks, 1.25)
    e = ex.Exchange(
        dist.group.WORLD, tokens=TOKENS, top_k=TOP_K, dim=DIM, experts=EXPERTS, capacity=capacity,
        timeout_s=40,
    )  # fmt: skip
    y = torch.randn(e.capacity, DIM, device="cuda", dtype=torch.bfloat16)

    # Today's way: torchtitan's all-to-alls, gathers for permutations.
    def a2a(rows, out_splits, in_splits):
        out = rows.new_empty(sum(out_splits), rows.shape[1])
        dist.all_to_all_single(out, rows, out_splits, in_splits)
        return out

    def nccl_counts():
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        splits = torch.stack((counts, received)).view(2, ranks, -1).sum(-1).tolist()
        return received, splits

    def nccl_dispatch():
        copies = direct.gather_rows(x, slots, None, TOP_K)
        received, (sent, arriving) = nccl_counts()
        rows = a2a(copies, arriving, sent)
        length = -(-(len(rows) + local * 128) // 128) * 128
        of_place, place, sizes = direct.places_of_tokens(
            received, local, ranks, len(rows), length, 128
        )
        return direct.gather_rows(rows, of_place), of_place, place, sent, arriving

    rows, of_place, place, sent, arriving = nccl_dispatch()
    y_nccl = y[: len(rows)] if len(rows) <= len(y) else torch.randn_like(rows)

    def nccl_combine():
        back = a2a(direct.gather_rows(y_nccl, place), sent, arriving)
        return direct.combine_rows(back, index, scores), back

    _, back = nccl_combine()

    def nccl_backward():
        dback = direct.gather_rows(g, slots, scores, TOP_K)
        direct.dot_rows(g, back, index)
        dy = direct.gather_rows(a2a(dback, arriving, sent), of_place)
        dx = a2a(direct.gather_rows(y_nccl, place), sent, arriving)
        return direct.combine_rows(dx, index), dy

    plan = e.plan(index, chosen, counts)
    e.send(x, plan, keep_origin=True)

    def dispatch(take):
        def run():
            new = e.plan(index, chosen, counts)
            rows = e.send(x, new, keep_origin=True)
            return e.take(rows, new) if take else rows

        return run

    def dispatch_fp8():
        new = e.plan(index, chosen, counts)
        q, s = direct.quantize_1x128(x)
        return e.send(q, new, scales=s, keep_origin=True)

    def combine():
        return direct.combine_rows(e.deliver(y, plan), plan.slots, scores)

    def backward():
        dy, dots = e.weigh(e.send(g, plan, scores), y, plan)
        return direct.combine_rows(e.deliver(y, plan), plan.slots), dy, dots

    def backward_fp8():
        q, s = direct.quantize_1x128(g)
        e.send(q, plan, scores, scales=s)
        return direct.combine_rows(e.deliver(y, plan), plan.slots)

    # The same numbers.
    end = int(plan.ends[-1])
    got = dispatch(True)()
    ok = torch.equal(got[:end], rows[:end])
    if len(rows) <= len(y):
        ok &= torch.equal(combine(), nccl_combine()[0])
        a, b = backward(), nccl_backward()
        ok &= torch.equal(a[0], b[0]) and torch.equal(a[1][:end], b[1][:end])
    print(f"rank {rank}: equal to NCCL's path: {ok}; {end} of {e.capacity} rows, "
          f"{e.nbytes / 2**20:.0f} MiB symmetric", flush=True)  # fmt: skip

    def measure(step):
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        times = []
        for _ in range(CALLS):
            dist.barrier()
            torch.cuda.synchronize()
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            step()
            b.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b))
        dist.barrier()
        torch.cuda.synchronize()
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        begin = time.perf_counter()
        for _ in range(CALLS):
            step()
        cpu = (time.perf_counter() - begin) / CALLS
        b.record()
        torch.cuda.synchronize()
        return statistics.median(times), a.elapsed_time(b) / CALLS, cpu * 1e3

    sent_gb = TOKENS * TOP_K * DIM * (ranks - 1) / ranks / 1e9

    def barriers():
        e._barrier()

    def columns():
        return requantize_128x1_t(e.rows_fp8.view(torch.float8_e4m3fn), e.scales, plan.ends)

    def columns_of_bf16():
        return direct.quantize_1x128_128x1_t(y, plan.ends, True)

    def kernel_send():
        e.kernels.send(x, plan.indices, plan.chosen, plan.offset, plan.ends, plan.filled, e.deltas,
                       rank, e.rows)  # fmt: skip

    def kernel_deliver():
        e.kernels.deliver(y, plan.origin, plan.ends, e.deltas, e.slots)

    q, s = direct.quantize_1x128(x)

    def kernel_send_fp8():
        e.kernels.send(
            q.view(torch.int8), plan.indices, plan.chosen, plan.offset, plan.ends, plan.filled,
            e.deltas, rank, e.rows_fp8, None, None, None, s, e.scales,
        )  # fmt: skip

    steps = {
        "NCCL counts, waited for": (nccl_counts, 0),
        "NCCL dispatch": (nccl_dispatch, 2),
        "NCCL combine": (nccl_combine, 2),
        "NCCL backward of both": (nccl_backward, 4),
        "barrier": (barriers, 0),
        "plan": (lambda: e.plan(index, chosen, counts), 0),
        "send, kernel alone": (kernel_send, 2),
        "send FP8, kernel alone": (kernel_send_fp8, 1 + 4 / 128),
        "deliver, kernel alone": (kernel_deliver, 2),
        "dispatch": (dispatch(False), 2),
        "dispatch, with a copy": (dispatch(True), 2),
        "dispatch FP8, with quantizer": (dispatch_fp8, 1 + 4 / 128),
        "combine": (combine, 2),
        "backward of both": (backward, 4),
        "backward of both, FP8 without weigh": (backward_fp8, 3 + 4 / 128),
        "columns of FP8 rows": (columns, 0),
        "rows and columns of bf16 rows": (columns_of_bf16, 0),
        "combine_rows alone": (lambda: direct.combine_rows(e.slots, plan.slots, scores), 0),
    }
    if rank == 0:
        print(f"{torch.cuda.get_device_name()} x {ranks}, torch {torch.__version__}")
        print(f"{'':38}{'ms':>8}{'stream':>8}{'CPU ms':>8}{'GB/s sent':>11}")
    for name, (step, size) in steps.items():
        alone, stream, cpu = measure(step)
        if rank == 0:
            speed = f"{sent_gb * size / stream * 1e3:11.0f}" if size else ""
            print(f"{name:38}{alone:8.3f}{stream:8.3f}{cpu:8.3f}{speed}", flush=True)
    torch.cuda.synchronize()
    e.check()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(launch(RANKS, 140))
    main(*start())
