"""`revert`: converted models become the plain ones of before."""

import pytest
import torch
from titan import BOTH, CONVERTERS, TRACE_BLOCKS, build, convert, job, one_process
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import parametrizations

from titan_fp8 import FP8Linear, convert_linears, revert
from titan_fp8.fsdp import gather_in_fp8

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")


def classes(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
@pytest.mark.parametrize("model", ["llama3", "deepseek_v3", "llama4", "qwen3"])
def test_a_model_is_that_of_before(tmp_path, model, recipe):
    converters = CONVERTERS.get(model, BOTH)
    flavor = "tiny_moe" if model == "qwen3" else "tiny"
    body = f'[quantize.linear.titan_fp8]\nrecipe = "{recipe}"\n'
    config = job(tmp_path, model, *TRACE_BLOCKS, converters=converters, flavor=flavor, body=body)
    plain, fp8 = build(config), build(config)
    convert(config, fp8)
    before = classes(plain)
    changed = {name for name, cls in classes(fp8).items() if cls is not before[name]}
    parameters, attributes = dict(fp8.named_parameters()), vars(fp8.layers["0"].attention.wq)
    assert {"recipe", "fqn"} <= attributes.keys()
    assert set(revert(fp8)) == changed and changed
    assert classes(fp8) == before
    assert {name: id(p) for name, p in fp8.named_parameters()} == {
        name: id(p) for name, p in parameters.items()
    }
    for name, module in plain.named_modules():
        assert vars(fp8.get_submodule(name)).keys() == vars(module).keys(), name
    assert revert(fp8) == []


def test_after_training_it_computes_what_plain_modules_do_and_hooks_stay():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    convert_linears(model)
    calls: list[nn.Module] = []
    model[0].register_forward_hook(lambda module, *_: calls.append(module))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 32)
    model(x).square().mean().backward()
    optimizer.step()
    assert revert(model) == ["0", "2"]
    plain = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x), plain(x)) and calls == [model[0], model[0]]
    convert_linears(model, recipe="rowwise")
    assert model[0].recipe == "rowwise"


def test_under_fsdp2():
    with one_process():
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        x = torch.randn(4, 32)
        expected = model(x)
        convert_linears(model)
        for module in (model[1], model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        assert not torch.equal(model(x), expected)
        assert revert(model) == ["0", "1"]
        assert isinstance(model[1], FSDPModule) and not isinstance(model[1], FP8Linear)
        assert type(model[1]).__name__ == "FSDPLinear"
        y = model(x)
        assert torch.equal(y, expected)
        y.sum().backward()
        assert all(layer.weight.grad is not None for layer in model)


def parametrized() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
    convert_linears(model)
    parametrizations.weight_norm(model["b"])
    return model


def patched() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
    convert_linears(model)
    forward = model["b"].forward
    model["b"].forward = lambda x: forward(x)
    return model


def gathered(shard: bool = True) -> nn.Module:
    model = nn.ModuleDict({"b": nn.Linear(32, 32)})
    convert_linears(model)
    gather_in_fp8(model, FP8Linear)
    if shard:
        with one_process():
            fully_shard(model["b"], mesh=init_device_mesh("cpu", (1,)))
    return model


def test_fp8_gathers_of_what_is_not_sharded_yet_are_given_up():
    model = gathered(shard=False)
    revert(model)
    layer, x = model["b"], torch.randn(4, 32)
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    with one_process():
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize(
    "make, reason",
    [
        (parametrized, "b cannot be reverted: its class, ParametrizedFP8Linear, is derived"),
        (patched, "b cannot be reverted: its forward was replaced"),
        (gathered, "b cannot be reverted: FSDP2 gathers its weights in FP8; set fsdp_all_gather"),
        (lambda: 3, "model is 3: allowed is a Module"),
    ],
)
def test_what_cannot_be_reverted_is_named_and_nothing_is_changed(make, reason):
    model = make()
    before = classes(model) if isinstance(model, nn.Module) else None
    with pytest.raises(ValueError, match=reason):
        revert(model)
    assert before is None or classes(model) == before
