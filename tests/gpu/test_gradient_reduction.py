"""Gradients that NCCL ranks reduce in our way equal those that FSDP2 reduces in FP32."""

import itertools
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_utils import no_sync
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from unpatched import restore

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from titan_fp8.host.gradient_reduction import in_bf16, noting_accumulation
from titan_fp8.kernels.gradients import TILE, sum_gradients
from titan_fp8.patches import GRADIENT_REDUCTION

DIM = 259  # not even: shards are padded


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("size", [1, 8, TILE - 1, 5 * TILE + 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_fp32_in_the_order_of_ranks(ranks, size, dtype):
    for rank in range(ranks):
        for _ in range(2):  # Triton does the first launch.
            parts = torch.randn(ranks, size, device="cuda").bfloat16()
            parts[0, 0], parts[:, -1] = float("inf"), -0.0
            others = torch.cat([parts[:rank], parts[rank + 1 :]]).flatten()
            out = torch.full((size,), float("nan"), dtype=dtype, device="cuda")
            with no_sync():
                sum_gradients(out, parts[rank].clone(), others, rank, ranks, 0.25)
            expected = torch.full((size,), -0.0, device="cuda")
            for part in parts:
                expected += part.float() * 0.25
            expected = expected.to(dtype)
            assert torch.equal(out, expected)
            assert torch.equal(out.signbit(), expected.signbit())


def gradients(
    mesh: tuple[int, ...], factor: float | None, dtype: torch.dtype
) -> list[list[Tensor]]:
    """Gradients of two batches, of the first and of both, from parameters of this dtype."""
    torch.manual_seed(0)
    layers = [nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM), nn.LayerNorm(DIM)]
    model = nn.Sequential(*layers).cuda().to(dtype)
    names = ("replicate", "shard")[-len(mesh) :]
    placed = init_device_mesh("cuda", mesh, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (model[0], model):
        fully_shard(module, mesh=placed, mp_policy=policy)
        if factor is not None:
            module.set_gradient_divide_factor(factor)
    torch.manual_seed(dist.get_rank())
    found = []
    for _ in range(2):
        model(torch.randn(64, DIM, device="cuda", dtype=torch.bfloat16)).square().sum().backward()
        found.append([p.grad.to_local().clone() for p in model.parameters()])
    return found


def compare(rank: int, ranks: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank)
    )
    dtypes = torch.float32, torch.bfloat16
    meshes = [(ranks,), *[(2, ranks // 2)] * (ranks >= 4)]
    for mesh, factor, dtype in itertools.product(meshes, (None, 2.0 * ranks, 1.0, 3.0), dtypes):
        expected = gradients(mesh, factor, dtype)
        assert GRADIENT_REDUCTION.apply(in_bf16, noting_accumulation)
        found = gradients(mesh, factor, dtype)
        restore([GRADIENT_REDUCTION])
        rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (1e-2, 1e-3)
        for want, got in zip(sum(expected, []), sum(found, []), strict=True):
            assert got.dtype == dtype and want.abs().max() > 0
            if mesh[-1] <= 2 and factor != 3.0:
                assert torch.equal(got, want)
            else:
                torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_reduced_gradients_are_those_of_fsdp2(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    mp.spawn(compare, (ranks, 29600 + ranks), nprocs=ranks)
