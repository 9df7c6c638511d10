"""With `fsdp_all_gather` FSDP2 gathers embeddings in forward only, on gloo ranks."""

import gloo
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from titan_fp8 import fsdp

VOCABULARY, DIM = 40, 16


class Model(nn.Module):
    def __init__(self, tied: bool):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layer = nn.Linear(DIM, DIM)
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.layer(self.embedding(tokens)))


class CountingAllGather(DefaultAllGather):
    """FSDP2's all-gather, counting the numbers that it receives."""

    received = 0

    def __call__(self, output_tensor, input_tensor, *args, **options):
        CountingAllGather.received += output_tensor.numel()
        return super().__call__(output_tensor, input_tensor, *args, **options)


UNITS = {
    "alone": lambda model: model.embedding,
    "with a layer": lambda model: [model.embedding, model.layer],
    "tied": lambda model: [model.embedding, model.output],
    "root": None,
}
"""What is sharded together with the embedding, before the model is."""


def train(unit: str, told: bool) -> tuple[list[Tensor], int]:
    """Parameters after three steps, and the numbers received in the last."""
    torch.manual_seed(0)
    model = Model(tied=unit == "tied")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if choose := UNITS[unit]:
        fully_shard(choose(model), mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(CountingAllGather())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        CountingAllGather.received = 0
        tokens = torch.randint(VOCABULARY, (2, 8), generator=generator)
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if told:
            fsdp.requantise([model])
    return [p.full_tensor() for p in model.parameters()], CountingAllGather.received


def compare(rank: int) -> None:
    for unit in UNITS:
        parameters, received = train(unit, told=False)
        got, fewer = train(unit, told=True)
        assert all(map(torch.equal, got, parameters)), unit
        saved = VOCABULARY * DIM if unit == "alone" else 0
        assert received - fewer == saved, (unit, received, fewer)


def test_an_embedding_that_is_a_unit_of_its_own_is_not_gathered_in_backward():
    gloo.spawn(compare, 2)
