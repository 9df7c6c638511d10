"""With `fsdp_all_gather` FSDP2 gathers embeddings in forward only, on gloo ranks."""

import gloo
import torch
import torch.distributed as dist
from all_gathers import count_all_gathers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from titan_fp8.fsdp import requantize

VOCABULARY, DIM = 40, 16


class Projected(nn.Embedding):
    """Backward reads the weight of its projection."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.projection = nn.Linear(DIM, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.projection(super().forward(tokens))


class Model(nn.Module):
    def __init__(self, tied: bool, projected: bool):
        super().__init__()
        self.embedding = (Projected if projected else nn.Embedding)(VOCABULARY, DIM)
        self.layer = nn.Linear(DIM, DIM)
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.layer(self.embedding(tokens)))


UNITS = {
    "alone": lambda model: model.embedding,
    "with a layer": lambda model: [model.embedding, model.layer],
    "projected": lambda model: model.embedding,
    "tied": lambda model: [model.embedding, model.output],
    "root": None,
}
"""What is sharded together with the embedding, before the model is."""


def train(unit: str, told: bool = False) -> tuple[list[Tensor], int]:
    """Parameters after three steps, and the numbers received in the last."""
    torch.manual_seed(0)
    model = Model(tied=unit == "tied", projected=unit == "projected")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if choose := UNITS[unit]:
        fully_shard(choose(model), mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    counter = count_all_gathers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        counter.numbers_received = 0
        tokens = torch.randint(VOCABULARY, (2, 8), generator=generator)
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if told:
            requantize([model])
    return [p.full_tensor() for p in model.parameters()], counter.numbers_received


def compare(rank: int) -> None:
    for unit in UNITS:
        parameters, received = train(unit)
        got, fewer = train(unit, told=True)
        assert all(map(torch.equal, got, parameters)), unit
        saved = VOCABULARY * DIM if unit == "alone" else 0
        assert received - fewer == saved, (unit, received, fewer)


def test_an_embedding_that_is_a_unit_of_its_own_is_not_gathered_in_backward():
    gloo.spawn(compare, 2)
