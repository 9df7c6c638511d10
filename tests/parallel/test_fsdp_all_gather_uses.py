"""Weights that FSDP2 gathers in FP8, in what users do besides training; on gloo ranks.

Each test compares bits with those of gathers in high precision, in a model with two recipes;
`test_fsdp_all_gather_plans.py` trains with the others.
"""

import copy
import ctypes
import functools
import io
import itertools
from collections.abc import Callable

import gloo
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torchtitan.experiments.simple_fsdp import simple_fsdp

from titan_fp8 import convert_linears, fsdp
from titan_fp8.fsdp import requantize
from titan_fp8.fsdp.sharded_weight import gathers_of, quantized
from titan_fp8.functional.swiglu import fp8_swiglu
from titan_fp8.modules.linear import FP8Linear

BLOCKWISE = ("blockwise", "blockwise_pow2")
DIM = 64  # On three ranks, shards of 22, 22 and 20 rows.


def build(fp8: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, DIM)) for _ in range(3)))
    convert_linears(model, recipe="blockwise_pow2", filter_fqns=["0.1", "2.1"])
    convert_linears(model, recipe="blockwise", filter_fqns=[])  # the others
    return gather(model, fp8)


def gather(model: nn.Module, fp8: bool) -> nn.Module:
    if fp8:
        fsdp.gather_in_fp8(model, FP8Linear)
    return model


def shard(model: nn.Sequential, apply: Callable = fully_shard) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))
    for module in (*model, model):
        apply(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model


def batch(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(2, 24, DIM, generator=generator)


def train(model: nn.Sequential) -> list[Tensor]:
    """The loss and this rank's parameters of two steps."""
    found = []
    for seed in range(2):
        loss = model(batch(seed)).float().square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        model.zero_grad()
        found += [loss.detach(), *(p.detach().to_local().clone() for p in model.parameters())]
        requantize([model])
    return found


def gathered_in_fp8(model: nn.Sequential) -> bool:
    return all(gathers_of(block[1]) for block in model)


def compare(rank: int, *uses: Callable) -> None:
    for use in uses:
        want, got = (use(fp8) for fp8 in (False, True))
        assert len(got) == len(want) and all(map(torch.equal, got, want)), use.__name__


# Writes that PyTorch notices, and writes that it does not


def by_numpy(w: Tensor, g: Tensor) -> None:
    w.numpy()[:] -= 0.1 * g.numpy()


def by_pointer(w: Tensor, g: Tensor) -> None:
    new = w - 0.1 * g
    ctypes.memmove(w.data_ptr(), new.data_ptr(), new.nbytes)


def by_views(w: Tensor, g: Tensor) -> None:
    w[0].mul_(0.5)
    w.T.sub_(0.1 * g.T)


def by_one_rank(w: Tensor, g: Tensor) -> None:
    if dist.get_rank() == 1:
        by_numpy(w, g)


def by_foreach(model: nn.Sequential) -> None:
    shards = [p.detach().to_local() for p in model.parameters()]
    torch._foreach_add_(shards, [p.grad.to_local() for p in model.parameters()], alpha=-0.1)


def by_optimizer(model: nn.Sequential) -> None:
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def by_set_data(model: nn.Sequential) -> None:
    """FSDP2 goes on with the memory that the shards had."""
    for p in model.parameters():
        p._local_tensor.data = p._local_tensor * 2


def by_state_dict(model: nn.Sequential) -> None:
    for value in model.state_dict().values():
        value.mul_(0.9)


def by_load(model: nn.Sequential, assign: bool = False) -> None:
    state = {name: value * 0.9 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)


def by_assign(model: nn.Sequential) -> None:
    by_load(model, assign=True)


def by_apply(model: nn.Sequential) -> None:
    model._apply(lambda t: t * 0.9)


def by_apply_to_layers(model: nn.Sequential) -> None:
    """FSDP2 is not told, and goes on with the memory that the shards had."""
    for block in model:
        block[1]._apply(lambda t: t * 0.9)


def in_backward(model: nn.Sequential) -> None:
    """From the next step on."""

    @torch.no_grad()
    def step(p: nn.Parameter) -> None:
        p.sub_(0.1 * p.grad)

    for p in model.parameters():
        if not p._post_accumulate_grad_hooks:
            p.register_post_accumulate_grad_hook(step)


def to_shards(write: Callable) -> Callable:
    """Writes to each local shard, given its gradient."""

    @functools.wraps(write)
    def write_all(model: nn.Sequential) -> None:
        for p in model.parameters():
            write(p.detach().to_local(), p.grad.to_local())

    return write_all


def not_at_all(model: nn.Sequential) -> None:
    pass


WRITES = [*map(to_shards, (by_numpy, by_pointer, by_views, by_one_rank)), by_foreach, by_optimizer]
WRITES += [by_state_dict, by_load, by_assign, to_shards(by_pointer), in_backward, not_at_all]
# FSDP2 does not read what is written from by_apply_to_layers on.
WRITES += [by_apply, by_apply_to_layers, by_set_data, not_at_all]


def losses(fp8: bool, told: bool = False) -> list[Tensor]:
    """The loss and an evaluation of each step; the steps write in one way after another.

    In each, other weights are in place for a while, before backward.
    """
    model, found = shard(build(fp8)), []
    for step, write in enumerate(WRITES):
        loss = model(batch(step)).float().square().mean()
        own = [p.detach().to_local().clone() for p in model.parameters()]
        with torch.no_grad():
            torch._foreach_mul_([p.to_local() for p in model.parameters()], 0.5)
            found.append(model.eval()(batch(step)).float())
            torch._foreach_copy_([p.to_local() for p in model.parameters()], own)
        model.train()
        loss.backward()
        with torch.no_grad():
            write(model)
        model.zero_grad()
        if told:
            requantize([model])
        found.append(loss.detach())
    return found


def compare_writes(rank: int) -> None:
    want = losses(fp8=False)
    for told in (False, True):
        for i, (a, b) in enumerate(zip(losses(fp8=True, told=told), want, strict=True)):
            last = WRITES[i // 2 - 1].__name__
            assert torch.equal(a, b), f"after {last}, step {i // 2}, told: {told}"


def test_no_write_is_missed():
    gloo.spawn(compare_writes, 3)


# load_state_dict(assign=True)


def plain_copy(value: DTensor) -> DTensor:
    local = torch.empty(value.to_local().shape).copy_(value.to_local())
    shape = {"shape": value.shape, "stride": value.stride()}
    return DTensor.from_local(local, value.device_mesh, value.placements, run_check=False, **shape)


def assign_plain_shards(fp8: bool) -> list[Tensor]:
    model = shard(build(fp8))
    found = train(model)
    with torch.no_grad():
        state = {name: plain_copy(value * 0.5) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert gathered_in_fp8(model) == fp8
    return found + train(model)


def assign_whole_weights_before_fsdp(fp8: bool) -> list[Tensor]:
    state = build(fp8=False).state_dict()
    with torch.device("meta"):
        model = build(fp8)
    model.load_state_dict(state, assign=True)
    shard(model)
    assert gathered_in_fp8(model) == fp8
    return train(model)


def test_assigned_weights_are_gathered_in_fp8_too():
    gloo.spawn(compare, 3, assign_plain_shards, assign_whole_weights_before_fsdp)


# SimpleFSDP


def load_under_simple_fsdp(fp8: bool) -> list[Tensor]:
    """Replaces no parameter, since an optimizer may hold it, and so each gets a gradient."""
    model = build(fp8)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    simple_fsdp.data_parallel(model, mesh, mode="fully_shard")
    held = dict(model.named_parameters())
    model.load_state_dict({name: plain_copy(value) for name, value in held.items()})
    replaced = [name for name, value in model.named_parameters() if value is not held[name]]
    assert not replaced, replaced
    return train(model)


def test_simple_fsdp():
    """Its weights are properties, which return what it has gathered."""
    gloo.spawn(compare, 2, load_under_simple_fsdp)


# Feed-forwards with some weights gathered in FP8


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.w1, self.w3 = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(DIM, 2 * DIM, bias=False)
        self.w2 = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.w1.weight, self.w2.weight, self.w3.weight
        return fp8_swiglu(self.norm(x), *weights, recipe=self.w1.recipe)


def gather_some_in_fp8(fp8: bool) -> list[Tensor]:
    """FSDP2 gathers a weight in high precision if it shards its last dimension."""
    found = []
    for recipe, others in itertools.product(BLOCKWISE, (["w2"], ["w3"], ["w1", "w2"])):
        torch.manual_seed(0)
        model = FeedForward()
        convert_linears(model, recipe=recipe, filter_fqns=[])
        gather(model, fp8)
        in_high_precision = [model.get_submodule(name).weight for name in others]
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        placement = functools.partial(choose, in_high_precision)
        fully_shard(model, mesh=mesh, mp_policy=policy, shard_placement_fn=placement)
        found += train(model)
    return found


def choose(last_dimension: list[nn.Parameter], param: nn.Parameter) -> Shard:
    return Shard(1 if any(param is each for each in last_dimension) else 0)


def test_feed_forwards_with_some_weights_gathered_in_fp8():
    gloo.spawn(compare, 2, gather_some_in_fp8)


# inference_mode


def infer(model: nn.Sequential) -> list[Tensor]:
    with torch.inference_mode():
        return [model(batch(9)).clone()]


def infer_before_and_after_writes(fp8: bool) -> list[Tensor]:
    model = shard(build(fp8))
    found = train(model) + infer(model)
    with torch.no_grad():
        for p in model.parameters():
            p *= 0.5
    return found + infer(model) + train(model)


def infer_only(fp8: bool) -> list[Tensor]:
    model = shard(build(fp8))
    return infer(model) + infer(model)


def infer_with_assigned_weights(fp8: bool) -> list[Tensor]:
    model = shard(build(fp8))
    found = train(model)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return found + infer(model) + train(model)


def test_inference_mode():
    uses = infer_before_and_after_writes, infer_only, infer_with_assigned_weights
    gloo.spawn(compare, 3, *uses)


# Copies


def copy_state_dict(fp8: bool) -> list[Tensor]:
    model = shard(build(fp8))
    train(model)
    state = copy.deepcopy(model.state_dict())
    found = train(model)
    model.load_state_dict(state)
    return found + train(model)


def copy_model(fp8: bool) -> list[Tensor]:
    model = build(fp8)
    other = shard(copy.deepcopy(model))
    shard(model)
    assert gathered_in_fp8(other) == fp8
    return train(model) + train(other)


def save_shards(fp8: bool) -> list[Tensor]:
    """A shard is an ordinary tensor, alone and in files."""
    model = shard(build(fp8))
    found = train(model)
    found += [copy.deepcopy(block[1]).weight.full_tensor() for block in model]
    for p in model.parameters():
        assert type(p._local_tensor) is Tensor and not p._local_tensor.__dict__
        torch.save(p._local_tensor, file := io.BytesIO())
        file.seek(0)
        found.append(torch.load(file, weights_only=True))
        found.append(torch.tensor(p.to_local().tolist()))
        found.append(torch.from_numpy(p.detach().full_tensor().numpy()))
    return found


def train_in_half_precision(fp8: bool) -> list[Tensor]:
    """FSDP2 casts to bf16 what it gathers; the quantizers do not read FP16."""
    model = shard(build(fp8).half())
    found = train(model)
    assert not gathered_in_fp8(model)
    return found


def test_copies():
    gloo.spawn(compare, 2, copy_state_dict, copy_model, save_shards, train_in_half_precision)


# replicate


def train_replicas(fp8: bool) -> list[Tensor]:
    return train(shard(build(fp8), replicate))


def test_replicate():
    gloo.spawn(compare, 2, train_replicas)


# Shards of different sizes


def load_between_steps(fp8: bool) -> list[Tensor]:
    model = shard(build(fp8))
    early = model.state_dict()
    found = train(model)
    state = {name: value.detach().clone() for name, value in early.items()}
    found += train(model)
    model.load_state_dict(state)
    requantize([model])
    found += train(model)
    return found + [value.full_tensor() for value in early.values()]


def evaluate_averages(fp8: bool) -> list[Tensor]:
    """Assigns other weights for an evaluation, and then the same ones again."""
    model = shard(build(fp8))
    found = train(model)
    own = dict(model.state_dict())
    averages = {name: value.detach().clone().mul_(0.5) for name, value in own.items()}
    for state in (averages, own, averages, own):
        model.load_state_dict(state, assign=True)
        found.append(model(batch(9)).detach())
    return found + train(model)


def test_small_shards_keep_their_memory():
    gloo.spawn(compare, 3, load_between_steps)


def test_small_shards_that_are_replaced():
    gloo.spawn(compare, 3, evaluate_averages)


def change_recipe(rank: int) -> None:
    model = shard(build(fp8=True))
    model(batch(0)).sum().backward()
    model[1][1].recipe = "blockwise"
    with pytest.raises(RuntimeError, match=r"1\.1: recipe is 'blockwise'.*for 'blockwise_pow2'"):
        model(batch(0))


def test_a_recipe_that_changes_after_a_gather_is_an_error():
    gloo.spawn(change_recipe, 2)


def write_after_an_early_quantization(rank: int) -> None:
    """As `health_freq` quantizes, to look at the shards before the step that gathers them."""
    losses = []
    for fp8 in (False, True):
        model = shard(build(fp8))
        for _ in range(2):
            model(batch(0)).sum().backward()
            requantize([model])
        with quantized([model]):
            pass
        for p in model.parameters():
            p.to_local().detach().mul_(0.5)
        losses.append(model(batch(1)).float().sum())
    assert torch.equal(*losses)


def test_a_write_after_an_early_quantization_is_seen():
    gloo.spawn(write_after_an_early_quantization, 2)
