"""Gradients that travel in bf16 equal those that FSDP2 reduces in FP32.

On gloo ranks, with PyTorch ops in place of the kernel and of NCCL's all-to-all.
"""

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator

import gloo
import pytest
import torch
import torch.distributed as dist
from gradient_kernel import Experts, SumGradients
from titan import one_process
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from titan_fp8.host import gradient_reduction
from titan_fp8.kernels import gradients as kernels

BF16, FP32 = torch.bfloat16, torch.float32
POLICY = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)


def gradients(
    ranks: tuple[int, ...],
    dtype: torch.dtype,
    factor: float | None,
    force_sum: bool,
    reduce_dtype: torch.dtype = FP32,
) -> list[Tensor]:
    """Gradients of two batches, the second added to the first, from parameters of this dtype."""
    torch.manual_seed(0)
    model = Experts(unused=1).to(dtype)
    names = ("replicate", "shard")[-len(ranks) :]
    mesh = init_device_mesh("cpu", ranks, mesh_dim_names=names)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(BF16, reduce_dtype))
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    model.set_force_sum_reduction_for_comms(force_sum)  # gloo has no other reductions
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        model(torch.randn(4, 4, 8, dtype=BF16)).backward()
    return [p.grad.to_local() for p in model.parameters()]


def all_to_all(outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup) -> None:
    """Like NCCL, sends nothing where a tensor is empty, which gloo cannot."""
    sends = [dist.isend(t, group=group, group_dst=p) for p, t in enumerate(inputs) if t.numel()]
    for p, t in enumerate(outputs):
        if t.numel():
            dist.recv(t, group=group, group_src=p)
    for work in sends:
        work.wait()


def noting(foreach_reduce, seen: list):
    """`foreach_reduce`, which appends the dtype of each call and the class that communicates."""

    @functools.wraps(foreach_reduce)
    def reduce(*args, **kwargs):
        given = inspect.signature(foreach_reduce).bind(*args, **kwargs).arguments
        communicates = type(given["reduce_scatter_comm"]).__name__
        seen.append((given["reduce_dtype"], communicates))
        if given["reduce_scatter_group"].size() > 1 and communicates == "DefaultReduceScatter":
            given["force_sum_reduction_for_comms"] = True  # gloo has no other reductions
        return foreach_reduce(**given)

    return reduce


@contextlib.contextmanager
def patched() -> Iterator[list]:
    """The patch, as on GPUs; yields what FSDP2's function is called with."""
    seen: list = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        original = noting(_fsdp_param_group.foreach_reduce, seen)
        wrapped = gradient_reduction.in_bf16(original)
        monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", wrapped)
        accumulate = gradient_reduction.noting_accumulation(FSDPParam.to_accumulated_grad_if_needed)
        monkeypatch.setattr(FSDPParam, "to_accumulated_grad_if_needed", accumulate)
        monkeypatch.setattr(gradient_reduction, "has_kernel", lambda device: True)
        monkeypatch.setattr(kernels, "sum_gradients_kernel", SumGradients())
        total = kernels.sum_gradients.__wrapped__
        monkeypatch.setattr(kernels, "sum_gradients", total)
        monkeypatch.setattr(dist, "all_to_all", all_to_all)
        yield seen


def patched_gradients(ranks, dtype, factor, force_sum=False, *more) -> tuple[list[Tensor], list]:
    """What `gradients` gives with the patch, and what FSDP2's function was called with."""
    with patched() as seen:
        return gradients(ranks, dtype, factor, force_sum, *more), seen


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("factor", [None, 1.0, 2.0, 3.0])
def test_gradients_of_what_one_rank_has_whole_are_divided_in_place(dtype, factor):
    with one_process():
        expected = gradients((1,), dtype, factor, False)
        found, seen = patched_gradients((1,), dtype, factor)
    assert seen == [(dtype, "OneBuffer"), (dtype, "DefaultReduceScatter")]
    assert all(map(torch.equal, found, expected)) and {g.dtype for g in found} == {dtype}


def test_what_fsdp2_divides_in_bf16_is_left_to_it():
    with one_process():
        expected = gradients((1,), FP32, 3.0, False, BF16)
        found, seen = patched_gradients((1,), FP32, 3.0, False, BF16)
    assert seen == 2 * [(None, "DefaultReduceScatter")]
    assert all(map(torch.equal, found, expected))


def compare_exchange(rank: int, mesh: tuple[int, ...], dtype: torch.dtype, factor: float) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    expected = gradients(mesh, dtype, factor, True)
    found, seen = patched_gradients(mesh, dtype, factor)
    assert seen == 2 * [(FP32, "GradientExchange")]
    assert {g.dtype for g in found} == {dtype}
    if max(mesh) == 2:
        assert all(map(torch.equal, found, expected))
    else:  # FP32 sums in another order
        assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-5) for pair in zip(found, expected))
    assert any(g.any() for g in found)


@pytest.mark.parametrize(
    "mesh, dtype, factor",
    [((2,), FP32, 2.0), ((2,), BF16, 4.0), ((3,), FP32, 3.0), ((2, 2), FP32, 4.0)],
)
def test_exchanged_gradients_are_those_of_a_reduce_scatter(mesh, dtype, factor):
    gloo.spawn(compare_exchange, torch.Size(mesh).numel(), mesh, dtype, factor)


def compare_default_factor(rank: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    expected = gradients((2,), FP32, 2.0, True)
    found, _ = patched_gradients((2,), FP32, None)
    assert all(map(torch.equal, found, expected))


def test_gradients_are_averaged_by_default():
    gloo.spawn(compare_default_factor, 2)


def leave_to_fsdp2(rank: int) -> None:
    for ranks_of_host in (None, "1"):
        if ranks_of_host:
            os.environ["LOCAL_WORLD_SIZE"] = ranks_of_host
        else:
            os.environ.pop("LOCAL_WORLD_SIZE", None)
        _, seen = patched_gradients((2,), FP32, 2.0)
        assert seen == 2 * [(FP32, "DefaultReduceScatter")]
        assert not gradient_reduction.on_one_host(dist.group.WORLD)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    assert gradient_reduction.on_one_host(dist.group.WORLD)
    _, seen = patched_gradients((2,), FP32, 2.0, force_sum=True)
    assert seen == 2 * [(FP32, "DefaultReduceScatter")]


def test_reductions_between_hosts_and_forced_sums_are_left_to_fsdp2():
    gloo.spawn(leave_to_fsdp2, 2)


def reduce_replicas(rank: int) -> None:
    """Each of two replicas has the whole unit."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    expected = gradients((2, 1), BF16, 2.0, False)
    found, seen = patched_gradients((2, 1), BF16, 2.0)
    assert seen == 2 * [(FP32, "DefaultReduceScatter")]
    assert all(map(torch.equal, found, expected)) and {g.dtype for g in found} == {BF16}


def test_gradients_of_replicas_are_reduced_in_fp32():
    gloo.spawn(reduce_replicas, 2)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        return h, self.second(h)


def accumulate_on_one_rank(rank: int) -> None:
    """In a first batch that is not reduced, rank 0 has no gradient of the second layer."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    model, mesh = TwoLayers(), init_device_mesh("cpu", (2,))
    for module in (model.first, model.second, model):
        # Only rank 1 would gather the second layer again for backward.
        fully_shard(module, mesh=mesh, mp_policy=POLICY, reshard_after_forward=False)
        module.set_gradient_divide_factor(2.0)
        module.set_force_sum_reduction_for_comms(False)
    with patched() as seen:
        for synced in (False, True):
            model.set_requires_gradient_sync(synced)
            model.set_reshard_after_backward(synced)
            h, out = model(torch.randn(4, 8, dtype=BF16))
            (out if synced or rank == 1 else h).float().sum().backward()
    # Rank 0 has a bf16 gradient of the second layer, rank 1 one in FP32.
    assert seen == 2 * [(FP32, "DefaultReduceScatter")]


def test_ranks_that_accumulate_different_gradients_reduce_in_the_same_way():
    gloo.spawn(accumulate_on_one_rank, 2)


def test_without_a_kernel_nothing_is_exchanged():
    assert not gradient_reduction.has_kernel(torch.device("cpu"))
