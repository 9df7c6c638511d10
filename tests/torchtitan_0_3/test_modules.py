"""What converted modules compute: linears, feed-forwards, experts and their dispatch."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import titan_0_3
import torch
from count import Count
from health_runs import assert_complete, layers_in
from torch import Tensor, nn
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.protocols.module import Module

from titan_fp8 import convert_experts, fp8_linear
from titan_fp8.functional.swiglu import fp8_swiglu
from titan_fp8.health import Monitor
from titan_fp8.torchtitan_0_3 import FP8GroupedExpertsConverter, FP8LinearConverter
from titan_fp8.torchtitan_0_3.experts import FP8Experts
from titan_fp8.torchtitan_0_3.feed_forward import FP8FeedForward
from titan_fp8.torchtitan_0_3.linear import FP8Linear

K, H, E, TOP_K = 64, 96, 4, 2


def linear(out: int, into: int) -> Linear.Config:
    return Linear.Config(in_features=into, out_features=out)


class Root(Module):
    """A model of one module, "part"."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        part: Module.Config


def convert(part: Module.Config, *converters) -> nn.Module:
    """The module of a config, converted, with parameters that depend on their names."""
    root = Root.Config(part=part)
    for converter in converters:
        converter.build().convert(root)
    module = root.part.build()
    titan_0_3.initialize(module)
    return module


def feed_forward(recipe: str = "blockwise") -> nn.Module:
    config = FeedForward.Config(w1=linear(H, K), w2=linear(K, H), w3=linear(H, K))
    return convert(config, FP8LinearConverter.Config(recipe=recipe, filter_fqns=[]))


def inputs(tokens: int = 20) -> Tensor:
    return torch.randn(tokens, K, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_a_linear_is_fp8_linear():
    layer = convert(linear(H, K), FP8LinearConverter.Config(recipe="rowwise"))
    x = inputs()
    assert type(layer) is FP8Linear and "recipe=rowwise" in repr(layer)
    assert torch.equal(layer(x), fp8_linear(x, layer.weight, recipe="rowwise"))


@pytest.mark.parametrize("recipe, fused", [("blockwise", True), ("rowwise", False)])
def test_a_feed_forward_is_fused_where_the_recipe_has_the_ops(recipe, fused):
    module = feed_forward(recipe)
    assert isinstance(module, FP8FeedForward) == fused and isinstance(module, FeedForward)
    x = inputs()
    with Count() as count:
        y = module(x)
        y.sum().backward()
    assert count.calls.get("swiglu_1x128", 0) == fused
    want = fp8_swiglu(x, module.w1.weight, module.w2.weight, module.w3.weight, recipe=recipe)
    assert torch.equal(y, want)


def hook(module: nn.Module) -> None:
    module.w1.register_forward_hook(lambda *_: None)


def wrap(module: nn.Module) -> None:
    module.w2.forward = FP8Linear.forward.__get__(module.w2)


def shard(module: nn.Module) -> None:
    module.w3.tensor_parallel = True


@pytest.mark.parametrize("change", [hook, wrap, shard])
def test_a_feed_forward_calls_its_linears_where_that_does_more(change):
    module, x = feed_forward(), inputs()
    want = module(x)
    change(module)
    with Count() as count:
        got = module(x)
    assert "swiglu_1x128" not in count.calls
    assert (got - want).abs().max() < 0.01 * want.abs().max()


def test_a_wrapper_that_has_nothing_to_redistribute_is_no_reason_to_call():
    module, x = feed_forward(), inputs()
    for layer in (module.w1, module.w2, module.w3):
        layer.forward = layer.wrapper = lambda input, layer=layer: FP8Linear.forward(layer, input)
    with Count() as count:
        module(x)
    assert count.calls["swiglu_1x128"] == 1


def routed(experts: type = GroupedExperts, recipe: str = "blockwise", health_freq: int = 0):
    config = RoutedExperts.Config(
        inner_experts=experts.Config(dim=K, hidden_dim=H, num_experts=E),
        token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=E, top_k=TOP_K),
    )
    converter = FP8GroupedExpertsConverter.Config(
        recipe=recipe, fqns=["part"], health_freq=health_freq
    )
    return convert(config, converter)


def run(module: nn.Module) -> dict[str, Tensor]:
    """The output and all gradients for tokens that leave expert 3 empty."""
    x = inputs(30)
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(1, 30, TOP_K, generator=generator).requires_grad_()
    chosen = torch.stack([torch.randperm(3, generator=generator)[:TOP_K] for _ in range(30)])[None]
    y = module(x.bfloat16()[None], scores, chosen, torch.bincount(chosen.flatten(), minlength=E))
    y.float().square().sum().backward()
    parameters = {name: p.grad for name, p in module.named_parameters()}
    return {"y": y, "x": x.grad, "scores": scores.grad, **parameters}


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("experts", [GroupedExperts, GptOssGroupedExperts])
def test_experts_compute_in_fp8(experts, recipe):
    module = routed(experts, recipe).bfloat16()
    assert isinstance(module.inner_experts, FP8Experts)
    with Count() as count:
        fp8 = run(module)
    assert any("fprop" in name or "swiglu" in name for name in count.calls)
    high = run(routed(experts, "bf16").bfloat16())
    for name, expected in high.items():
        error = (fp8[name] - expected).float().norm() / expected.float().norm()
        assert error < 0.15, f"{name}: {error}"
    assert not torch.equal(fp8["y"], high["y"])


def test_experts_with_biases_are_observed():
    module = routed(GptOssGroupedExperts, health_freq=1).bfloat16()
    reports: dict[int, dict[str, float]] = {}
    logger = SimpleNamespace(log=lambda scalars, step: reports.update({step: scalars}))
    monitor = Monitor([1], last_step=2)
    for step in (1, 2):
        run(module)
        monitor.after_step(step, [module], logger, torch.device("cpu"))
    assert reports.keys() == {2}
    weights = ("mlp1_weight_EGD", "mlp2_weight_EDF")
    assert layers_in(reports[2]) == {f"part.inner_experts.{name}" for name in weights}
    assert_complete(reports[2])


def test_the_function_for_experts_of_another_version_says_so():
    with pytest.raises(ImportError, match="convert_experts needs torchtitan==0.2.2"):
        convert_experts(nn.Linear(16, 16))
