"""FP8 modules under FSDP2: how gradients are copied, and loading into its modules."""

from pathlib import Path

import gloo
import pytest
import torch
from gradient_kernel import CopyGradient, Experts
from titan import (
    CONVERTERS,
    LINEAR,
    build,
    convert,
    job,
    loss_and_gradients,
    one_process,
    parse,
    toml,
    trainer,
    training,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from titan_fp8 import convert_linears
from titan_fp8.host import gradient_reduction
from titan_fp8.host.gradient_reduction import copy_by_kernel, fits_kernel
from titan_fp8.kernels import gradients as kernels

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")


def gradients(ranks: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = Experts()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), mp_policy=policy)
    for _ in range(2):  # the second is added to the first
        model(torch.randn(4, 4, 8, dtype=torch.bfloat16)).backward()
    return [p.grad.to_local() for p in model.parameters()]


def compare_gradients(rank: int, ranks: int) -> None:
    expected = gradients(ranks)
    with pytest.MonkeyPatch.context() as monkeypatch:
        name = "foreach_reduce_scatter_copy_in"
        ours = copy_by_kernel(_fsdp_collectives.foreach_reduce_scatter_copy_in)
        monkeypatch.setattr(_fsdp_collectives, name, ours)
        # The CPU takes the GPU path, with PyTorch ops in place of the kernel.
        calls: list[int] = []
        original = kernels.copy_gradients.__wrapped__

        def copy(buffer: Tensor, ranks: int, *grads: Tensor) -> tuple[()]:
            calls.append(ranks)
            return original(buffer, ranks, *grads)

        monkeypatch.setattr(gradient_reduction, "fits_kernel", lambda *_: True)
        monkeypatch.setattr(kernels, "copy_gradients", copy)
        monkeypatch.setattr(kernels, "copy_gradient_kernel", CopyGradient())
        copied = gradients(ranks)
    assert all(map(torch.equal, copied, expected)) and calls == 2 * [ranks]
    assert {g.dtype for g in copied} == {torch.float32}


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_those_of_fsdp2s_own_copies(ranks):
    if ranks > 1:
        gloo.spawn(compare_gradients, ranks, ranks)
    else:
        with one_process():
            compare_gradients(0, 1)


class OnGPU:
    """What `fits_kernel` asks of a buffer."""

    device = torch.device("cuda")


@pytest.mark.parametrize(
    "grad, ranks, fits",
    [
        (torch.ones(8, 3), 2, True),
        (torch.ones(8), 8, True),
        (torch.ones(5, 3), 2, False),
        (torch.ones(0, 3), 2, False),
        (torch.ones(4, 8).t(), 2, False),
        (torch.ones(1, 5).expand(4, 5), 2, False),
        (torch.empty(2**31, device="meta"), 1, False),
        (nn.Parameter(torch.ones(8)), 2, False),
    ],
)
def test_which_gradients_the_kernel_copies(grad, ranks, fits):
    assert fits_kernel([torch.ones(8), grad], OnGPU(), ranks) == fits
    assert not fits_kernel([grad], torch.ones(1), ranks)


def test_other_gradients_are_left_to_fsdp2():
    calls = []
    args = [torch.ones(8, 3)], torch.empty(24), 2
    copy_by_kernel(lambda *given: calls.append(given))(*args)
    assert calls == [args]


def test_a_checkpoint_loads_into_fsdp2_shards_of_any_size():
    with one_process("fake", ranks=8):
        model = nn.Sequential(nn.Linear(64, 32))
        convert_linears(model)
        fully_shard(model, mesh=init_device_mesh("cpu", (8,)))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        assert model[0].weight.to_local().shape == (4, 64)


FSDP = ("--parallelism.data_parallel_shard_degree", 2)


@pytest.mark.parametrize(
    "flags, replaced",
    [
        (FSDP, True),
        ((*FSDP, f"--{LINEAR}.recipe", "bf16"), False),
        ((*FSDP, f"--{LINEAR}.recipe", "bf16", f"--{LINEAR}.host_speedups", "True"), True),
        ((*FSDP, f"--{LINEAR}.host_speedups", "False"), False),
        (("--parallelism.data_parallel_replicate_degree", 2), False),
    ],
)
def test_gradient_copies_are_replaced_where_the_key_says_so_under_fsdp(tmp_path, flags, replaced):
    original = _fsdp_collectives.foreach_reduce_scatter_copy_in
    config = job(tmp_path, "llama3", *flags, converters=CONVERTERS["llama3"])
    convert(config, build(config), ranks=2)
    assert (_fsdp_collectives.foreach_reduce_scatter_copy_in is not original) == replaced


def train_both_ways(rank: int, folder: Path, text: Path) -> None:
    """On one of two ranks, in bf16."""
    folder = folder / str(rank)
    folder.mkdir()
    flags = (*training(text, folder), *FSDP, f"--{LINEAR}.recipe", "bf16")
    results = []
    for speedups in ("False", "True"):
        own = (*flags, f"--{LINEAR}.host_speedups", speedups)
        with trainer(parse(folder, toml("llama3", CONVERTERS["llama3"]), *own)) as t:
            results.append(loss_and_gradients(t))
    want, got = results
    assert want.keys() == got.keys()
    assert not [name for name in want if not torch.equal(want[name], got[name])]


def test_a_dense_bf16_job_computes_the_same_with_the_key(tmp_path, text):
    gloo.spawn(train_both_ways, 2, tmp_path, text)
