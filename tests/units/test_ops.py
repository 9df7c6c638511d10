"""The ops as PyTorch sees them: schemas, fakes, functional behavior and input checks."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from count import Count
from op_calls import E4M3, INTEGERS, PERMUTATION, calls, ops, token_ops
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import titan_fp8
from titan_fp8.compile.graph_passes import FewerOps
from titan_fp8.functional.weights import GatheredWeight
from titan_fp8.ops import DTYPES, OPS, call, registry


def outputs(op, args):
    result = op(*args)
    return result if isinstance(result, tuple) else (result,)


def test_every_op_is_called():
    called = {op.__name__ for op, _ in calls()}
    assert called == {name.split("::")[1] for name in registered()} - {"sequence"} == set(OPS)


def registered() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {name.split(".")[0] for name in names if name.startswith("titan_fp8::")}


def form(op, args) -> str:
    """What may change how an op is traced, in words: dimensions, None, flags, but no dtype.

    Whether groups are aligned changes the width of quantized columns, but no product.
    """
    words = {torch.Tensor: lambda a: f"{a.dim()}d", torch.dtype: lambda a: "dtype"}
    if not ("quantize" in op.__name__ or "swiglu" in op.__name__):
        words[bool] = lambda a: "flag"
    return ", ".join([op.__name__, *(words.get(type(a), str)(a) for a in args)])


CHECKED = {form(*case): case for case in calls(tokens=[(257, 48)], gemms=[(257, 32, 48)])}
"""One call of each form."""


def test_the_gpu_tests_of_progress_have_inputs_for_every_kernel():
    """CI cannot run them, so it checks that none is missing."""
    tests = (Path(__file__).parents[1] / "gpu/test_progress.py").read_text(encoding="utf-8")
    kernels = [name for name, op in OPS.items() if op.is_fp8 and op.body is None]
    assert kernels and [name for name in kernels if f'"{name}": (' not in tests] == []


def requiring_grad(args) -> list:
    """The arguments, of which all floating-point tensors require grad."""
    args = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
    for a in args:
        if isinstance(a, torch.Tensor) and a.is_floating_point():
            a.requires_grad_()
    return args


@pytest.mark.parametrize("case", CHECKED.values(), ids=CHECKED)
def test_opcheck(case):
    op, args = case
    args = requiring_grad(args)
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(isinstance(a, torch.Tensor) and a.dtype == E4M3 for a in args):
        # It compares inputs by allclose, which FP8 lacks; the next test does so for every op.
        tests.append("test_schema")
    keywords = {} if op in PERMUTATION else {"emulate": True}
    torch.library.opcheck(op.default, args, keywords, test_utils=tests)


@pytest.mark.parametrize("case", CHECKED.values(), ids=CHECKED)
def test_no_output_has_a_gradient(case):
    """Neither of backward nor of forward mode: that of the reference would skip the casts."""
    op, args = case
    for function in (op, op.default, functools.partial(call, op.__name__)):
        assert not any(y.requires_grad for y in outputs(function, requiring_grad(args)))
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(a, torch.ones_like(a))
                if isinstance(a, torch.Tensor) and a.dtype in DTYPES
                else a
                for a in args
            ]
            for y in outputs(function, duals):
                assert y.dtype == E4M3 or forward_ad.unpack_dual(y).tangent is None


def refused(op, name, t, is_first):
    """What an argument must not be in place of t."""
    allowed = INTEGERS if op in PERMUTATION and not t.is_floating_point() else [t.dtype]
    for dtype in (torch.float16, torch.float64, torch.int32, torch.int16, torch.float8_e5m2):
        if dtype not in allowed:
            yield t.to(dtype)
    yield t[..., None, :, None]
    if not is_first:
        yield t.to("meta")
    if op in PERMUTATION:
        return
    if is_first:
        yield t[..., 1:]
    if name.startswith("s") or "_s" in name or name == "amax":
        yield from (torch.cat([t, t], -1), t[..., :-1])


def ways_to_call(op, args):
    yield lambda: op(*args)
    yield lambda: op.default(*args)
    yield lambda: call(op.__name__, *args)
    yield lambda: under(Count(), op, args)
    yield lambda: under(FakeTensorMode(allow_non_fake_inputs=True), op, args)


def under(mode, op, args):
    with mode:
        return op(*args)


def test_what_a_kernel_would_misread_is_refused():
    """FP16 read as bf16, a scale that ends too early, an address of another device."""
    for op, args in CHECKED.values():
        names = [argument.name for argument in op.default._schema.arguments]
        for at in [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]:
            for bad in refused(op, names[at], args[at], not at):
                words = f"titan_fp8::{op.__name__}: {names[at]} is {bad.dtype} of shape "
                ways = [*ways_to_call(op, (*args[:at], bad, *args[at + 1 :]))]
                for way in ways if bad.dtype == torch.float16 else ways[:1]:
                    with pytest.raises(ValueError, match=re.escape(words) + ".*: allowed is "):
                        way()


def test_constants_are_checked():
    x = torch.randn(32, 48)
    q, s = ops.quantize_row(x)
    for way, words in (
        (lambda: ops.quantize_1x128(x, scale_fmt="e8m0"), "scale_fmt = 'e8m0': allowed are 'fp32'"),
        (
            lambda: ops.rowwise_mm(q, s, q, s, out_dtype=torch.half),
            "out_dtype = torch.float16: all",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            way()


def test_the_compiler_refuses_what_a_kernel_would_misread():
    operands = *ops.quantize_1x128(torch.randn(5, 144)), torch.randn(32, 144).half()
    compiled = torch.compile(ops.blockwise_fprop, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="titan_fp8::blockwise_fprop: w is torch.float16"):
        compiled(*operands)


def test_inputs_of_one_op_have_one_dtype():
    x, g = torch.randn(32, 48), torch.randn(32, 48, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="b is torch.bfloat16 .*: allowed is torch.float32 of"):
        ops.swiglu_1x128(x, g)


def test_outputs_are_as_the_fakes_say_and_inputs_as_they_were():
    for op, args in calls():
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        real = outputs(op, args)
        meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
        fake = outputs(op, meta)
        what = f"{op.__name__} of {tuple(args[0].shape)}"
        for got, said in zip(real, fake, strict=True):
            assert got.shape == said.shape and got.dtype == said.dtype, what
            if not got.numel():
                continue
            assert got.stride() == said.stride(), f"{what}: {got.stride()}, {said.stride()}"
            assert got.untyped_storage().nbytes() >= said.untyped_storage().nbytes(), what
        storages = {t.untyped_storage().data_ptr() for t in real if t.numel()}
        assert len(storages) == sum(t.numel() > 0 for t in real), f"{what}: outputs share memory"
        for arg, copy in zip(args, before, strict=True):
            if isinstance(arg, torch.Tensor):
                assert torch.equal(arg.float(), copy.float()), f"{what}: changed its input"
                assert not arg.numel() or arg.untyped_storage().data_ptr() not in storages, what


def test_non_contiguous_inputs_are_made_contiguous():
    x, a, b = (torch.randn(144, 300).t() for _ in range(3))
    calls = [(op, (x,)) for op in (ops.quantize_1x128, ops.quantize_row, *token_ops())]
    calls += [(ops.swiglu_1x128, (a, b)), (ops.swiglu_backward_1x128_128x1_t, (x, a, b))]
    for op, args in calls:
        contiguous = [t.contiguous() for t in args]
        for got, want in zip(op(*args), op(*contiguous), strict=True):
            assert torch.equal(got.float(), want.float()) and got.stride() == want.stride()
    index = torch.tensor([5, -1, 5, 299, 0])
    assert torch.equal(ops.gather_rows(x, index), ops.gather_rows(x.contiguous(), index))


def profiled(function) -> set[str]:
    """The ops of titan_fp8 that the profiler sees: those that went through the dispatcher."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return {e.name for e in profile.events() if e.name.startswith("titan_fp8::")}


def dispatched(function) -> set[str]:
    """The ops of titan_fp8 that go through the dispatcher while no profiler runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_profiler_enabled", lambda: False)
        return profiled(function)


FORWARD = {"titan_fp8::quantize_1x128_128x1_t", "titan_fp8::blockwise_fprop"}
BACKWARD = {"titan_fp8::quantize_1x128_128x1_t", "titan_fp8::blockwise_dgrad"}
BACKWARD |= {"titan_fp8::blockwise_wgrad"}


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_the_profiler_sees_the_ops_of_a_layer(backend):
    """Also those that compiled code calls as one sequence."""
    layer = torch.nn.Sequential(torch.nn.Linear(48, 32))
    titan_fp8.convert_linears(layer)
    x = torch.randn(5, 48, requires_grad=True)
    with torch._inductor.config.patch(post_grad_custom_post_pass=FewerOps()):
        run = torch.compile(layer, backend=backend) if backend else layer
        run(x).sum().backward()
        assert profiled(lambda: run(x)) - {"titan_fp8::sequence"} == FORWARD
        y = run(x).sum()
        assert profiled(y.backward) - {"titan_fp8::sequence"} == BACKWARD


class Subclass(torch.Tensor):
    pass


def test_layers_use_the_dispatcher_where_something_needs_it():
    x, w = torch.randn(32, 48), torch.randn(16, 48)
    want = titan_fp8.fp8_linear(x, w)
    ops_of_layer = {"titan_fp8::quantize_1x128", "titan_fp8::blockwise_fprop"}

    def compare():
        assert torch.equal(titan_fp8.fp8_linear(x, w), want)

    def under_a_mode():
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            compare()

    with torch.no_grad():
        assert dispatched(compare) == set()
        assert dispatched(under_a_mode) == ops_of_layer
        mode = Count()
        with mode:
            compare()
        assert mode.calls == {"quantize_1x128": 1, "blockwise_fprop": 1}
        mode = Count()
        registry.modes_that_ignore_ops.add(mode)  # as those of a checkpoint that saves no FP8 op
        with mode:
            compare()
            assert not mode.calls
            ops.quantize_row(x)
        assert mode.calls == {"quantize_row": 1}
        with torch.utils.flop_counter.FlopCounterMode(display=False), mode:
            assert dispatched(compare) == ops_of_layer  # for the other mode
        of_subclass = lambda: titan_fp8.fp8_linear(x.as_subclass(Subclass), w)  # noqa: E731
        assert dispatched(of_subclass) == ops_of_layer
        (q, scale), (_, of_columns) = ops.quantize_128x128(w), ops.quantize_128x128_t(w)
        gathered = GatheredWeight(q, scale, of_columns, w.dtype)
        assert dispatched(lambda: titan_fp8.fp8_linear(x, gathered)) == set()


def test_imports_change_no_state_of_pytorch_and_schemas_the_key_of_compiled_code():
    """Code that another version of titan_fp8 has left in Inductor's cache would not fit the ops."""
    code = """
import os, torch
import torch._dynamo.config, torch._functorch.config, torch.compiler.config
from torch._inductor import config
from torch._inductor.codecache import compiled_fx_graph_hash
def state():
    configs = torch._dynamo, torch._functorch, torch._inductor, torch.compiler
    return [module.config.save_config() for module in configs], dict(os.environ)
before, infer = state(), torch.library.infer_schema
if not (fork := os.fork()):
    torch.library.infer_schema = lambda *a, **b: infer(*a, **b).replace("emulate", "emulated")
import titan_fp8.functional, titan_fp8.compile.recomputation
from titan_fp8.compile.graph_passes import FewerOps
assert state() == before
if fork and os.wait()[1]:
    raise SystemExit("the other process failed")
with config.patch(post_grad_custom_post_pass=FewerOps()):
    key, _ = compiled_fx_graph_hash(torch.fx.GraphModule({}, torch.fx.Graph()), [], {}, [])
print(key)
"""
    command = [sys.executable, "-c", code]
    keys = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split()
    assert len(keys) == len(set(keys)) == 2


@torch.no_grad()
def test_what_traces_above_autograd_sees_the_op():
    x = torch.randn(5, 144).bfloat16()

    class Constant(torch.nn.Module):
        def forward(self, y):
            return y + ops.quantize_row.default(x)[1].sum()

    y = torch.zeros(1)
    exported = torch.export.export(Constant(), (y,), strict=False)
    assert torch.equal(exported.module()(y), Constant()(y))
    quantize = ops.quantize_row.default
    graph = make_fx(lambda t: quantize(t)[1], tracing_mode="real", pre_dispatch=True)(x).graph
    assert quantize in {node.target for node in graph.nodes}
    several = torch.stack([x, 2 * x])
    (each,) = torch.vmap(lambda t: (quantize(t)[1],))(several)
    assert torch.equal(each, torch.stack([quantize(x)[1], quantize(2 * x)[1]]))
