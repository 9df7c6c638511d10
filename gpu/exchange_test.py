"""Random routings, bit for bit against the reference; and what happens when something fails.

python gpu/exchange_test.py routings 4     # 200 random routings on 4 GPUs
python gpu/exchange_test.py overflow 2     # more rows than fit: every rank must raise and say so
python gpu/exchange_test.py kill 4         # the last rank is killed: the others must raise
"""

import os
import signal
import sys
import time
import traceback

from ranks import launch, start

MODE, RANKS = sys.argv[1], int(sys.argv[2])
ROUTINGS = int(sys.argv[3]) if len(sys.argv) > 3 else 200
KINDS = ("any", "one rank", "one expert", "empty experts", "no tokens", "part")


def bits(t):
    import torch

    return t.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize]
    )


def expect(what, got, want):
    assert (got.shape, got.dtype) == (want.shape, want.dtype), (what, got.shape, want.shape)
    different = bits(got) != bits(want)
    if different.any():
        at = different.nonzero()
        raise AssertionError(
            f"{what}: {len(at)} of {got.numel()} elements differ, first at {at[0].tolist()}: "
            f"{got[tuple(at[0])]} instead of {want[tuple(at[0])]}; "
            f"rows {at[:, 0].unique()[:20].tolist()}"
        )


def routing(generator, ranks, local, top_k, most, kind):
    """Chosen experts (T, k), and which copies a rank sends (T, k), of each rank."""
    import torch

    chosen, sent = [], []
    for rank in range(ranks):
        tokens = int(torch.randint(0, most + 1, (), generator=generator))
        scores = torch.rand(tokens, ranks * local, generator=generator)
        target = int(torch.randint(0, ranks, (), generator=generator)) if rank == 0 else target  # noqa: F821
        if kind == "one rank":
            scores[:, target * local : (target + 1) * local] += 2
        elif kind == "one expert":
            scores[:, target * local] += 2
        elif kind == "empty experts":
            scores[:, ::2] -= 2
        elif kind == "no tokens" and rank == target:
            scores = scores[:0]
        chosen.append(scores.topk(top_k).indices.cuda())
        mask = torch.rand(chosen[-1].shape, generator=generator) < (0.5 if kind == "part" else 2)
        sent.append(mask.cuda())
    return chosen, sent


def indices_of(chosen, sent, experts):
    """Each copy's index among those that are sent, sorted by expert; and the counts."""
    import torch

    key = torch.where(sent, chosen, experts).flatten()
    order = key.argsort(stable=True)
    index = torch.empty_like(order)
    index[order] = torch.arange(len(order), device="cuda")
    index = torch.where(sent, index.view_as(chosen), -1)
    return index, key[key < experts].bincount(minlength=experts)


def test_routings(rank, ranks):
    import torch
    import torch.distributed as dist

    from titan_fp8 import exchange as ex
    from titan_fp8 import reference
    from titan_fp8.ops import direct
    from titan_fp8.swiglu import fp8_swiglu

    shapes = [(256, 16, 2, 300), (576, 64 // ranks, 6, 200), (2048, 128 // ranks, 8, 160),
              (7168, 3, 3, 40)]  # fmt: skip
    begin = time.time()
    made = {}
    for dim, local, top_k, most in shapes:
        capacity = ex.rows_for(most, top_k, local * ranks, ranks, ranks)
        made[dim] = ex.Exchange(
            dist.group.WORLD, tokens=most, top_k=top_k, dim=dim, experts=local * ranks,
            capacity=capacity, timeout_s=40,
        )  # fmt: skip
    if rank == 0:
        print(f"symmetric memory {[e.nbytes for e in made.values()]}, deltas "
              f"{[e.deltas.tolist() for e in made.values()]}, {time.time() - begin:.1f} s",
              flush=True)  # fmt: skip
    failures: dict[str, str] = {}
    generator = torch.Generator()
    draw = lambda *shape: torch.randn(*shape, generator=generator).cuda()  # noqa: E731
    for n in range(ROUTINGS):
        dim, local, top_k, most = shapes[n % len(shapes)]
        kind = KINDS[n // len(shapes) % len(KINDS)]
        e, experts = made[dim], local * ranks
        generator.manual_seed(n)
        chosen, sent = routing(generator, ranks, local, top_k, most, kind)
        indices, counts = zip(*map(indices_of, chosen, sent, [experts] * ranks))
        counts = torch.stack(counts)
        xs = [draw(len(c), dim).bfloat16() for c in chosen]
        if n % 2:
            xs = [torch.randint(-(2**15), 2**15, x.shape, generator=generator).short().cuda()
                  .view(torch.bfloat16) for x in xs]  # fmt: skip
        weights = [draw(*c.shape) for c in chosen]
        gs = [draw(len(c), dim).bfloat16() for c in chosen]
        want = reference.exchange_send(xs, list(indices), chosen, counts, 128)
        want_ends = reference.exchange_places(counts, 128)
        ys = [draw(len(rows), dim).bfloat16() for rows, _ in want]
        origins = [origin for _, origin in want]
        rows, origin = want[rank]
        end = len(rows)
        e.rows.fill_(float("nan")), e.slots.fill_(float("nan")), e.scales.fill_(float("nan"))
        e.origin.fill_(77), e.weight.fill_(float("nan")), e.dots.fill_(float("nan"))
        mine = chosen[rank], indices[rank].int() if n % 3 else indices[rank]

        def check(what, got, wanted, case=f"routing {n} ({kind}, dim {dim})"):
            try:
                expect(what, got, wanted)
            except AssertionError as error:
                if what not in failures:
                    failures[what] = f"{case}: {error}"
                    print(f"rank {rank}: {failures[what]}", flush=True)

        x = xs[rank]
        q, s = reference.quantize_1x128(xs[rank].nan_to_num(0, 0, 0).clamp(-1e4, 1e4))
        plan = e.plan(mine[1], mine[0], counts[rank])
        check("ends", plan.ends.long(), want_ends[1][rank])
        check("sizes", plan.sizes.long().cumsum(0), want_ends[1][rank])
        check("filled", plan.filled.long(), want_ends[2][rank])
        check("offset", plan.offset.long(), want_ends[0][rank])
        check("rows", e.rows_of(x, plan, first=True)[:end], rows)
        check("origin", plan.origin[:end].long(), origin)
        got = e.rows_of(x, plan, weights[rank])[:end]
        finite = [x.nan_to_num(0, 0, 0) for x in xs]
        if not n % 2:
            weighted = reference.exchange_send(xs, list(indices), chosen, counts, 128, weights)[
                rank
            ][0]
            check("weighted", got, weighted)
        # FP8
        qs, ss = zip(*(reference.quantize_1x128(f.clamp(-1e4, 1e4)) for f in finite))
        bytes_ = [each.view(torch.uint8) for each in qs]
        want_q = reference.exchange_send(bytes_, list(indices), chosen, counts, 128)[rank][0]
        want_s = reference.exchange_send(list(ss), list(indices), chosen, counts, 128)[rank][0]
        want_s[origin < 0] = reference.scale_of(torch.zeros(1)).item()
        flat = torch.cat([w.flatten() for w in weights])
        begins = torch.tensor([0, *(w.numel() for w in weights)], device="cuda").cumsum(0)
        row_weight = torch.zeros(end, device="cuda")
        real = origin >= 0
        row_weight[real] = flat[(begins[origin % ranks] + origin // ranks)[real]]
        fmt, with_weight = ("fp32", "ue8m0")[n % 2], n // 2 % 2
        wanted = reference.requantize_128x1_t(
            want_q.view(torch.float8_e4m3fn), want_s, plan.ends,
            row_weight if with_weight else None, scale_fmt=fmt,
        )  # fmt: skip
        got, dots = e.operands_of(
            q, s, plan, weights[rank] if with_weight else None,
            y=e.rows_of(x, plan) if with_weight else None, scale_fmt=fmt,
        )  # fmt: skip
        check("q", got[0][:end].view(torch.uint8), want_q)
        check("scales of rows", got[1][:end], wanted[0])
        check("columns", got[2][:, :end].view(torch.uint8), wanted[1].view(torch.uint8))
        check("scales of columns", got[3][:, : end // 128], wanted[2])
        # Back
        y = torch.full((e.capacity, dim), float("nan"), device="cuda", dtype=torch.bfloat16)
        y[:end] = ys[rank]
        back = reference.exchange_deliver(ys, origins, [c.numel() for c in chosen])[rank]
        got = e.deliver(y, plan)[: len(back)].clone()
        there = (plan.slots >= 0).flatten()
        check("delivered", got[there], back[there])
        # Autograd
        leaf_x, leaf_y = x.nan_to_num(0, 0, 0).requires_grad_(), y.clone().requires_grad_()
        scores = weights[rank].clone().requires_grad_()
        ex.Dispatch.call(leaf_x, None, e, plan).backward(y)
        check("dispatch, gradient", leaf_x.grad, direct.combine_rows(back, plan.slots))
        out = ex.Combine.call(leaf_y, scores, e, plan)
        check("combined", out, direct.combine_rows(back, plan.slots, weights[rank]))
        out.backward(gs[rank])
        dy = reference.exchange_send(gs, list(indices), chosen, counts, 128, weights)[rank][0]
        check("combine, gradient", leaf_y.grad[:end], dy)
        check("scores, gradient", scores.grad, direct.dot_rows(gs[rank], back, plan.slots))
        if n % 10:
            continue
        # Experts in FP8, with either exchange, against all-to-alls.
        other = ex.CollectiveExchange(dist.group.WORLD, top_k=top_k, experts=experts)
        other_plan = other.plan(mine[1], mine[0], counts[rank])
        torch.manual_seed(n + rank)
        w1, w3 = torch.randn(2, local, 256, dim, device="cuda") / dim**0.5
        w2 = torch.randn(local, dim, 256, device="cuda") / 16
        for how in ("bf16", "fp8", "fp8, before"):
            results = []
            for exchange, its_plan in ((e, plan), (other, other_plan)):
                leaves = [t.clone().requires_grad_() for t in
                          (finite[rank], weights[rank].abs(), w1.bfloat16(), w2.bfloat16(),
                           w3.bfloat16())]  # fmt: skip
                if how == "bf16":
                    y = ex.Dispatch.call(leaves[0], None, exchange, its_plan)
                    y = fp8_swiglu(y, *leaves[2:], its_plan.ends, aligned=True)
                    out = ex.Combine.call(y, leaves[1], exchange, its_plan)
                else:
                    out = ex.exchanged_swiglu(
                        *leaves, exchange, its_plan, score_before_experts="before" in how
                    )
                out.backward(gs[rank])
                results.append([out.detach(), *(leaf.grad for leaf in leaves)])
            for what, a, b in zip(("out", "dx", "dscores", "dw1", "dw2", "dw3"), *results):
                if what == "dscores" and how != "fp8, before":  # another order of summation
                    far = (a - b).norm() / b.norm().clamp(min=1e-9) > 1e-4
                    check(f"{how}: {what}", far.cpu(), torch.tensor(False))
                else:
                    check(f"{how}: {what}", a, b)
    torch.cuda.synchronize()
    # Nothing waits for the device.
    dim, local, top_k, most = shapes[0]
    e = made[dim]
    x = torch.randn(most, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    chosen = torch.rand(most, local * ranks, device="cuda").topk(top_k).indices
    index, counts = indices_of(chosen, chosen >= 0, local * ranks)
    scores = torch.rand(most, top_k, device="cuda", requires_grad=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = e.plan(index, chosen, counts)
        y = 2 * ex.Dispatch.call(x, None, e, plan)
        ex.Combine.call(y, scores, e, plan).backward(x.detach())
    except RuntimeError as error:
        failures["sync"] = str(error)
        traceback.print_exc()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    print(f"rank {rank}: {ROUTINGS} routings, {len(failures)} kinds of failures "
          f"{[*failures]}, {time.time() - begin:.1f} s", flush=True)  # fmt: skip
    return bool(failures)


def test_failure(rank, ranks):
    import torch
    import torch.distributed as dist

    from titan_fp8 import exchange as ex

    tokens, top_k, dim, experts = 512, 4, 256, 8 * ranks
    e = ex.Exchange(
        dist.group.WORLD, tokens=tokens, top_k=top_k, dim=dim, experts=experts,
        capacity=ex.rows_for(tokens, top_k, experts, ranks, 1.25), timeout_s=5,
    )  # fmt: skip
    x = torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16)

    def batch(kind):
        scores = torch.rand(tokens, experts, device="cuda")
        if kind == "one rank":
            scores[:, :8] += 2
        chosen = scores.topk(top_k).indices
        index, counts = indices_of(chosen, chosen >= 0, experts)
        torch.cuda.synchronize()
        plan = e.plan(index, chosen, counts)
        e.rows_of(x, plan, first=True)

    batch("any")
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.time()
    if MODE == "kill" and rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        batch("one rank" if MODE == "overflow" else "any")
        torch.cuda.synchronize()
        print(f"rank {rank}: WRONG, nothing raised", flush=True)
        os._exit(1)
    except RuntimeError as error:
        print(f"rank {rank}: after {time.time() - begin:.1f} s CUDA says "
              f"{str(error).splitlines()[0]!r}", flush=True)  # fmt: skip
    try:
        e.check()
    except RuntimeError as error:
        right = "exchange_capacity" if MODE == "overflow" else f"rank {ranks - 1},"
        print(f"rank {rank}: {'OK' if right in str(error) else 'WRONG'}: {error}", flush=True)
        os._exit(right not in str(error))
    print(f"rank {rank}: WRONG, check has nothing to say", flush=True)
    os._exit(1)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        failed = launch(RANKS, 220 if MODE == "routings" else 60, may_die=MODE != "routings")
        allowed = 1 if MODE == "kill" else 0
        print(f"{MODE}: {'OK' if failed == allowed else 'FAILED'}", flush=True)
        sys.exit(failed != allowed)
    rank, ranks = start()
    sys.exit(test_routings(rank, ranks) if MODE == "routings" else test_failure(rank, ranks))
