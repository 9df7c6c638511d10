"""stochastic_adamw.py: bf16 weights that follow those of AdamW in FP32."""

import copy
from pathlib import Path

import gloo
import pytest
import torch
import torch.distributed.checkpoint as dcp
from stochastic_adamw import StochasticAdamW, round_stochastically
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Parameter
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.components.optimizer import OptimizersContainer

from titan_fp8 import convert_linears, fsdp
from titan_fp8.linear import FP8Linear

LR = 5e-5


def seed(number: int, step: int = 9) -> Tensor:
    return torch.tensor([step, number], dtype=torch.int32)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.75])
@pytest.mark.parametrize(("value", "gap"), [(1.0, 2.0**-7), (-3.0, 2.0**-6), (2.0**-20, 2.0**-27)])
def test_rounding_keeps_the_mean(share, value, gap):
    x = torch.full((100_000,), value + share * gap)
    y = round_stochastically(x, seed(3))
    assert y.dtype == torch.bfloat16
    assert set(y.double().unique().tolist()) == {value, value + gap}
    assert ((y.double().mean() - value) / gap).item() == pytest.approx(share, abs=0.01)


def test_rounding_repeats_and_depends_on_the_seed():
    x = torch.randn(10_000)
    y = round_stochastically(x, seed(3))
    assert torch.equal(y, round_stochastically(x, seed(3)))
    # A number at a random place between its neighbors is rounded differently in a third of cases.
    for other in (seed(4), seed(3, step=8), seed(9, step=3)):
        different = (y != round_stochastically(x, other)).float().mean().item()
        assert different == pytest.approx(1 / 3, abs=0.02)


def test_every_parameter_of_every_step_and_run_has_a_seed_of_its_own(monkeypatch):
    """Also 300 parameters, in two groups, after 60,000 steps, with the last `rounding_seed`."""
    seeds, calls = set(), 0
    monkeypatch.setattr(
        "stochastic_adamw._update", lambda *args: seeds.add(tuple(args[-1].tolist()))
    )
    for rounding_seed in (0, 1, 126, 127):
        groups = [{"params": [Parameter(torch.ones(1)) for _ in range(150)]} for _ in range(2)]
        optimizer = StochasticAdamW(groups, rounding_seed, lr=LR)
        parameters = [p for group in groups for p in group["params"]]
        for step in (1, 2, 55_924, 55_925, 55_926, 10**6):
            for p in parameters:
                p.grad = torch.ones(1)
                moments = {"exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
                optimizer.state[p] = {"step": torch.tensor(step - 1.0), **moments}
            optimizer.step()
            calls += len(parameters)
    assert len(seeds) == calls


def test_bf16_numbers_and_special_values_stay():
    x = torch.tensor([0.0, -0.0, 1.5, float("inf"), -float("inf"), float("nan"), -float("nan")])
    assert torch.equal(round_stochastically(x, seed(1)).float().nan_to_num(7), x.nan_to_num(7))


def test_nan_stays_nan_whatever_its_bits():
    """Rounded like numbers, the first would become Inf and the second 0."""
    x = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    for number in range(20):
        assert round_stochastically(x, seed(number)).isnan().all()


def train(optimizer: torch.optim.Optimizer, weights: list[Parameter], steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for w in weights:
            gradient = 0.2 + torch.randn(w.shape, generator=generator)
            w.grad = gradient.bfloat16().to(w.dtype)
        optimizer.step()


def weights(dtype: torch.dtype) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 257), (300,))
    tensors = [torch.randn(shape, generator=generator).mul(0.02).bfloat16() for shape in shapes]
    return [Parameter(x.to(dtype)) for x in tensors]


def test_weights_follow_those_of_fp32():
    """Of the way that FP32 weights go, nearest rounding goes less than half."""
    start, exact = weights(torch.float32)[0].detach(), weights(torch.float32)
    train(torch.optim.AdamW(exact, lr=LR), exact, 60)
    way = exact[0].detach() - start
    shares = {}
    for kind in (StochasticAdamW, torch.optim.AdamW):
        w = weights(torch.bfloat16)
        train(kind(w, lr=LR), w, 60)
        shares[kind] = ((w[0].detach() - start) * way).sum() / way.square().sum()
    assert shares[StochasticAdamW] == pytest.approx(1, abs=0.02)
    assert shares[torch.optim.AdamW] < 0.5


def test_a_resumed_run_repeats():
    w = weights(torch.bfloat16)
    optimizer = StochasticAdamW(w, rounding_seed=2, lr=LR)
    train(optimizer, w, 3)
    again = [Parameter(x.detach().clone()) for x in w]
    resumed = StochasticAdamW(again, rounding_seed=2, lr=LR)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other = [Parameter(x.detach().clone()) for x in w]
    otherwise = StochasticAdamW(other, rounding_seed=3, lr=LR)
    otherwise.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, ws in ((optimizer, w), (resumed, again), (otherwise, other)):
        train(each, ws, 1)
    assert all(map(torch.equal, w, again))
    assert not any(map(torch.equal, w, other))


def test_a_parameter_without_gradient_stays():
    used, unused = weights(torch.bfloat16)
    before = unused.detach().clone()
    train(StochasticAdamW([used, unused], lr=LR), [used], 2)
    assert torch.equal(unused, before) and unused.grad is None


def sharded_job() -> tuple[nn.Module, OptimizersContainer]:
    """Two layers whose weights FSDP2 gathers in FP8, and their optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(144, 272), nn.Linear(272, 48)).bfloat16()
    convert_linears(model)
    fsdp.gather_in_fp8(model, FP8Linear)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, OptimizersContainer([model], StochasticAdamW, {"lr": 1e-3, "rounding_seed": 2})


def train_sharded(model: nn.Module, optimizers: OptimizersContainer, steps: range) -> list[Tensor]:
    """The rank's shards afterwards."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(40, 144, generator=generator).bfloat16()).square().mean().backward()
        optimizers.step()
        optimizers.zero_grad()
    return [p.detach().to_local().clone() for p in model.parameters()]


@torch.compiler.set_stance("force_eager")  # Compiled code resumes in the test above.
def resume_sharded(rank: int, folder: Path) -> None:
    model, optimizers = sharded_job()
    train_sharded(model, optimizers, range(3))
    dcp.save({"model": ModelWrapper(model), "optimizer": optimizers}, checkpoint_id=folder)
    want = train_sharded(model, optimizers, range(3, 6))
    model, optimizers = sharded_job()
    dcp.load({"model": ModelWrapper(model), "optimizer": optimizers}, checkpoint_id=folder)
    got = train_sharded(model, optimizers, range(3, 6))
    assert all(map(torch.equal, got, want))


def test_a_resumed_run_repeats_with_shards_that_are_gathered_in_fp8(tmp_path):
    gloo.spawn(resume_sharded, 2, tmp_path)
