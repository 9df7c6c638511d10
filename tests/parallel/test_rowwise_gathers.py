"""FSDP2's gathers of rowwise weights, of rows and of columns, in unusual orders; on gloo ranks."""

import contextlib
from collections.abc import Callable

import gloo
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from titan_fp8 import convert_linears, fsdp
from titan_fp8.modules.linear import FP8Linear

DIM, STEPS = 64, 4


class Model(nn.Module):
    """Blocks with a residual sum, and a norm and an output layer in one FSDP2 unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, DIM)) for _ in range(3)
        )
        self.norm, self.output = nn.RMSNorm(DIM), nn.Linear(DIM, DIM)

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x: Tensor, checkpointed: bool = False, output: bool = True) -> Tensor:
        x = checkpoint(self.hidden, x, use_reentrant=False) if checkpointed else self.hidden(x)
        x = self.norm(x)
        return self.output(x) if output else x


def sharded(fp8: bool) -> Model:
    torch.manual_seed(0)
    model = Model()
    convert_linears(model, recipe="rowwise", filter_fqns=[])
    if fp8:
        fsdp.gather_in_fp8(model, FP8Linear)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), "mp_policy": policy}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard([model.norm, model.output], reshard_after_forward=True, **options)
    fully_shard(model, **options)
    return model


def batch(step: int) -> Tensor:
    seed = 10 * step + dist.get_rank()
    return torch.randn(2, 24, DIM, generator=torch.Generator().manual_seed(seed))


# What a step computes


def plainly(model: Model, step: int) -> Tensor:
    return model(batch(step))


def in_one_checkpoint(model: Model, step: int) -> Tensor:
    """Backward recomputes the blocks, none of which FSDP2 has gathered for it."""
    return model(batch(step).requires_grad_(), checkpointed=True)


def output_afterwards(model: Model, step: int) -> Tensor:
    """One module of a unit runs alone, as in a chunked loss: FSDP2 does not free the unit then."""
    return model.output(model(batch(step), output=False))


def after_an_evaluation(model: Model, step: int) -> Tensor:
    with torch.no_grad():
        model(batch(step + 50))
    return model(batch(step))


def after_an_error(model: Model, step: int) -> Tensor:
    def fail(*_: object) -> None:
        raise KeyError

    handle = model.blocks[1][1].register_forward_pre_hook(fail)
    with contextlib.suppress(KeyError):
        model(batch(step + 50))
    handle.remove()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model(batch(step))


def with_changing_resharding(model: Model, step: int) -> Tensor:
    model.set_reshard_after_forward(step % 2 == 0)
    return model(batch(step))


def unsharded_by_hand(model: Model, step: int) -> Tensor:
    for block in model.blocks:
        block.unshard()
    out = model(batch(step))
    model.blocks[1].unshard()
    return out


def after_assigning_weights(model: Model, step: int) -> Tensor:
    """Weights in new memory are gathered once before they are planned."""
    model(batch(step + 50))
    if step == 2:
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    return model(batch(step))


def after_weights_that_replace_these_for_a_while(model: Model, step: int) -> Tensor:
    """As weights of an exponential moving average do in an evaluation."""
    model(batch(step + 50))
    own = dict(model.state_dict())
    averages = {name: value.detach().clone() for name, value in own.items()}
    for value in averages.values():
        value.mul_(0.5)
    for state in (averages, own):
        model.load_state_dict(state, assign=True)
        out = model(batch(step))
    return out


def prefetched(model: Model, step: int) -> Tensor:
    if step == 0:
        blocks = list(model.blocks)
        for block, following in zip(blocks, blocks[1:]):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
    return model(batch(step))


def prefetched_after_its_forward(model: Model, step: int) -> Tensor:
    """torchtitan's multi-token prediction prefetches the first block again at its end."""
    model.norm.set_modules_to_forward_prefetch([model.blocks[0]])
    return model(batch(step))


WAYS = (plainly, in_one_checkpoint, output_afterwards, after_an_evaluation, after_an_error)
WAYS += (with_changing_resharding, unsharded_by_hand, after_assigning_weights, prefetched)
WAYS += (after_weights_that_replace_these_for_a_while, prefetched_after_its_forward)


def train(way: Callable, fp8: bool) -> list[Tensor]:
    """This rank's gradients and losses."""
    model, found = sharded(fp8), []
    for step in range(STEPS):
        loss = way(model, step).float().square().mean()
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                found.append(p.grad.to_local())
                with torch.no_grad():
                    p -= 0.1 * p.grad
        found.append(loss.detach())
        model.zero_grad()
        fsdp.requantize([model])
    return found


def compare(rank: int) -> None:
    for way in WAYS:
        want, got = (train(way, fp8) for fp8 in (False, True))
        assert len(got) == len(want) and all(map(torch.equal, got, want)), way.__name__


def test_gradients_are_those_of_gathers_in_high_precision():
    gloo.spawn(compare, 2)
