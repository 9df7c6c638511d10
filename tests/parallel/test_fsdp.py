"""FP8 modules under FSDP2: how gradients are copied, and loading into its modules."""

import functools

import gloo
import pytest
import torch
from titan import CONVERTERS, LINEAR, build, convert, job, one_process
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from titan_fp8 import convert_linears
from titan_fp8.gradient_copies import MOST_COPIES, copy_by_foreach
from titan_fp8.patches import GRADIENT_COPIES

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.randn(4, 5, 8)) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(4, 8, 5))
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.bmm(x, self.w1.mT) * torch.bmm(x, self.w3.mT)
        return torch.bmm(self.w2, h.mT).sum() * self.bias.sum()


def gradients(ranks: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = Experts()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), mp_policy=policy)
    for _ in range(2):  # the second is added to the first
        model(torch.randn(4, 4, 8, dtype=torch.bfloat16)).backward()
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


def compare_gradients(rank: int, ranks: int) -> None:
    expected = gradients(ranks)
    for _ in range(2):
        assert GRADIENT_COPIES.apply(copy_by_foreach)
    with pytest.MonkeyPatch.context() as monkeypatch:
        # Copies do not reach it.
        monkeypatch.delattr(torch.ops.fsdp, "chunk_cat")
        copied = gradients(ranks)
    assert all(map(torch.equal, copied, expected))
    assert {g.dtype for g in copied} == {torch.float32}


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_those_of_fsdp2s_own_copies(ranks):
    if ranks > 1:
        gloo.spawn(compare_gradients, ranks, ranks)
    else:
        with one_process():
            compare_gradients(0, 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_may_have_any_strides(fsdp2_calls, ranks):
    torch.manual_seed(0)
    grads = [torch.randn(4, 8).t(), torch.randn(1, 5).expand(4, 5), torch.randn(4)]
    grads = [grad.bfloat16() for grad in grads]
    expected, copied = (torch.full((56,), float("nan")) for _ in range(2))
    copy_in(grads, expected, ranks)
    assert GRADIENT_COPIES.apply(copy_by_foreach)
    copy_in(grads, copied, ranks)
    assert torch.equal(copied, expected) and len(fsdp2_calls) == 1


@pytest.mark.parametrize(
    "rows, gradients, ranks", [(5, 1, 2), (0, 1, 2), (8, MOST_COPIES // 8 + 1, 8)]
)
def test_padded_gradients_and_many_copies_are_left_to_fsdp2(fsdp2_calls, rows, gradients, ranks):
    GRADIENT_COPIES.apply(copy_by_foreach)
    padded = -(-max(rows, 1) // ranks) * ranks
    args = [torch.ones(rows, 3)] * gradients, torch.empty(gradients * padded * 3), ranks
    if rows:
        copy_in(*args)
    else:
        with pytest.raises(RuntimeError, match="non-empty"):
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
        (("--parallelism.data_parallel_shard_degree", 2), True),
        (("--parallelism.data_parallel_shard_degree", 2, f"--{LINEAR}.recipe", "bf16"), False),
        (("--parallelism.data_parallel_replicate_degree", 2), False),
    ],
)
def test_gradient_copies_are_replaced_where_fp8_runs_under_fsdp(tmp_path, flags, replaced):
    original = _fsdp_collectives.foreach_reduce_scatter_copy_in
    config = job(tmp_path, "llama3", *flags, converters=CONVERTERS["llama3"])
    convert(config, build(config), ranks=2)
    assert (_fsdp_collectives.foreach_reduce_scatter_copy_in is not original) == replaced
