"""Observed steps on the kernels: what emulation shows, compiled or not, and no result changes."""

import contextlib
import itertools

import pytest
import torch
from gpu_utils import no_sync
from shapes import LAYER_ENDS
from torch import Tensor, nn

from titan_fp8 import convert_linears, fp8_grouped_mm
from titan_fp8.health import Layer, Observer
from titan_fp8.health.statistics import Stat
from titan_fp8.ops import observe
from titan_fp8.recipe import RECIPES

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)


@pytest.fixture(autouse=True)
def nobody_observes():
    yield
    observe(None)


def observed(step, layers: list[Layer], emulate: bool = False) -> tuple[Tensor, list[list[Tensor]]]:
    """The table of one step; kernels and their observer must not wait for the device."""
    watching = Observer(layers)
    observe(watching.wrap)
    with contextlib.nullcontext() if emulate else no_sync():
        step()
    observe(None)
    return watching.table()


def linears(recipe: str, emulate: bool = False) -> tuple[nn.Module, list[Layer]]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(384, 384, bias=False) for _ in range(3))).bfloat16()
    convert_linears(model, recipe=recipe, emulate=emulate)
    return model, [Layer(name, module, "weight") for name, module in model.named_children()]


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x.clone().requires_grad_())
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), list(model.parameters()))]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_linears_are_seen_and_compute_the_same(recipe: str, compiled: bool):
    x = torch.randn(1000, 384, device="cuda").bfloat16()
    model, layers = linears(recipe)
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True) if compiled else model
    before = gradients(run, x)
    during: list[Tensor] = []
    table, _ = observed(lambda: during.extend(gradients(run, x)), layers)
    after = gradients(run, x)
    for one, other in itertools.chain(zip(before, during, strict=True), zip(before, after)):
        assert torch.equal(one, other)

    emulated, layers = linears(recipe, emulate=True)
    expected, _ = observed(lambda: gradients(emulated, x), layers, emulate=True)
    assert torch.equal(table[..., Stat.NONZERO] > 0, expected[..., Stat.NONZERO] > 0)
    # The layers multiply alike but for roundings, which a few elements of the next x and g show.
    torch.testing.assert_close(table, expected, rtol=0.02, atol=30)
    torch.testing.assert_close(table[0, :2], expected[0, :2], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("aligned", [True, False])
def test_experts_are_seen(recipe: str, aligned: bool):
    ends = LAYER_ENDS["aligned" if aligned else "unaligned"]
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    x, g = (torch.randn(768, n, device="cuda").bfloat16() for n in (256, 384))
    tables = []
    for emulate in (False, True):
        module = nn.Module()
        torch.manual_seed(0)
        weight = torch.randn(len(ends), 384, 256, device="cuda").bfloat16()
        module.weight = nn.Parameter(weight)

        def step(module=module, emulate=emulate):
            y = fp8_grouped_mm(
                x.clone().requires_grad_(),
                module.weight,
                offs,
                recipe=recipe,
                aligned=aligned,
                emulate=emulate,
            )
            y.backward(g)

        step()
        table, tokens = observed(step, [Layer("experts", module, "weight")], emulate)
        tables.append(table)
        assert [each.sum() for each in tokens[0]] == [ends[-1]]
    torch.testing.assert_close(*tables, rtol=1e-4, atol=1e-9)
