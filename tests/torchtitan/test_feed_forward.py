"""torchtitan's feed-forwards, fused: w1, w2 and w3 run as one `fp8_swiglu`."""

import copy
import logging
import pickle

import pytest
import torch
from count import Count
from swiglu_cases import H, K, outputs
from titan import BOTH, LINEAR, converted, job, of_type
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from torchtitan.models.moe.moe import FeedForward

from titan_fp8 import FP8Linear, convert_linears
from titan_fp8.functional.swiglu import fp8_swiglu
from titan_fp8.torchtitan_0_2.feed_forward import FP8FeedForward, fuse_feed_forwards


def feed_forward(recipe: str = "blockwise", **options) -> nn.Module:
    """A model with one feed-forward, "0", converted and fused."""
    torch.manual_seed(0)
    model = nn.Sequential(FeedForward(K, H))
    convert_linears(model, recipe=recipe, **options)
    fuse_feed_forwards(model)
    return model


def run(model: nn.Module) -> list[Tensor]:
    x = torch.randn(2, 20, K, generator=torch.Generator().manual_seed(2)).requires_grad_()
    return outputs(model(x), (x, *model.parameters()))


def unfused() -> nn.Module:
    model = nn.Sequential(FeedForward(K, H))
    model.load_state_dict(feed_forward().state_dict())
    convert_linears(model)
    return model


def test_a_fused_feed_forward_is_the_function_of_its_weights():
    model = feed_forward()
    assert isinstance(model[0], FP8FeedForward)
    x = torch.randn(2, 20, K, generator=torch.Generator().manual_seed(2)).requires_grad_()
    weights = [model[0].w1.weight, model[0].w2.weight, model[0].w3.weight]
    want = outputs(fp8_swiglu(x, *weights), (x, *weights))
    with Count() as count:
        got = run(model)
    assert count.calls["swiglu_1x128"] == count.calls["swiglu_backward_1x128_128x1_t"] == 1
    assert all(map(torch.equal, got, want))


def test_names_parameters_and_classes_of_the_linears_stay():
    plain, model = nn.Sequential(FeedForward(K, H)), feed_forward()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(type(m) is FP8Linear for m in (model[0].w1, model[0].w2, model[0].w3))
    with torch.no_grad():
        model[0].init_weights(0.02)
    assert fuse_feed_forwards(model) == 0


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_fused(clone):
    model = feed_forward()
    other = clone(model)
    assert type(other[0]) is type(model[0])
    assert other[0].w1.weight is not model[0].w1.weight
    assert all(map(torch.equal, run(other), run(model)))


def test_other_recipes_and_partly_converted_feed_forwards_are_not_fused():
    for options in ({"recipe": "rowwise"}, {"recipe": "bf16"}, {"filter_fqns": ["w2"]}):
        assert type(feed_forward(**options)[0]) is FeedForward
    model = nn.Sequential(FeedForward(K, H))
    convert_linears(model[0].w1, emulate=True)
    convert_linears(model)
    assert fuse_feed_forwards(model) == 0
    model = nn.Sequential(FeedForward(K, H))
    model[0].w2 = nn.Linear(H, K)
    convert_linears(model)
    assert fuse_feed_forwards(model) == 0


def hook(register: str, calls: list):
    def hang(feed_forward: nn.Module):
        return getattr(feed_forward.w2, register)(lambda *_: calls.append(register))

    return hang


def global_hook(calls: list):
    module = torch.nn.modules.module
    return lambda _: module.register_module_forward_hook(lambda *_: calls.append("global"))


def wrapped_forward(calls: list):
    def hang(feed_forward: nn.Module) -> None:
        forward = feed_forward.w3.forward
        feed_forward.w3.forward = lambda x: calls.append("forward") or forward(x)

    return hang


def wrapped(wrap):
    def hang(feed_forward: nn.Module) -> None:
        feed_forward.w1 = wrap(feed_forward.w1)

    return hang


def compiled_in_place(feed_forward: nn.Module) -> None:
    feed_forward.w1.compile(backend="aot_eager")


HOOKS = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
)


CALLS: list[str] = []


HANGING = {name: hook(name, CALLS) for name in HOOKS} | {
    "global hook": global_hook(CALLS),
    "wrapped forward": wrapped_forward(CALLS),
}

WRAPPED = {
    "checkpoint wrapper": wrapped(checkpoint_wrapper),
    "compiled module": wrapped(lambda m: torch.compile(m, backend="aot_eager")),
    "compiled in place": compiled_in_place,
}


@pytest.mark.parametrize("name", [*HANGING, *WRAPPED])
def test_what_hangs_on_a_linear_turns_fusion_off(name):
    CALLS.clear()
    model = feed_forward()
    handle = (HANGING | WRAPPED)[name](model[0])
    try:
        with Count() as count:
            got = run(model)
    finally:
        if name == "global hook":
            handle.remove()
    assert "swiglu_1x128" not in count.calls
    assert all(map(torch.equal, got, run(unfused())))
    assert bool(CALLS) == (name in HANGING)


def add_bias(linear: nn.Module) -> None:
    linear.bias = nn.Parameter(torch.randn(linear.out_features))


SETTINGS = {
    "bias": add_bias,
    "recipe": lambda linear: setattr(linear, "recipe", "rowwise"),
    "emulate": lambda linear: setattr(linear, "emulate", True),
}


@pytest.mark.parametrize("which", ["w1", "w2", "w3"])
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_set_after_the_conversion_counts(name, which):
    models = feed_forward(), unfused()
    for model in models:
        torch.manual_seed(3)
        SETTINGS[name](getattr(model[0], which))
    with Count() as count:
        got, want = map(run, models)
    assert "swiglu_1x128" not in count.calls
    assert all(map(torch.equal, got, want))


def test_removing_a_hook_turns_fusion_on_again():
    model = feed_forward()
    model[0].w1.register_forward_hook(lambda *_: None).remove()
    model[0].register_forward_hook(lambda *_: None)
    with Count() as count:
        run(model)
    assert count.calls["swiglu_1x128"] == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointed_is_the_same_to_the_bit(compiled):
    model = feed_forward()

    def recomputed(x):
        return checkpoint(model, x, use_reentrant=False)

    if compiled:
        recomputed = torch.compile(recomputed, backend="aot_eager", fullgraph=True)
    gradients = []
    for f in (model, recomputed):
        x = torch.randn(2, 20, K, generator=torch.Generator().manual_seed(2)).requires_grad_()
        gradients.append(outputs(f(x), (x, *model.parameters())))
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize(
    "model, flavor, fused",
    [
        ("llama3", "tiny", 2),
        ("llama4", "tiny", 2),
        ("qwen3", "tiny", 2),
        ("qwen3", "tiny_moe", 0),
        ("deepseek_v3", "tiny", 2),
    ],
)
def test_the_converter_fuses_every_feed_forward_and_says_so(
    tmp_path, caplog, fresh_torchtitan, model, flavor, fused
):
    caplog.set_level(logging.INFO)
    converters = (LINEAR,) if (model, flavor) in (("llama3", "tiny"), ("qwen3", "tiny")) else BOTH
    built = converted(job(tmp_path, model, converters=converters, flavor=flavor))
    assert len(of_type(built, FP8FeedForward)) == fused
    assert (f"titan_fp8: {fused} feed-forwards run fused" in caplog.text) == (fused > 0)
    for name, module in built.named_modules():
        if type(module).__name__.endswith("FeedForward"):
            assert isinstance(module, FP8FeedForward), name
