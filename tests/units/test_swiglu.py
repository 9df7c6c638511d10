"""fp8_swiglu against the products it is made of, and torchtitan's feed-forwards that run as one.

The SwiGLU between the products is `reference.swiglu` here, rounded once, so that a fused
feed-forward has to equal the composition to the bit; F.silu is near it.
"""

import copy
import itertools
import logging
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from count import Count
from titan import BOTH, LINEAR, converted, job, of_type
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from torchtitan.models.moe.moe import FeedForward

from titan_fp8 import FP8Linear, convert_linears, fp8_grouped_mm, fp8_linear, reference
from titan_fp8.swiglu import fp8_swiglu
from titan_fp8.torchtitan_0_2.feed_forward import FP8FeedForward, fuse_feed_forwards

E4M3 = torch.float8_e4m3fn
M, K, H, N = 300, 144, 272, 96
LAYOUTS = {
    "dense": (None, False),
    "unaligned": ((5, 5, 133, 290), False),
    "aligned": ((128, 128, 256, 256), True),
}
"""Group ends, of which some are empty and the last is short of M, and whether they are aligned."""


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return reference.swiglu(a, b)

    @staticmethod
    def backward(ctx, dh: Tensor):
        return reference.swiglu_backward(dh, *ctx.saved_tensors)


def silu_and_product(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def composition(
    x, w1, w2, w3, offs=None, *, swiglu=SwiGLU.apply, recipe="blockwise", aligned=False
) -> Tensor:
    """The three products, each by itself."""

    def mm(x: Tensor, w: Tensor) -> Tensor:
        if offs is None:
            return fp8_linear(x, w, recipe=recipe)
        return fp8_grouped_mm(x, w, offs, recipe=recipe, aligned=aligned)

    return mm(swiglu(mm(x, w1), mm(x, w3)), w2)


def operands(groups: int | None = None, dtype=torch.float32, m: int = M) -> tuple[Tensor, ...]:
    """x, w1, w2 and w3; what a row of the weights makes of x is about 1."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float) -> Tensor:
        t = torch.randn(shape, generator=generator) * std
        return t.to(dtype).requires_grad_()

    lead = () if groups is None else (groups,)
    w1, w3 = (normal(*lead, H, K, std=K**-0.5) for _ in range(2))
    return normal(m, K, std=1), w1, normal(*lead, N, H, std=H**-0.5), w3


def case(layout: str, dtype=torch.float32):
    """The operands of a layout, its offs and aligned."""
    ends, aligned = LAYOUTS[layout]
    if ends is None:
        return operands(dtype=dtype), None, aligned
    return operands(len(ends), dtype), torch.tensor(ends, dtype=torch.int32), aligned


def outputs(y: Tensor, leaves) -> list[Tensor]:
    """y and the gradients of the leaves that have one."""
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t.requires_grad], g)]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def saved_by(f, *args) -> list[Tensor]:
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        f(*args)
    return saved


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


# The function


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_its_three_products_with_h_and_dx_rounded_once(layout, dtype):
    leaves, offs, aligned = case(layout, dtype)
    got = outputs(fp8_swiglu(*leaves, offs, aligned=aligned), leaves)
    with Count() as count:
        want = outputs(composition(*leaves, offs, aligned=aligned), leaves)
    assert [t.dtype for t in got] == [dtype] * 5
    _, one, other = (args[:3] for args in count.arguments["blockwise_dgrad"])
    rounded_twice = want[1]
    want[1] = torch.ops.titan_fp8.blockwise_dgrad_pair(*one, *other, offs, aligned, dtype)
    assert all(map(torch.equal, got, want))
    assert error(rounded_twice, want[1]) < 0.004


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_near_silu_and_product(layout):
    """In FP32 but for a rounding to e4m3 that falls the other way, now and then; in bf16 F.silu
    rounds once more, to 2^-9, which turns one rounding to e4m3 in 32 by 2^-4: 0.011."""
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.02)):
        leaves, offs, aligned = case(layout, dtype)
        got = outputs(fp8_swiglu(*leaves, offs, aligned=aligned), leaves)
        separate = composition(*leaves, offs, aligned=aligned, swiglu=silu_and_product)
        for t, want in zip(got, outputs(separate, leaves), strict=True):
            assert error(t, want) < tolerance


def test_it_is_near_high_precision():
    leaves = operands()
    x, w1, w2, w3 = (t.detach().double().requires_grad_() for t in leaves)
    want = outputs((F.silu(x @ w1.mT) * (x @ w3.mT)) @ w2.mT, (x, w1, w2, w3))
    for got, true in zip(outputs(fp8_swiglu(*leaves), leaves), want, strict=True):
        # Each rounding to e4m3 is off by 2.6 % of a value in the mean square; here are up to six.
        assert 0.01 < error(got, true) < 0.1


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_recipes_are_the_three_products(layout, recipe):
    leaves, offs, aligned = case(layout, torch.bfloat16)
    options = {"recipe": recipe, "aligned": aligned}
    got = outputs(fp8_swiglu(*leaves, offs, **options), leaves)
    separate = composition(*leaves, offs, **options, swiglu=silu_and_product)
    assert all(map(torch.equal, got, outputs(separate, leaves)))


def test_rows_past_the_last_group_stay_out():
    leaves, offs, aligned = case("unaligned")
    clean = outputs(fp8_swiglu(*leaves, offs, aligned=aligned), leaves)
    leaves[0].data[290:] = torch.nan
    y, dx, *dw = outputs(fp8_swiglu(*leaves, offs, aligned=aligned), leaves)
    assert not y[290:].any() and not dx[290:].any()
    assert all(map(torch.equal, (y, dx, *dw), clean))
    assert not any(w[1].any() for w in dw)


@pytest.mark.parametrize("shape", [(K,), (0, K), (2, 0, K), (2, 7, K)])
def test_any_leading_dimensions(shape):
    x, w1, w2, w3 = operands()
    x = torch.randn(shape, requires_grad=True)
    y, dx, *dw = outputs(fp8_swiglu(x, w1, w2, w3), (x, w1, w2, w3))
    assert y.shape == (*shape[:-1], N) and dx.shape == shape
    assert all(t.isfinite().all() and (t.any() or not x.numel()) for t in dw)
    flat = fp8_swiglu(x.reshape(-1, K), w1, w2, w3)
    assert torch.equal(y, flat.view(y.shape))


NEEDED = list(itertools.product((True, False), repeat=4))


@pytest.mark.parametrize("needed", NEEDED, ids=str)
def test_what_needs_no_gradient_costs_none(needed):
    """Frozen weights, an input without a gradient: the others' gradients are as ever."""
    leaves = operands()
    _, *every = outputs(fp8_swiglu(*leaves), leaves)
    for leaf, needs in zip(leaves, needed):
        leaf.requires_grad_(needs)
    with Count() as count:
        y = fp8_swiglu(*leaves)
        assert count.calls["blockwise_fprop"] == 3
        assert ("quantize_1x128_128x1_t" in count.calls) == (needed[1] or needed[3])
        if not any(needed):
            assert not y.requires_grad
            return
        _, *got = outputs(y, leaves)
    assert all(map(torch.equal, got, [t for t, needs in zip(every, needed) if needs]))
    needs_dx, *needs_dw = needed
    assert count.calls["blockwise_fprop"] == 3
    assert count.calls["blockwise_dgrad"] == 1
    assert count.calls.get("blockwise_dgrad_pair", 0) == needs_dx
    assert count.calls.get("blockwise_wgrad", 0) == sum(needs_dw)


@pytest.mark.parametrize("needed", NEEDED, ids=str)
def test_what_needs_no_gradient_costs_none_for_groups(needed):
    leaves, offs, aligned = case("unaligned")
    _, *every = outputs(fp8_swiglu(*leaves, offs, aligned=aligned), leaves)
    for leaf, needs in zip(leaves, needed):
        leaf.requires_grad_(needs)
    with Count() as count:
        y = fp8_swiglu(*leaves, offs, aligned=aligned)
        one_op = needed[1] or needed[3]
        assert count.calls == ({"blockwise_swiglu": 1} if one_op else SEPARATE)
        if any(needed):
            _, *got = outputs(y, leaves)
            assert all(map(torch.equal, got, [t for t, needs in zip(every, needed) if needs]))
    assert ("blockwise_swiglu_backward" in count.calls) == all(needed)
    assert ("blockwise_wgrad" in count.calls) == (any(needed[1:]) and not all(needed))


SEPARATE = {"quantize_1x128": 1, "blockwise_fprop": 3, "swiglu_1x128": 1}
"""Calls of forward where nothing is kept for wgrad."""


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients(off):
    leaves = operands()
    y = fp8_swiglu(*leaves)
    with off(), Count() as count:
        assert torch.equal(fp8_swiglu(*leaves), y)
    assert "quantize_1x128_128x1_t" not in count.calls
    with off():
        assert fp8_swiglu(leaves[0] + 1, *leaves[1:]).shape == y.shape


def test_under_autocast():
    leaves = operands()
    with torch.autocast("cpu", torch.bfloat16):
        y, separate = fp8_swiglu(*leaves), composition(*leaves)
    assert y.dtype == torch.bfloat16
    got = outputs(y, leaves)
    assert [t.dtype for t in got[1:]] == [torch.float32] * 4
    assert all(map(torch.equal, got, outputs(separate, leaves)))


def shapes_of(tensors: list[Tensor], *dtypes: torch.dtype) -> list[tuple[int, ...]]:
    return sorted(tuple(t.shape) for t in tensors if t.dtype in dtypes)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kept_are_a_b_and_the_fp8_copy_of_x(layout, compiled):
    """No h, no x, and no FP8 weight, whether the weights are parameters or inputs of a graph."""
    (x, *weights), offs, aligned = case(layout, torch.bfloat16)

    def run(x, *weights):
        return fp8_swiglu(x * 1, *weights, offs, aligned=aligned)

    if compiled:
        run = torch.compile(run, backend="aot_eager_decomp_partition", fullgraph=True)
    width = reference.transposed_width(M, offs, aligned, reference.BLOCK)
    saved = saved_by(run, x, *weights)
    assert shapes_of(saved, E4M3) == [(K, width)]
    of_weights = [tuple(w.shape) for w in weights]
    assert shapes_of(saved, torch.bfloat16) == sorted([(M, H), (M, H), *of_weights])


def test_compiled_is_eager_to_the_bit_for_any_token_count():
    compiled = torch.compile(fp8_swiglu, backend="aot_eager_decomp_partition", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    # More than 128 tokens: one block of them is another graph, as torch specialises on sizes of 1.
    for i, (m, ends) in enumerate(((300, (5, 5, 290)), (257, (0, 257, 257)), (140, (9, 9, 9)))):
        for leaves, offs in (
            (operands(m=m), None),
            (operands(3, m=m), torch.tensor(ends, dtype=torch.int32)),
        ):
            torch._dynamo.mark_dynamic(leaves[0], 0)
            with torch._dynamo.config.patch(error_on_recompile=i > 0):
                y = compiled(*leaves, offs)
            got, want = outputs(y, leaves), outputs(fp8_swiglu(*leaves, offs), leaves)
            assert all(map(torch.equal, got, want))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"recipe": "fp8"}, "recipe = 'fp8': allowed are 'blockwise', "),
        ({"emulate": "no"}, "emulate = 'no': allowed are true and false"),
        ({"aligned": 1}, "aligned = 1: allowed are true and false"),
        ({"x": torch.zeros(3, 128)}, "x has shape (3, 128) and w1, w2, w3 (272, 144), (96, 272), "
         "(272, 144): allowed are (..., K) and (H, K), (N, H), w3 as w1"),
        ({"w3": torch.zeros(256, K)}, "(256, 144): allowed are"),
        ({"w2": torch.zeros(N, 256)}, "(96, 256), (272, 144): allowed are"),
        ({"w2": torch.zeros(2, N, H)}, "(2, 96, 272), (272, 144): allowed are"),
        ({"w2": torch.zeros(24, H)}, "w2 has shape (24, 272): FP8 GEMMs need N = 24 and K = 272"),
        ({"offs": torch.zeros(1, dtype=torch.int32)}, "(M, K) and (E, H, K), (E, N, H), w3 as w1"),
        ({"w1": torch.zeros(H, K, dtype=torch.float16)}, "w1 is torch.float16: allowed are"),
        ({"w2": torch.zeros(N, H, dtype=torch.bfloat16)}, "dtypes differ outside autocast"),
        ({"w2": torch.zeros(N, H, device="meta")}, "w2 is on meta and x on cpu: must be the same"),
    ],
)  # fmt: skip
def test_errors_name_what_is_wrong(change, message):
    arguments = dict(zip(("x", "w1", "w2", "w3"), operands())) | change
    with pytest.raises(ValueError, match=re.escape(message)):
        fp8_swiglu(**arguments)


@pytest.mark.parametrize("offs", [torch.zeros(3), torch.zeros(2, dtype=torch.int32)])
def test_offs_of_another_kind_are_refused(offs):
    with pytest.raises(ValueError, match=r"offs is torch.\w+ of .*: allowed is torch.int32 of .*3"):
        fp8_swiglu(*operands(3), offs)


# torchtitan's feed-forwards


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
    tmp_path, caplog, fresh_host, model, flavor, fused
):
    caplog.set_level(logging.INFO)
    converters = (LINEAR,) if (model, flavor) in (("llama3", "tiny"), ("qwen3", "tiny")) else BOTH
    built = converted(job(tmp_path, model, converters=converters, flavor=flavor))
    assert len(of_type(built, FP8FeedForward)) == fused
    assert (f"titan_fp8: {fused} feed-forwards run fused" in caplog.text) == (fused > 0)
    for name, module in built.named_modules():
        if type(module).__name__.endswith("FeedForward"):
            assert isinstance(module, FP8FeedForward), name
