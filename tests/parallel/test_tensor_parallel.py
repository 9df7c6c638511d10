"""FP8Linear alone under the parallel styles of PyTorch and torchtitan, on two gloo ranks.

y and all gradients are compared with an oracle that quantizes the slices of each rank, and the
placements with those of nn.Linear. Weights whose shards FP8 GEMMs cannot take are refused.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from gloo import spawn
from plan_oracle import linear
from plans import RECIPES
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from titan_fp8 import FP8Linear, convert_experts, convert_linears

if torch.cuda.is_available():
    pytest.skip("ranks on gloo, for machines without a GPU", allow_module_level=True)

RANKS = 2
B, S, K, N = 2, 72, 352, 224
"""Halves of K and N are multiples of 16, not of 128. B · S is above 128, half of it below."""
BY_TOKENS, BY_CHANNELS = Shard(1), Shard(2)


@dataclass(frozen=True)
class Case:
    """A parallel style and the placements of its input and output.

    `local`: input and output are plain tensors, not DTensors. `partial`: the gradient of y is
    Partial, so that the ranks' gradients add up to it.
    """

    style: str
    x: Placement
    y: Placement
    local: bool = False
    partial: bool = False

    def __str__(self) -> str:
        notes = ", local" * self.local + ", partial gradient" * self.partial
        return f"{self.style}, {self.x} to {self.y}{notes}"


CASES = (
    Case("Colwise", Replicate(), BY_CHANNELS, local=True),
    Case("Colwise", Replicate(), BY_CHANNELS),
    Case("Colwise", BY_TOKENS, BY_CHANNELS, local=True),
    Case("Colwise", BY_TOKENS, BY_CHANNELS),
    Case("Colwise", Replicate(), Replicate(), partial=True),
    Case("Rowwise", BY_CHANNELS, Replicate(), local=True),
    Case("Rowwise", BY_CHANNELS, Replicate()),
    Case("Rowwise", BY_CHANNELS, BY_TOKENS, local=True),
    Case("Rowwise", BY_TOKENS, BY_TOKENS),
    Case("Rowwise", BY_CHANNELS, Replicate(), partial=True),
    Case("NoParallel", Replicate(), Replicate(), local=True),
    Case("NoParallel", Replicate(), Replicate()),
    Case("NoParallel", Replicate(), Replicate(), partial=True),
    Case("NoParallel", BY_TOKENS, BY_TOKENS),
)


def operands() -> dict[str, Tensor]:
    """x, weight, bias and y's gradient in two summands; the magnitude varies by channel."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        magnitude = torch.exp2(torch.randint(-4, 4, shape[-1:], generator=generator))
        return torch.randn(shape, generator=generator) * magnitude

    return {
        "x": normal(B, S, K),
        "weight": normal(N, K),
        "bias": normal(N),
        "g": normal(RANKS, B, S, N),
    }


def style_of(case: Case):
    from torchtitan.distributed import NoParallel

    if case.style == "NoParallel":
        # Given the input's layout, NoParallel would gather it.
        return NoParallel(output_layout=case.y, use_local_output=case.local)
    style = {"Colwise": ColwiseParallel, "Rowwise": RowwiseParallel}[case.style]
    return style(input_layouts=case.x, output_layouts=case.y, use_local_output=case.local)


def run_case(case: Case, recipe: str, with_bias: bool, mesh: DeviceMesh) -> dict:
    """y and the gradients, gathered, and the placements of those that are DTensors."""
    tensors = operands()
    model = nn.Sequential(nn.Linear(K, N, bias=with_bias))
    model.load_state_dict({f"0.{k}": tensors[k] for k in ("weight", "bias")[: 1 + with_bias]})
    convert_linears(model, recipe=recipe)
    parallelize_module(model, mesh, {"0": style_of(case)})
    x = distribute_tensor(tensors["x"], mesh, [case.x])
    x = (x.to_local() if case.local else x).detach().requires_grad_()
    y = model(x)
    if case.partial:
        y.to_local(grad_placements=[Partial()]).backward(tensors["g"][mesh.get_local_rank()])
    else:
        g = distribute_tensor(tensors["g"].sum(0), mesh, [case.y])
        y.backward(g.to_local() if case.local else g)
    results = {"y": y, "x": x.grad, "weight": model[0].weight.grad}
    if with_bias:
        results["bias"] = model[0].bias.grad
    placements = {k: t.placements for k, t in results.items() if isinstance(t, DTensor)}
    if case.local:
        results["y"] = DTensor.from_local(y, mesh, [case.y])
        results["x"] = DTensor.from_local(x.grad, mesh, [case.x])
    whole = {name: t.full_tensor().detach() for name, t in results.items()}
    return {"whole": whole, "placements": placements}


def run_cases(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    results = {
        (case, recipe, with_bias): run_case(case, recipe, with_bias, mesh)
        for case in CASES
        for recipe in (*RECIPES, "bf16")
        for with_bias in (True, False)
    }
    torch.save(results, folder / str(rank))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of both ranks for each case, recipe ("bf16": nn.Linear) and bias."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    spawn(run_cases, RANKS, folder)
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(RANKS)]


def expected(case: Case, recipe: str, with_bias: bool) -> dict[str, Tensor]:
    """The results of the oracle: a product for each rank's slices, concatenated or summed."""
    tensors = operands()
    x, w, bias = (tensors[name].requires_grad_() for name in ("x", "weight", "bias"))
    if case.style == "Colwise":
        y = torch.cat([linear(x, part, recipe) for part in w.chunk(RANKS)], -1)
    elif case.style == "Rowwise":
        parts = zip(x.chunk(RANKS, -1), w.chunk(RANKS, 1), strict=True)
        y = sum(linear(x_part, w_part, recipe) for x_part, w_part in parts)
    else:
        shares = x.chunk(RANKS, 1) if case.x == BY_TOKENS else [x]
        y = torch.cat([linear(share, w, recipe) for share in shares], 1)
    y = y + bias if with_bias else y
    y.backward(tensors["g"].sum(0))
    gradients = {"x": x.grad, "weight": w.grad, "bias": bias.grad}
    return {"y": y.detach()} | {name: g for name, g in gradients.items() if g is not None}


@pytest.mark.parametrize("with_bias", (True, False), ids=("bias", "no bias"))
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sharded_linear_sums_what_its_slices_give(case, recipe, with_bias, results):
    wanted = expected(case, recipe, with_bias)
    for on_rank in results:
        got = on_rank[case, recipe, with_bias]["whole"]
        assert got.keys() == wanted.keys()
        for name in wanted:
            error = (got[name] - wanted[name]).norm() / wanted[name].norm()
            # FP32 sums differ in their order.
            assert error < 1e-6, name


# nn.Linear passes a partial gradient on as it is; quantization needs the sum.
@pytest.mark.parametrize("with_bias", (True, False), ids=("bias", "no bias"))
@pytest.mark.parametrize("case", [case for case in CASES if not case.partial], ids=str)
def test_placements_are_those_of_a_dense_linear(case, with_bias, results):
    for on_rank in results:
        dense = on_rank[case, "bf16", with_bias]["placements"]
        assert dense
        for recipe in RECIPES:
            assert on_rank[case, recipe, with_bias]["placements"] == dense


REFUSALS = {
    "linear, N": (ColwiseParallel, (64, 80), r"dimension 0 of \(80, 64\).*\[40\]"),
    "linear, K": (RowwiseParallel, (80, 64), r"dimension 1 of \(64, 80\).*\[40\]"),
    "linear, uneven": (ColwiseParallel, (64, 16), r"dimension 0 of \(16, 64\).*\[8\]"),
    "experts": ("TensorParallel", (64, 48), r"dimension 1 of \(4, 48, 64\).*\[24\]"),
    "experts of two ranks": (
        "ExpertTensorParallel",
        (64, 48),
        r"dimension 1 of \(4, 48, 64\).*\[24\]",
    ),
}


def refuse(rank: int, folder: Path) -> None:
    from torchtitan.distributed import expert_parallel
    from torchtitan.models.moe.moe import GroupedExperts

    mesh, mesh_2d = (
        init_device_mesh("cpu", shape, mesh_dim_names=names)
        for shape, names in (((RANKS,), ("tp",)), ((1, RANKS), ("ep", "etp")))
    )
    messages = {}
    for name, (style, (k, n), _) in REFUSALS.items():
        model = nn.ModuleDict()
        if isinstance(style, str):
            model["experts"] = GroupedExperts(k, n, num_experts=4, use_grouped_mm=False)
            convert_experts(model)
            style = getattr(expert_parallel, style)
        else:
            model["linear"] = nn.Linear(k, n)
            convert_linears(model)
        on = mesh_2d if name == "experts of two ranks" else mesh
        try:
            parallelize_module(model, on, {next(iter(model)): style()})
        except ValueError as error:
            messages[name] = str(error)
    model = nn.ModuleDict({"linear": nn.Linear(32, 48)})
    parallelize_module(model, mesh, {"linear": ColwiseParallel()})
    try:
        convert_linears(model)
    except ValueError as error:
        messages["converted afterwards"] = str(error)
    plain, sharded, x = FP8Linear(32, 64), FP8Linear(32, 64, bias=False), torch.randn(4, 32)
    sharded.weight = nn.Parameter(distribute_tensor(plain.weight.detach(), mesh, [Shard(0)]))
    for name, layer, given in (
        ("of another mesh", sharded, DTensor.from_local(x, mesh_2d)),
        ("of no mesh", sharded, x),
        ("for plain weights", plain, DTensor.from_local(x, mesh)),
    ):
        try:
            layer(given)
        except TypeError as error:
            messages[name] = str(error)
    torch.save(messages, folder / str(rank))


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    spawn(refuse, RANKS, folder)
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


@pytest.mark.parametrize("name", REFUSALS)
def test_a_shard_that_the_hardware_cannot_take_is_refused_on_every_rank(name, refusals):
    *_, message = REFUSALS[name]
    for on_rank in refusals:
        assert name in on_rank, "not refused"
        assert re.search(f"{message}.*multiples of 16", on_rank[name])


def test_so_is_one_of_a_model_that_is_converted_afterwards(refusals):
    for on_rank in refusals:
        assert re.search(r"linear.weight: .*\[24\]", on_rank["converted afterwards"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("of another mesh", "weight is on .*tp=2.*another operand on .*ep=1, etp=2"),
        ("of no mesh", "input is on no mesh"),
        ("for plain weights", "weight is on no mesh"),
    ],
)
def test_an_input_that_is_not_on_the_mesh_of_the_weight_is_an_error(name, message, refusals):
    for on_rank in refusals:
        assert re.search(message, on_rank[name])
