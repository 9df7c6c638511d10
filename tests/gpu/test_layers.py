"""Whole layers on the kernels: equal to the emulation, one graph, no wait for the device.

Kernels and emulation quantize alike, bit for bit. Their products differ by how the tensor cores add
and by the rounding of the output to bf16, at most 2^-9 of a value. `CLOSE` allows for both, and not
for a scale that is off by a factor or a block that is skipped. If one product is the input of the
next, differences in the last bit of the first flip roundings to e4m3: `CLOSE_AFTER_TWO` allows for
sums that are off by 3e-4 of their mean size, which give an error of 8e-3 in emulation. An h that is
not quantized at all gives 2.6e-2.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from gpu_utils import no_sync
from shapes import LAYER_ENDS, ODD_LINEAR
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import titan_fp8
from titan_fp8.functional.swiglu import fp8_swiglu
from titan_fp8.layouts import E4M3
from titan_fp8.recipe import RECIPES

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

CLOSE = 4e-3
CLOSE_AFTER_TWO = 0.015


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def gradients(y: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    g = torch.randn(y.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    return y.detach(), *torch.autograd.grad(y, inputs, g.to(y.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", ODD_LINEAR)
@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_is_its_emulation(recipe: str, shape: tuple[int, int, int], dtype: torch.dtype):
    m, n, k = shape
    x = torch.randn(m, k, device="cuda", dtype=dtype, requires_grad=True)
    w = torch.randn(n, k, device="cuda", dtype=dtype, requires_grad=True)
    b = torch.randn(n, device="cuda", dtype=dtype, requires_grad=True)
    real, emulated = (
        gradients(titan_fp8.fp8_linear(x, w, b, recipe=recipe, emulate=emulate), x, w, b)
        for emulate in (False, True)
    )
    for got, want in zip(real, emulated, strict=True):
        assert got.dtype == want.dtype == dtype
        assert error(got, want) < CLOSE


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("aligned", [True, False])
def test_grouped_is_its_emulation_and_waits_for_nothing(recipe: str, aligned: bool):
    ends = LAYER_ENDS["aligned" if aligned else "unaligned"]
    offs = torch.tensor([[end, -1] for end in ends], dtype=torch.int32, device="cuda")[:, 0]
    x = torch.randn(768, 704, device="cuda", dtype=torch.bfloat16)
    x[ends[-1] :] = torch.nan
    x.requires_grad_()
    w = torch.randn(4, 576, 704, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def run(emulate: bool) -> tuple[Tensor, ...]:
        y = titan_fp8.fp8_grouped_mm(x, w, offs, recipe=recipe, emulate=emulate, aligned=aligned)
        return gradients(y, x, w)

    run(False)
    with no_sync():
        real = run(False)
    for got, want in zip(real, run(True), strict=True):
        assert error(got, want) < CLOSE
    y, dx, dw = real
    assert not y[ends[-1] :].any() and not dx[ends[-1] :].any() and not dw[1].any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("grouped", [False, True])
def test_it_does_not_matter_where_tensors_lie(recipe: str, grouped: bool):
    whole = torch.randn(768, 1408, device="cuda", dtype=torch.bfloat16)
    offs = torch.tensor([128, 768], dtype=torch.int32, device="cuda")
    flat = torch.randn(2 * 576 * 704 + 1, device="cuda", dtype=torch.bfloat16)
    w = flat[1:].view(2, 576, 704).requires_grad_()

    def run(x: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        if grouped:
            y = titan_fp8.fp8_grouped_mm(x, w, offs, recipe=recipe)
        else:
            y = titan_fp8.fp8_linear(x, w[0], recipe=recipe)
        return gradients(y, x, w)

    odd = flat[1 : 768 * 704 + 1].view(768, 704)
    for x in (whole[:, ::2], whole[:, :704], whole[:, 1:705], odd):
        fresh = x.clone(memory_format=torch.contiguous_format)
        for got, want in zip(run(x), run(fresh), strict=True):
            # cuBLAS may add bf16 products in another order.
            assert error(got, want) < (CLOSE if recipe == "rowwise_with_gw_hp" else 1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_groups_without_a_token(recipe: str):
    x = torch.randn(0, 272, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(2, 144, 272, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    offs = torch.zeros(2, dtype=torch.int32, device="cuda")
    y, dx, dw = gradients(titan_fp8.fp8_grouped_mm(x, w, offs, recipe=recipe), x, w)
    assert y.shape == (0, 144) and dx.shape == x.shape and not dw.any()


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_saved_may_be_offloaded(recipe: str, pinned: bool):
    x = torch.randn(333, 400, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(2, 272, 400, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w2 = torch.randn(2, 144, 272, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    offs = torch.tensor([150, 333], dtype=torch.int32, device="cuda")

    def run() -> tuple[Tensor, ...]:
        x_2 = titan_fp8.fp8_grouped_mm(x, w.mT.contiguous().mT, offs, recipe=recipe)
        y = titan_fp8.fp8_linear(x_2, w2[0], recipe=recipe)
        return y + fp8_swiglu(x, w, w2, w, offs, recipe=recipe)

    want = gradients(run(), x, w, w2)
    with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
        y = run()
        got = gradients(y, x, w, w2)
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < (CLOSE if recipe == "rowwise_with_gw_hp" else 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYER_ENDS)
def test_swiglu_is_its_emulation_and_waits_for_nothing(layout: str, dtype: torch.dtype):
    k, h, n, ends = 704, 1424, 576, LAYER_ENDS[layout]

    def normal(*shape: int, std: float = 1) -> Tensor:
        return (torch.randn(*shape, device="cuda") * std).to(dtype)

    lead = () if ends is None else (len(ends),)
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32, device="cuda")
    x, w2 = normal(768, k), normal(*lead, n, h, std=h**-0.5)
    w1, w3 = (normal(*lead, h, k, std=k**-0.5) for _ in range(2))
    if ends is not None:
        x[ends[-1] :] = torch.nan
    leaves = [t.requires_grad_() for t in (x, w1, w2, w3)]

    def run(emulate: bool) -> tuple[Tensor, ...]:
        y = fp8_swiglu(*leaves, offs, emulate=emulate, aligned=layout == "aligned")
        return gradients(y, *leaves)

    run(False)
    with no_sync():
        real = run(False)
    for got, want in zip(real, run(True), strict=True):
        assert got.dtype == want.dtype == dtype
        assert error(got, want) < CLOSE_AFTER_TWO
    if ends is not None:
        y, dx, *dw = real
        assert not y[ends[-1] :].any() and not dx[ends[-1] :].any()
        assert not any(w[1].any() for w in dw)


@pytest.mark.parametrize("m", [0, 7])
def test_few_tokens_through_swiglu(m: int):
    x = torch.randn(m, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w1, w2, w3 = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for shape in ((512, 256), (256, 512), (512, 256))
    )
    y, dx, *dw = gradients(fp8_swiglu(x, w1, w2, w3), x, w1, w2, w3)
    assert y.shape == dx.shape == x.shape
    assert all(w.isfinite().all() and (m > 0 or not w.any()) for w in dw)


def test_a_fused_feed_forward_compiled_checkpointed_and_eager():
    moe = pytest.importorskip("torchtitan.models.moe.moe")
    from titan_fp8.torchtitan_0_2.feed_forward import fuse_feed_forwards

    model = nn.Sequential(moe.FeedForward(512, 1408)).cuda()
    titan_fp8.convert_linears(model)
    assert fuse_feed_forwards(model) == 1
    x = torch.randn(2, 384, 512, device="cuda", requires_grad=True)
    eager = run_block(model, x, lambda f, x: f(x))
    again = run_block(model, x, lambda f, x: checkpoint(f, x, use_reentrant=False))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        fused = run_block(model, x, lambda f, x: compiled(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for got, other, want in zip(fused, again, eager, strict=True):
        assert torch.equal(other, want)
        assert error(got, want) < CLOSE_AFTER_TWO


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("m", [0, 7])
def test_few_tokens(recipe: str, m: int):
    x = torch.randn(m, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y, dx, dw = gradients(titan_fp8.fp8_linear(x, w, recipe=recipe), x, w)
    assert y.shape == (m, 512) and dx.shape == x.shape
    assert dw.isfinite().all() and (m > 0 or not dw.any())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_captured_step_reads_the_inputs_of_its_replay(recipe: str):
    m, n, k = 512, 704, 576
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.ones(m, n, device="cuda", dtype=torch.bfloat16)

    def step(**keywords) -> tuple[Tensor, ...]:
        y = titan_fp8.fp8_linear(x, w, recipe=recipe, **keywords)
        return y.detach(), *torch.autograd.grad(y, (x, w), g)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    # Overwrite the memory that the eager steps have freed.
    poison = [torch.full((m * k,), 0xFF, device="cuda", dtype=torch.uint8) for _ in range(32)]
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        g.normal_()
    graph.replay()
    for a, b in zip(got, step(emulate=True), strict=True):
        assert error(a, b) < CLOSE
    del poison


@pytest.fixture
def one_rank():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", RECIPES)
def test_fsdp_accumulates_the_gradients_of_the_emulation(one_rank, recipe: str):
    linear = nn.Linear(576, 704, device="cuda")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    batches = torch.randn(2, 333, 576, device="cuda")
    gs = torch.randn(2, 333, 704, device="cuda", dtype=torch.bfloat16)
    grads = []
    for emulate in (False, True):
        model = nn.Sequential(copy.deepcopy(linear))
        titan_fp8.convert_linears(model, recipe=recipe, emulate=emulate)
        fully_shard(model, mesh=one_rank, mp_policy=policy)
        for x, g in zip(batches, gs, strict=True):
            model(x).backward(g)
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    for got, want in zip(*grads, strict=True):
        assert got.dtype == torch.float32
        assert error(got, want) < CLOSE


class Block(nn.Module):
    """A block without attention: a norm, two linears that share their input, and a SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(512)
        self.w1, self.w3 = (nn.Linear(512, 1408, bias=False) for _ in range(2))
        self.w2 = nn.Linear(1408, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


def run_block(block: nn.Module, x: Tensor, forward) -> list[Tensor]:
    block.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = forward(block, x)
    y.float().square().mean().backward()
    return [y.detach(), *(p.grad for p in block.parameters())]


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_checkpointed_and_eager_agree(recipe: str):
    block = Block().cuda()
    titan_fp8.convert_linears(block, recipe=recipe)
    x = torch.randn(2, 384, 512, device="cuda", requires_grad=True)
    eager = run_block(block, x, lambda f, x: f(x))
    again = run_block(block, x, lambda f, x: checkpoint(f, x, use_reentrant=False))
    for got, want in zip(again, eager, strict=True):
        assert torch.equal(got, want)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        fused = run_block(block, x, lambda f, x: compiled(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for got, want in zip(fused, eager, strict=True):
        assert got.isfinite().all()
        # Fusion changes how the norm and SwiGLU round, and FP8 amplifies a flipped rounding.
        assert error(got, want) < 0.05


@pytest.mark.parametrize("recipe", RECIPES)
def test_cuda_graphs_of_a_compiled_block(recipe: str):
    """torch.compile's mode="reduce-overhead": captured once, then replayed for other inputs."""
    block = Block().cuda()
    titan_fp8.convert_linears(block, recipe=recipe)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        x = torch.randn(2, 384, 512, device="cuda", requires_grad=True)
        want = [t.clone() for t in run_block(block, x, lambda f, x: f(x))]
        torch.compiler.cudagraph_mark_step_begin()
        got = [t.clone() for t in run_block(block, x, lambda f, x: compiled(x))]
        for a, b in zip(got, want, strict=True):
            assert a.isfinite().all() and error(a, b) < 0.05
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


def test_no_fp8_weight_is_kept_for_backward():
    block = Block().cuda()
    titan_fp8.convert_linears(block)
    weights = {tuple(p.shape) for p in block.parameters()}
    weights |= {tuple(reversed(shape)) for shape in weights}
    x = torch.randn(384, 512, device="cuda", requires_grad=True)
    for forward in (block, torch.compile(block, fullgraph=True)):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, s=saved: s.append(t) or t, lambda t: t
        ):
            forward(x)
        kept = [t for t in saved if t.dtype == E4M3]
        assert kept and not any(tuple(t.shape) in weights for t in kept)


@pytest.mark.parametrize("recipe", RECIPES)
def test_non_finite_values_stay_where_they_belong(recipe: str):
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(384, 512, device="cuda", dtype=torch.bfloat16)
    x[3, 5], x[200, 400] = torch.nan, torch.inf
    y = titan_fp8.fp8_linear(x, w, recipe=recipe)
    bad = torch.zeros(256, dtype=torch.bool, device="cuda")
    bad[[3, 200]] = True
    assert not y[bad].isfinite().any()
    assert y[~bad].isfinite().all()
