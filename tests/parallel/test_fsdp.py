"""FP8 modules under FSDP2: its reduction over one rank, and loading into its modules."""

import functools

import pytest
import torch
from titan import LINEAR, converted, job, one_process
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from titan_fp8 import convert_linears
from titan_fp8.torchtitan_0_2.fsdp import copies_for_one_rank
from titan_fp8.torchtitan_0_2.patches import SINGLE_RANK_COPY

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.randn(3, 5, 8)) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(3, 8, 5))
        self.bias = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.bmm(x, self.w1.mT) * torch.bmm(x, self.w3.mT)
        return torch.bmm(self.w2, h.mT).sum() * self.bias.sum()


def gradients() -> list[Tensor]:
    torch.manual_seed(0)
    model = Experts()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    for _ in range(2):  # the second is added to the first
        model(torch.randn(3, 4, 8, dtype=torch.bfloat16)).backward()
    return [p.grad.to_local() for p in model.parameters()]


def copy_in(*args) -> None:
    _fsdp_collectives.foreach_reduce_scatter_copy_in(*args)


@pytest.fixture
def fsdp2_calls(monkeypatch):
    """The arguments of the calls that reach FSDP2's own function."""
    calls = []
    original = _fsdp_collectives.foreach_reduce_scatter_copy_in

    @functools.wraps(original)
    def counted(*args) -> None:
        calls.append(args)
        original(*args)

    monkeypatch.setattr(_fsdp_collectives, original.__name__, counted)
    return calls


def test_gradients_of_one_rank_are_copied_as_fsdp2_does(fsdp2_calls):
    with one_process():
        expected = gradients()
        assert len(fsdp2_calls) == 2
        for _ in range(2):
            assert SINGLE_RANK_COPY.apply(copies_for_one_rank)
        copied = gradients()
    assert len(fsdp2_calls) == 2
    assert all(map(torch.equal, copied, expected))
    assert {g.dtype for g in copied} == {torch.float32}


def test_gradients_may_have_any_strides():
    copies = []
    for prepare in (lambda: None, lambda: SINGLE_RANK_COPY.apply(copies_for_one_rank)):
        prepare()
        torch.manual_seed(0)
        grads = [torch.randn(4, 3).t(), torch.randn(1, 5).expand(2, 5)]
        out = torch.empty(sum(g.numel() for g in grads))
        copy_in(grads, out, 1)
        copies.append(out)
    assert torch.equal(*copies)


def test_gradients_of_several_ranks_are_left_to_fsdp2(fsdp2_calls):
    SINGLE_RANK_COPY.apply(copies_for_one_rank)
    args = [torch.ones(4)], torch.empty(4), 2
    copy_in(*args)
    assert fsdp2_calls == [args]


def test_a_checkpoint_loads_into_fsdp2_shards_of_any_size():
    with one_process("fake", ranks=8):
        model = nn.Sequential(nn.Linear(64, 32))
        convert_linears(model)
        fully_shard(model, mesh=init_device_mesh("cpu", (8,)))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        assert model[0].weight.to_local().shape == (4, 64)


@pytest.mark.parametrize(
    "flags, replaced",
    [
        (("--parallelism.expert_parallel_degree", 2), True),
        (("--parallelism.expert_parallel_degree", 2, f"--{LINEAR}.recipe", "bf16"), False),
        ((), False),
    ],
)
def test_fsdp2_is_patched_for_fp8_experts_under_expert_parallelism_only(tmp_path, flags, replaced):
    original = _fsdp_collectives.foreach_reduce_scatter_copy_in
    converted(job(tmp_path, "deepseek_v3", *flags))
    assert (_fsdp_collectives.foreach_reduce_scatter_copy_in is not original) == replaced
