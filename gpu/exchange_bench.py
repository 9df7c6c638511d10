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
    e.rows_of(x, plan, first=True)

    def dispatch():
        new = e.plan(index, chosen, counts)
        return e.rows_of(x, new, first=True)

    def dispatch_fp8():
        new = e.plan(index, chosen, counts)
        return e.operands_of(*direct.quantize_1x128(x), new, first=True)

    def dispatch_then_quantize():
        new = e.plan(index, chosen, counts)
        return direct.quantize_1x128_128x1_t(e.rows_of(x, new, first=True), new.ends, True)

    def combine():
        return direct.combine_rows(e.deliver(y, plan), plan.slots, scores)

    def backward():
        dy, dots = e.weigh(g, scores, y, plan)
        return direct.combine_rows(e.deliver(y, plan), plan.slots), dy, dots

    def backward_then_quantize():
        dy, dots = e.weigh(g, scores, y, plan)
        direct.quantize_1x128_128x1_t(dy, plan.ends, True)
        return direct.combine_rows(e.deliver(y, plan), plan.slots)

    def backward_fp8():
        e.operands_of(*direct.quantize_1x128(g), plan, scores, y)
        return direct.combine_rows(e.deliver(y, plan), plan.slots)

    # The same numbers.
    end = int(plan.ends[-1])
    got = dispatch()
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
    # Each token goes once to a rank, however many of its experts are there.
    owners = torch.zeros(TOKENS, ranks, device="cuda").scatter_(1, chosen // local, 1.0)
    once_gb = (owners.sum() - owners[:, rank].sum()).item() * DIM / 1e9
    q, s = direct.quantize_1x128(x)
    plan_of_kernel = plan.indices, plan.chosen, plan.offset, plan.ends, plan.filled, e.deltas, rank

    def kernel_send():
        e.kernels.send(x, *plan_of_kernel, e.rows)

    def kernel_send_fp8():
        e.kernels.send(
            q.view(torch.int8), *plan_of_kernel, e.rows_fp8, None, None, None, s, e.scales
        )

    def kernel_expand():
        e.kernels.expand(e.rows, plan.origin, plan.ends, ranks, TOP_K)

    def kernel_requantize():
        requantize_128x1_t(e.rows_fp8, e.scales, plan.origin, plan.ends, ranks, TOP_K)

    def kernel_weigh():
        e.kernels.weigh(
            e.rows, y, e.weight, plan.origin, plan.ends, e.deltas, TOP_K, e.dots.view(-1)
        )

    def kernel_deliver():
        e.kernels.deliver(y, plan.origin, plan.ends, e.deltas, e.slots)

    all_gb, fp8 = 2 * sent_gb, 1 + 4 / 128
    steps = {
        "NCCL counts, waited for": (nccl_counts, 0),
        "NCCL dispatch": (nccl_dispatch, all_gb),
        "NCCL combine": (nccl_combine, all_gb),
        "NCCL backward of both": (nccl_backward, 2 * all_gb),
        "barrier": (e._barrier, 0),
        "plan": (lambda: e.plan(index, chosen, counts), 0),
        "kernel send": (kernel_send, 2 * once_gb),
        "kernel send, FP8": (kernel_send_fp8, fp8 * once_gb),
        "kernel expand": (kernel_expand, 0),
        "kernel requantize": (kernel_requantize, 0),
        "kernel weigh": (kernel_weigh, 0),
        "kernel deliver": (kernel_deliver, all_gb),
        "combine_rows alone": (lambda: direct.combine_rows(e.slots, plan.slots, scores), 0),
        "quantize rows and columns of bf16": (
            lambda: direct.quantize_1x128_128x1_t(y, plan.ends, True), 0,
        ),
        "dispatch": (dispatch, 2 * once_gb),
        "dispatch, then quantize": (dispatch_then_quantize, 2 * once_gb),
        "dispatch FP8, operands of GEMMs": (dispatch_fp8, fp8 * once_gb),
        "combine": (combine, all_gb),
        "backward of both": (backward, 2 * once_gb + all_gb),
        "backward of both, then quantize": (backward_then_quantize, 2 * once_gb + all_gb),
        "backward of both, FP8 operands": (backward_fp8, fp8 * once_gb + all_gb),
    }  # fmt: skip
    if rank == 0:
        print(f"{torch.cuda.get_device_name()} x {ranks}, torch {torch.__version__}")
        print(f"{'':38}{'ms':>8}{'stream':>8}{'CPU ms':>8}{'GB/s sent':>11}")
    for name, (step, gigabytes) in steps.items():
        alone, stream, cpu = measure(step)
        if rank == 0:
            speed = f"{gigabytes / stream * 1e3:11.0f}" if gigabytes else ""
            print(f"{name:38}{alone:8.3f}{stream:8.3f}{cpu:8.3f}{speed}", flush=True)
    torch.cuda.synchronize()
    e.check()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(launch(RANKS, 140))
    main(*start())
