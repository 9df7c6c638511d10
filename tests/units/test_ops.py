"""The ops as PyTorch sees them: schemas, fakes, functional behavior and input checks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from count import Count
from op_calls import E4M3, PERMUTATION, calls, ops, token_ops
from torch.fx.experimental.proxy_tensor import make_fx

from titan_fp8.kernels import hopper
from titan_fp8.ops import NAMES, direct


def outputs(op, args):
    result = op(*args)
    return result if isinstance(result, tuple) else (result,)


def test_every_op_is_called():
    called = {op.__name__ for op, _ in calls()}
    assert called == {name.split("::")[1] for name in registered()} - {"sequence"} == set(NAMES)


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


CHECKED = {form(*call): call for call in calls(tokens=[(257, 48)], gemms=[(257, 32, 48)])}
"""One call of each form."""


def test_the_gpu_tests_of_progress_have_inputs_for_every_kernel():
    """CI cannot run them, so it checks that none is missing."""
    tests = (Path(__file__).parents[1] / "gpu/test_progress.py").read_text(encoding="utf-8")
    assert [name for name in hopper.__all__ if f'"{name}": (' not in tests] == []


@pytest.mark.parametrize("call", CHECKED.values(), ids=CHECKED)
def test_opcheck(call):
    op, args = call
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(isinstance(a, torch.Tensor) and a.dtype == E4M3 for a in args):
        # It compares inputs by allclose, which FP8 lacks; the next test does so for every op.
        tests.append("test_schema")
    keywords = {} if op in PERMUTATION else {"emulate": True}
    torch.library.opcheck(op.default, args, keywords, test_utils=tests)


TAKES_HIGH_PRECISION = [
    call
    for call in CHECKED.values()
    if call[0].__name__.startswith(("quantize", "swiglu", "blockwise_swiglu"))
]


@pytest.mark.parametrize("change", [torch.Tensor.half, torch.Tensor.double, lambda x: x[..., 1:]])
@pytest.mark.parametrize("emulate", [False, True])
def test_what_a_kernel_would_misread_is_refused(change, emulate):
    assert {op.__name__ for op, _ in TAKES_HIGH_PRECISION} > {"quantize_row", "blockwise_swiglu"}
    for op, (x, *args) in TAKES_HIGH_PRECISION:
        x = change(x)
        name = op.default._schema.arguments[0].name
        words = f"titan_fp8::{op.__name__}: {name} is {x.dtype} of shape {tuple(x.shape)}: "
        with pytest.raises(ValueError, match=re.escape(words)):
            op(x, *args, emulate=emulate)


def test_inputs_of_one_op_have_one_dtype():
    x, g = torch.randn(32, 48), torch.randn(32, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="b is torch.bfloat16 .*, the same for a, b"):
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


def dispatched(function) -> set[str]:
    """The ops of titan_fp8 that went through the dispatcher."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return {e.name for e in profile.events() if e.name.startswith("titan_fp8::")}


class Subclass(torch.Tensor):
    pass


def test_direct_calls_use_the_dispatcher_where_something_needs_it():
    x = torch.randn(32, 48)
    want = ops.quantize_row(x)

    def compare():
        got = direct.quantize_row(x)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(got, want, strict=True))

    def under_a_mode():
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            compare()

    assert dispatched(compare) == set()
    assert dispatched(under_a_mode) == {"titan_fp8::quantize_row"}
    mode = Count()
    with mode:
        direct.quantize_row(x)
    assert mode.calls == {"quantize_row": 1}
    mode = Count()
    mode.ignores_fp8_ops = True  # as the modes of a checkpoint that saves none of them
    with mode:
        direct.quantize_row(x)
        assert not mode.calls
        torch.ops.titan_fp8.quantize_row(x)
    assert mode.calls == {"quantize_row": 1}
    with torch.utils.flop_counter.FlopCounterMode(display=False), mode:
        assert dispatched(compare) == {"titan_fp8::quantize_row"}  # for the other mode
    of_subclass = lambda: direct.quantize_row(x.as_subclass(Subclass))  # noqa: E731
    assert dispatched(of_subclass) == {"titan_fp8::quantize_row"}
    compiled = torch.compile(direct.quantize_row, backend="aot_eager", fullgraph=True)
    assert dispatched(lambda: compiled(x)) == {"titan_fp8::quantize_row"}


def test_compiled_code_is_cached_for_these_schemas_only():
    """Code that another version of titan_fp8 has left in Inductor's cache would not fit the ops."""
    code = """
import os, torch
infer = torch.library.infer_schema
if not (fork := os.fork()):
    torch.library.infer_schema = lambda *a, **b: infer(*a, **b).replace("emulate", "emulated")
import titan_fp8.ops
if fork and os.wait()[1]:
    raise SystemExit("the other process failed")
print(torch.compiler.config.cache_key_tag)
"""
    command = [sys.executable, "-c", code]
    tags = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split()
    assert len(tags) == len(set(tags)) == 2


@torch.no_grad()
def test_code_from_the_compiler_skips_the_dispatcher():
    """It names arguments that have defaults, and passes PyTorch's number for a default dtype."""
    op = ops.blockwise_fprop.default
    (number,) = (a.default_value for a in op._schema.arguments if a.name == "out_dtype")
    x, w = torch.randn(5, 144).bfloat16(), torch.randn(32, 144).bfloat16()
    operands = *ops.quantize_1x128(x), w

    def dispatched(out_dtype, emulate) -> bool:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            y = op(*operands, aligned=False, offs=None, out_dtype=out_dtype, emulate=emulate)
        assert torch.equal(y, op(*operands)) and y.dtype == torch.bfloat16
        return any("blockwise_fprop" in event.name for event in profile.events())

    assert not dispatched(number, True) and not dispatched(torch.bfloat16, False)
    with Count():
        assert dispatched(number, True)
    with torch.enable_grad():
        assert dispatched(number, True)
    with pytest.raises(RuntimeError, match="missing value for argument 'w'"):
        op(*operands[:2])


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
