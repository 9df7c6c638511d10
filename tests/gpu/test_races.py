"""No memory is read or written by two streams, or two ranks, at a time.

Streams and ranks are delayed at random, and freed memory is filled with NaN: results stay the same
bit for bit.
"""

import functools
import itertools
import os
import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

CYCLES = 6e6  # 3 to 4 ms
delays = False


def delay(rng: random.Random) -> None:
    if delays:
        torch.cuda._sleep(int(rng.random() ** 3 * CYCLES) + 1)


def delayed(f: Callable, rng: random.Random) -> Callable:
    @functools.wraps(f)
    def call(*args, **kwargs):
        delay(rng)
        result = f(*args, **kwargs)
        delay(rng)
        return result

    return call


def check_same(name: str, got: list[Tensor], want: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"{name}: tensor {i} of {len(got)} differs, {tuple(a.shape)}"


def exchange(rank: int, ranks: int) -> None:
    """Tokens by writes into each other's memory, delayed, and by all-to-alls."""
    global delays
    import test_exchange as t

    from titan_fp8.host.peer_exchange import PeerExchange
    from titan_fp8.kernels import exchange as kernels

    t.RANKS = ranks
    rng = random.Random(rank)
    for name in ("barrier", "places", "send", "deliver"):
        setattr(kernels, name, delayed(getattr(kernels, name), rng))
    for name in ("arrive", "deliver"):
        setattr(PeerExchange, name, delayed(getattr(PeerExchange, name), rng))
    for dim, local, top, most in ((256, 16, 2, 300), (2048, 16, 8, 160)):
        shape = dim, local, top, most
        peers, other = t.make_exchange(*shape, timeout_s=60.0), t.AllToAllExchange(dist.group.WORLD)
        draw = {"generator": torch.Generator("cuda").manual_seed(rank), "device": "cuda"}
        w1, w3 = (torch.randn(2, local, t.HIDDEN, dim, **draw) / dim**0.5).bfloat16()
        w2 = (torch.randn(local, dim, t.HIDDEN, **draw) / 16).bfloat16()
        batches = [t.draw_batch(rank, seed, *shape) for seed in range(36)]
        results = {}
        for way in (other, peers):
            delays, found = way is peers, []
            for step in range(0, len(batches), 3):  # three layers share the exchange
                before, outs, leaves = bool(step // 3 % 2), [], []
                three = batches[step : step + 3]
                for b in three:
                    mine = [x.clone().requires_grad_() for x in (b.x, b.scores, w1, w2, w3)]
                    plan = way.plan(*b.routing)
                    outs.append(t.exchanged_swiglu(*mine, way, plan, score_before_experts=before))
                    leaves += mine
                torch.autograd.backward(outs, [b.g for b in three])
                found += [o.detach() for o in outs] + [x.grad for x in leaves]
            results[way] = found
        delays = False
        check_same(f"exchange {shape}", results[peers], results[other])


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def fill(sizes: tuple[int, ...]) -> None:
    """Writes NaN to what the allocator hands out on this stream, and frees it."""
    held = [torch.full((n,), float("nan"), device="cuda") for n in sizes for _ in range(2)]
    del held


def gradients(mesh: tuple[int, ...], dtype: torch.dtype, batches: int) -> list[Tensor]:
    """Those of five steps of so many batches each."""
    torch.manual_seed(0)
    dim = 1024
    model = nn.Sequential(*[Block(dim) for _ in range(6)]).cuda().to(dtype)
    names = ("replicate", "shard")[-len(mesh) :]
    placed = init_device_mesh("cuda", mesh, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model, model):
        fully_shard(module, mesh=placed, mp_policy=policy)
        module.set_gradient_divide_factor(2.0 * dist.get_world_size())
    whole = sum(p.numel() for p in model[0].parameters())
    part = whole // mesh[-1]
    sizes = (part, part // 2, whole // 2, whole)
    for block in model:
        block.register_full_backward_hook(lambda *_: fill(sizes))
        block.register_forward_pre_hook(lambda *_: fill(sizes))
    torch.manual_seed(dist.get_rank())
    found = []
    for _ in range(5):
        for _ in range(batches):
            x = torch.randn(512, dim, device="cuda", dtype=torch.bfloat16)
            model(x).square().mean().backward()
        found += [p.grad.to_local().clone() for p in model.parameters()]
        model.zero_grad()
        fill(sizes)
    assert all(g.isfinite().all() for g in found)
    return found


def reductions(rank: int, ranks: int) -> None:
    """Gradients that FSDP2 reduces in our way, with and without delays."""
    global delays
    from titan_fp8.host import gradient_reduction as r
    from titan_fp8.kernels import gradients as kernels
    from titan_fp8.patches import GRADIENT_REDUCTION

    rng = random.Random(100 + rank)
    dist.all_to_all = delayed(dist.all_to_all, rng)
    dist.all_reduce = delayed(dist.all_reduce, rng)
    kernels.sum_gradients = delayed(kernels.sum_gradients, rng)
    allocate = r.OneBuffer.allocate

    def allocate_late(self, *args, **kwargs):
        if self._buffer is not None:  # the second call, on FSDP2's stream
            delay(rng)
        return allocate(self, *args, **kwargs)

    r.OneBuffer.allocate = allocate_late
    assert GRADIENT_REDUCTION.apply(r.in_bf16, r.noting_accumulation)
    meshes = [(ranks,), *[(2, ranks // 2)] * (ranks >= 4)]
    for case in itertools.product(meshes, (torch.float32, torch.bfloat16), (1, 2)):
        runs = []
        for slow in (False, True):
            delays = slow
            runs.append(gradients(*case))
        check_same(f"gradients {case}", *runs)


def run(rank: int, what: Callable[[int, int], None], ranks: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "NCCL_NVLS_ENABLE": "0"}
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=device)
    what(rank, ranks)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "what, ranks", [(reductions, 1), (reductions, 2), (exchange, 2), (reductions, 4), (exchange, 4)]
)
def test_delays_change_nothing(what, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    port = 29700 + 2 * ranks + (what is exchange)
    mp.spawn(run, (what, ranks, port), nprocs=ranks)
