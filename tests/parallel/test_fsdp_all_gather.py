"""FSDP2 gathers weights in FP8: bits, training, counts and checkpoints, on gloo ranks."""

import functools
import itertools
import re

import gloo
import pytest
import torch
import torch.distributed as dist
from all_gathers import count_all_gathers, counting
from titan import GROUPED_MM, LINEAR, build, convert, job, one_process
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torchtitan.tools.utils import set_default_dtype

from titan_fp8 import convert_linears, fsdp
from titan_fp8.fsdp import sharded_weight
from titan_fp8.functional.weights import GatheredWeight
from titan_fp8.modules.linear import FP8Linear
from titan_fp8.patches import log_once
from titan_fp8.recipe import get_recipe
from titan_fp8.torchtitan_0_2.config import TitanFP8GroupedMM, TitanFP8Linear

BF16, FP32 = torch.bfloat16, torch.float32
BLOCKWISE = ("blockwise", "blockwise_pow2")
SHAPES = [
    ((384, 256), 0),  # a block of rows for each of three ranks
    ((768, 144), 0),
    ((272, 144), 0),  # 91 rows, 91 and 90
    ((720, 48), 0),  # blocks cut at both ends of a shard
    ((48, 272), 0),  # one block on three ranks
    ((16, 16), 0),
    ((6, 144, 48), 0),  # whole experts
    ((2, 144, 48), 0),  # no expert for the last rank
    ((2, 144, 48), 1),  # rows of each expert
    ((4, 768, 16), 1),
]
"""Shapes of weights, and the dimension that FSDP2 shards over three ranks."""


class Layer(nn.Module):
    """A weight that an FP8 product would read, in every tile of its own magnitude."""

    def __init__(self, shape: tuple[int, ...], recipe: str, broken: bool = False):
        super().__init__()
        self.recipe, self.emulate = recipe, False
        tiles = [*shape[:-2], *(-(-n // 128) for n in shape[-2:])]
        scale = 10 ** (8 * torch.rand(tiles) - 4)
        scale = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
        weight = torch.randn(shape) * scale[..., : shape[-2], : shape[-1]]
        if broken:
            weight[..., 3, 5], weight[..., -1, -1] = float("nan"), -float("inf")
        self.weight = nn.Parameter(weight)


def shard(model: nn.Module, ranks: int, dtype: torch.dtype = BF16, dim: int = 0) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=FP32)
    mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(model, mesh=mesh, mp_policy=policy, shard_placement_fn=lambda _: Shard(dim))


def assert_equal(got: Tensor, want: Tensor, what: object) -> None:
    """The same values, NaN by position, in the same layout."""
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride()), what
    options = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(got.float(), want.float(), **options, msg=str(what))


def assert_gathered(layer: nn.Module, whole: Tensor, what: object) -> None:
    """FSDP2 gathers what quantizing the whole weight gives, whatever the default dtype is."""
    ops = get_recipe(layer.recipe)
    with set_default_dtype(BF16):
        layer.unshard()
    w = layer.weight
    assert isinstance(w, GatheredWeight) and (w.shape, w.dtype) == (whole.shape, whole.dtype), what
    q, s_t = w.for_dgrad
    for got, want in zip((w.q, w.s), ops.quantize_weight(whole)):
        assert_equal(got, want, what)
    for got, want in zip((torch.ops.titan_fp8.transpose_fp8(q), s_t), ops.quantize_weight_t(whole)):
        assert_equal(got, want, what)
    layer.reshard()


def compare_bits(rank: int, ranks: int) -> None:
    for (shape, dim), recipe, dtype in itertools.product(SHAPES, BLOCKWISE, (BF16, FP32)):
        for broken in (False, True)[: 2 if dtype == BF16 else 1]:
            torch.manual_seed(0)
            layer = Layer(shape, recipe, broken)
            whole = layer.weight.detach().to(dtype)
            fsdp.gather_in_fp8(layer, Layer)
            shard(layer, ranks, dtype, dim)
            assert_gathered(layer, whole, (shape, dim, recipe, dtype, broken))


def test_gathered_weights_are_those_of_the_whole_weight():
    gloo.spawn(compare_bits, 3, 3)


@pytest.mark.parametrize("recipe", BLOCKWISE)
def test_one_rank_gathers_in_fp8_too(recipe):
    with one_process():
        layer = Layer((2, 144, 48), recipe)
        whole = layer.weight.detach().to(BF16)
        fsdp.gather_in_fp8(layer, Layer)
        shard(layer, 1)
        assert_gathered(layer, whole, recipe)


def test_a_recomputation_may_gather_what_forward_had_quantized():
    """As with experts under op-level checkpointing, which lie inside the checkpoint."""
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    with one_process():
        first, second = (nn.Linear(32, 32, bias=False) for _ in range(2))
        inside = nn.Sequential(second, nn.Sigmoid())
        model = nn.Sequential(first, inside)
        convert_linears(model)
        fsdp.gather_in_fp8(model, FP8Linear)
        for layer in (first, second):
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
        x, found = torch.randn(16, 32), []
        model(x)
        for checkpoints in (False, True):
            fsdp.requantize([model])
            h = first(x)  # Its gather quantizes the second weight, too.
            run = functools.partial(checkpoint, inside, use_reentrant=False, context_fn=contexts)
            (run if checkpoints else inside)(h).sum().backward()
            found.append(first.weight.grad.to_local().clone())
            first.zero_grad()
    assert torch.equal(*found)


def assert_gathered_as_before(layer: nn.Module, whole: Tensor) -> None:
    for _ in range(2):
        layer.unshard()
        assert type(layer.weight) is nn.Parameter and torch.equal(layer.weight, whole)
        layer.reshard()


def shard_the_last_dimension(rank: int) -> None:
    torch.manual_seed(0)
    layer = Layer((48, 32), "blockwise")
    whole = layer.weight.detach().to(BF16)
    fsdp.gather_in_fp8(layer, Layer)
    shard(layer, 2, dim=1)
    assert_gathered_as_before(layer, whole)


def test_a_weight_whose_last_dimension_is_sharded_is_gathered_in_high_precision():
    gloo.spawn(shard_the_last_dimension, 2)


def test_weights_that_are_offloaded_to_the_cpu_are_gathered_in_high_precision(caplog):
    log_once.cache_clear()
    with one_process():
        layer = Layer((48, 32), "blockwise")
        whole = layer.weight.detach().clone()
        fsdp.gather_in_fp8(layer, Layer)
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        assert_gathered_as_before(layer, whole)
    assert "in high precision: its shards are on the CPU (training.enable_cpu_off" in caplog.text


def test_a_weight_that_others_read_is_left():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "c": nn.Linear(32, 32)})
    model["b"].weight = model["a"].weight
    convert_linears(model)
    report = fsdp.gather_in_fp8(model, FP8Linear)
    assert [row[0] for row in report.converted] == ["c.weight"]
    assert [row[2] for row in report.left] == 2 * ["another module reads it, too"]
    assert model["b"].weight is model["a"].weight


def test_rowwise_weights_are_left():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
    convert_linears(model, recipe="rowwise", filter_fqns=["b"])
    convert_linears(model, filter_fqns=[])
    report = fsdp.gather_in_fp8(model, FP8Linear)
    assert [row[0] for row in report.converted] == ["b.weight"]
    assert [row[0] for row in report.left] == ["a.weight"]


# Training


STEPS, MICROBATCHES, LAYERS = 3, 2, 3


def train(recipe: str, widths: tuple[int, ...], fp8: bool, together: bool = False) -> tuple:
    """Losses, parameters, bytes gathered, and the shards quantized by each call."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.RMSNorm(k), nn.Linear(k, n)) for k, n in itertools.pairwise(widths)]
    model = nn.Sequential(*blocks)
    convert_linears(model, recipe=recipe)
    if fp8:
        fsdp.gather_in_fp8(model, FP8Linear)
    for module in (*blocks, model):
        shard(module, dist.get_world_size())
    counter = count_all_gathers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    with counting() as (_, calls):
        for _ in range(STEPS):
            for _ in range(MICROBATCHES):
                x = torch.randn(40, widths[0], generator=generator)
                loss = model(x).float().square().mean()
                loss.backward()
                losses.append(loss.detach())
            assert all(p.grad.dtype == FP32 for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            if together:
                fsdp.requantize([model])
    return losses, [p.full_tensor() for p in model.parameters()], counter.bytes_sent, calls


def compare_training(rank: int) -> None:
    all_widths = (272, 144, 176, 48), (256, 512, 256, 512)
    for recipe, widths in zip(BLOCKWISE, all_widths, strict=True):
        losses, parameters, sent, calls = train(recipe, widths, fp8=False)
        assert not calls
        for together in (False, True):
            what = recipe, widths, together
            got = train(recipe, widths, fp8=True, together=together)
            assert torch.stack(got[0]).equal(torch.stack(losses)), what
            assert all(map(torch.equal, got[1], parameters)), what
            # All but the bytes of the norms are of FP8 weights.
            assert 0.5 <= got[2] / sent <= 0.53, what
            # Every gather on its own, of forward and of backward, or once a step.
            a_step = MICROBATCHES * 2 * LAYERS * [1]
            assert got[3] == (a_step + (STEPS - 1) * [LAYERS] if together else STEPS * a_step), what


def test_training_is_the_same_with_half_the_bytes_and_one_quantization_a_step():
    gloo.spawn(compare_training, 2)


def quantize_when_due(rank: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    convert_linears(model)
    fsdp.gather_in_fp8(model, FP8Linear)
    for module in (*model, model):
        shard(module, 2)

    def calls(training: bool = True) -> list[int]:
        model.train(training)
        with counting() as (_, counted):
            model(torch.ones(8, 64))
        return counted

    assert calls() == calls(training=False) == calls() == [1, 1]
    fsdp.requantize([model])
    assert (calls(), calls(), calls(training=False), calls(), calls()) == ([2], [], [1, 1], [2], [])
    model.load_state_dict(model.state_dict())
    assert (calls(), calls()) == ([2], [])
    model._apply(lambda t: t * 2)
    assert (calls(), calls()) == ([2], [])


def test_when_shards_are_quantized():
    """In eval mode at every gather, otherwise once after each call of `requantize`."""
    gloo.spawn(quantize_when_due, 2)


# The key in TOML files


@pytest.mark.parametrize(
    "kind, section", [(TitanFP8Linear, LINEAR), (TitanFP8GroupedMM, GROUPED_MM)]
)
def test_the_key_takes_booleans(kind, section):
    assert kind().fsdp_all_gather is True
    with pytest.raises(
        ValueError, match=rf"\[{section}\] fsdp_all_gather = 'fp8': allowed are true"
    ):
        kind(fsdp_all_gather="fp8")


@pytest.mark.usefixtures("fresh_torchtitan")
def test_models_without_fsdp2_are_left_alone(tmp_path, caplog):
    """torchtitan's own model, on two ranks, and the log of its conversion."""
    config = job(tmp_path, "simple_fsdp.deepseek_v3", flavor="tiny")
    with caplog.at_level("INFO"):
        model = convert(config, build(config), ranks=2)
    assert {type(p.data) for p in model.parameters()} == {Tensor}
    assert "FSDP2 gathers" not in caplog.text and "_fully_shard" not in caplog.text


@pytest.mark.usefixtures("fresh_torchtitan")
@pytest.mark.parametrize("kind", ["linear", "grouped_mm"])
def test_health_needs_fsdp2(tmp_path, kind):
    config = job(tmp_path, "simple_fsdp.deepseek_v3", flavor="tiny")
    getattr(config.quantize, kind).titan_fp8.health_freq = 3
    message = rf"\[quantize.{kind}.titan_fp8\] health_freq = 3: with model.name = 'simple_fsdp.deep"
    with pytest.raises(ValueError, match=message):
        convert(config, build(config), ranks=2)
    convert(config, build(config), ranks=1)  # gathers nothing


@pytest.mark.usefixtures("fresh_torchtitan")
@pytest.mark.parametrize("recipe", ["blockwise", "bf16"])
def test_the_report_says_what_is_gathered(tmp_path, caplog, recipe):
    config = job(tmp_path, "deepseek_v3", f"--{LINEAR}.recipe", recipe, flavor="tiny")
    with caplog.at_level("INFO"):
        alone = convert(config, build(config))
        sharded = convert(config, build(config), ranks=2)
    marked = [
        sum(len(sharded_weight.marks(m)) for m in each.modules()) for each in (alone, sharded)
    ]
    gathered = re.findall(r"FSDP2 gathers (\d+) weights in FP8", caplog.text)
    fp8 = recipe != "bf16"
    assert (marked, gathered) == (([0, 17], ["14", "3"]) if fp8 else ([0, 0], []))
