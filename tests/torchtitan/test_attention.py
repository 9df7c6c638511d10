"""Attention quantizes the input that its projections share once, in eager mode."""

import copy

import pytest
import torch
from count import Count
from titan import LINEAR, converted, job, of_type
from torch import Tensor, nn

import titan_fp8
from titan_fp8.linear import shared_input
from titan_fp8.torchtitan_0_2.attention import SharedInputAttention, share_attention_inputs

RECIPES = {"blockwise": "quantize_1x128_128x1_t", "rowwise": "quantize_row_col_t"}


def materialized(attention: nn.Module) -> nn.Module:
    attention = attention.to_empty(device="cpu")
    torch.manual_seed(0)
    for p in attention.parameters():
        nn.init.normal_(p, std=0.1)
    return attention


def gradients(attention: nn.Module, x: Tensor, *args: object) -> list[Tensor]:
    y = attention(x, *args)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *attention.parameters()))]


@pytest.mark.parametrize("recipe", RECIPES)
def test_llama3_attention_quantizes_its_input_once(tmp_path, recipe):
    flag = f"--{LINEAR}.recipe", recipe
    model = converted(job(tmp_path, "llama3", *flag, converters=(LINEAR,)))
    attention = materialized(next(iter(of_type(model, SharedInputAttention).values())))
    dim = attention.wq.in_features
    x = torch.randn(2, 16, dim, requires_grad=True)
    rope = torch.polar(torch.ones(16, attention.head_dim // 2), torch.zeros(1))
    apart = copy.deepcopy(attention)
    apart.__class__ = SharedInputAttention.__subclasses__()[0].__bases__[1]
    with Count() as count:
        got = gradients(attention, x, rope, None)
    inputs = [args[0] for args in count.arguments[RECIPES[recipe]][:2]]
    with Count() as count_apart:
        expected = gradients(apart, x, rope, None)
    calls, calls_apart = (c.calls[RECIPES[recipe]] for c in (count, count_apart))
    assert calls_apart - calls == 2  # wq, wk and wv
    assert torch.equal(inputs[0], x.detach().view(-1, dim)) and inputs[1].shape == inputs[0].shape
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("name", ["llama3", "qwen3", "llama4", "deepseek_v3"])
def test_every_attention_shares_its_input(tmp_path, name):
    model = converted(job(tmp_path, name, converters=(LINEAR,)))
    kinds = {type(m).__name__ for m in model.modules() if type(m).__name__.endswith("Attention")}
    kinds -= {"ScaledDotProductAttention", "ScaledDotProductAttentionWrapper"}
    assert of_type(model, SharedInputAttention) and len(kinds) == 1
    assert share_attention_inputs(model) == 0  # already


def test_another_input_and_another_recipe_are_quantized_apart():
    linears = [nn.Linear(64, 32, bias=False) for _ in range(3)]
    for linear, recipe in zip(linears, ("blockwise", "blockwise", "rowwise"), strict=True):
        titan_fp8.convert_linears(nn.Sequential(linear), recipe=recipe)
    first, second, rowwise = linears
    x = torch.randn(8, 64, requires_grad=True)
    expected = [first(x), second(x + 1), rowwise(x), second(x)]
    with Count() as count, shared_input(x):
        got = [first(x), second(x + 1), rowwise(x), second(x)]
        with torch.no_grad():
            assert torch.equal(first(x), expected[0])
    assert all(map(torch.equal, got, expected))
    assert count.calls["quantize_1x128_128x1_t"] == 2
    assert count.calls["quantize_row_col_t"] == 1
    with Count() as count:
        first(x), second(x)
    assert count.calls["quantize_1x128_128x1_t"] == 2
