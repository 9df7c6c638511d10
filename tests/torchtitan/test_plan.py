"""`python -m titan_fp8.plan`: layers of a rank, their times, the bound without a GPU, filters."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torchtitan.models.moe import utils as moe_utils

from titan_fp8.functional.weights import GatheredWeight
from titan_fp8.modules.linear import FP8Linear
from titan_fp8.plan import __main__ as plan_main
from titan_fp8.plan import bound, measure
from titan_fp8.plan.model import parse, read_rank

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("fresh_torchtitan")

P = "--parallelism."
TP, PP, EP = (f"{P}{kind}_parallel_degree" for kind in ("tensor", "pipeline", "expert"))
SHARD, RECIPE = f"{P}data_parallel_shard_degree", "--quantize.linear.titan_fp8.recipe"
ONE = (SHARD, "1", "--training.global_batch_size", "-1")
SMALL = (*ONE, "--training.seq_len", "64", "--training.local_batch_size", "1")


def rank_of(config, *flags):
    return read_rank(parse(str(ROOT / "configs" / f"{config}.toml"), flags))


def shapes(rank):
    return {
        f"{name} {count}": shape for name, shape, count in (layer.cells for layer in rank.layers)
    }


def plan(capsys, config, *flags):
    """Exit status and output of the command."""
    status = plan_main.main([str(ROOT / "configs" / f"{config}.toml"), *map(str, flags)])
    return status, capsys.readouterr().out


def test_layers_of_a_dense_rank():
    rank = rank_of("llama3_8b")
    assert shapes(rank) == {
        "attention.wq attention.wo 64": "16384, 4096, 4096",
        "attention.wk attention.wv 64": "16384, 1024, 4096",
        "feed_forward 32": "16384, 14336, 4096",
        "output 1": "16384, 128256, 4096",
    }
    assert rank.layers[-1].reason == "the output layer"
    # Under TP alone torchtitan has no mixed precision.
    sharded, alone = rank_of("llama3_8b", *ONE, TP, "4"), rank_of("llama3_8b", *ONE)
    assert (rank.dtype, alone.dtype, sharded.dtype) == (*[torch.bfloat16] * 2, torch.float32)
    assert shapes(sharded)["feed_forward.w1 feed_forward.w3 64"] == "16384, 3584, 4096"
    assert shapes(sharded)["attention.wk attention.wv 64"] == "16384, 256, 4096"


@pytest.mark.parametrize("etp, local", [(1, "32, 49152, 1408, 2048"), (2, "32, 98304, 704, 2048")])
def test_layers_of_a_rank_with_experts(etp, local):
    flags = (SHARD, "2", EP, "2", TP, "2", f"{P}expert_tensor_parallel_degree", str(etp))
    found = shapes(rank_of("deepseek_v3_16b", *flags))
    assert found["moe.experts 26"] == local
    assert found["attention.wq 27"] == "16384, 1536, 2048"


def test_experts_that_one_rank_has_alone_are_gathered_in_fp8_only_blockwise():
    for recipe, in_fp8 in (("blockwise", True), ("rowwise", False)):
        rank = rank_of("deepseek_v3_16b", RECIPE, recipe)  # EP 8 on 8 GPUs
        experts = next(layer for layer in rank.layers if layer.groups)
        assert (experts.recipe, experts.gathers_fp8) == (recipe, in_fp8)


@pytest.mark.parametrize(
    "model, flavor, experts, reason",
    [
        ("gpt_oss", "20b", "32, 65536, 5760, 2880", "its converter is not listed"),
        ("qwen3", "30B-A3B", "128, 131072, 768, 2048", "its converter is not listed"),
        ("llama4", "17bx16e", "16, 16384, 8192, 5120", "its converter is not listed"),
    ],
)
def test_layers_of_other_models(model, flavor, experts, reason):
    rank = rank_of("llama3_8b", "--model.name", model, "--model.flavor", flavor)
    (layer,) = (layer for layer in rank.layers if layer.groups)
    assert (layer.cells[1], layer.reason) == (experts, reason)


def test_rank_0_of_a_pipeline_has_its_stages():
    flags = (*ONE, "--training.local_batch_size", "4", PP, "2")
    rank = rank_of("llama3_8b", *flags)
    assert shapes(rank) == {  # The embedding counts as a block, and the output is on rank 1.
        "attention.wq attention.wo 32": "8192, 4096, 4096",
        "attention.wk attention.wv 32": "8192, 1024, 4096",
        "feed_forward 16": "8192, 14336, 4096",
    }
    looped = rank_of("llama3_8b", *flags, f"{P}pipeline_parallel_schedule", "Interleaved1F1B")
    assert len(looped.layers[0].modules) == 32  # stages of 8, 9, 8 and 7 blocks, of which 0 and 2
    v_shaped = (f"{P}pipeline_parallel_schedule", "ZBVZeroBubble", "--compile.no_enable")
    v = rank_of("llama3_8b", *flags, *v_shaped)
    assert (len(v.layers[0].modules), v.layers[-1].modules) == (30, ("output",))  # stages 0 and 3


@pytest.mark.parametrize(
    "config, flags, recipe",
    [
        ("llama3_debug", (), "blockwise"),
        ("llama3_debug", (SHARD, "2"), "blockwise"),
        ("deepseek_v3_debug", (SHARD, "2", EP, "2"), "blockwise"),
        ("deepseek_v3_debug", (EP, "1"), "rowwise"),
        ("llama3_debug", ("--model.name", "gpt_oss"), "blockwise"),
    ],
    ids=["alone", "gathered", "EP 2", "no EP", "gpt_oss"],
)
def test_layers_are_timed_as_they_are_called(config, flags, recipe, monkeypatch, capsys):
    monkeypatch.setattr(measure, "MOST_COPIES", 2)
    rank = rank_of(config, *SMALL, *flags, RECIPE, recipe)
    if "gpt_oss" in flags:  # whose output layer would take a second
        rank = replace(rank, layers=rank.layers[:-1])
    finite = []

    def clock(steps):
        """Calls each step once, and says that a call takes 3 us in bf16 and 2 in FP8."""
        gradients = [step() for step in steps]
        finite.extend(g.isfinite().all() for each in gradients for g in each)
        assert len({tuple(g.shape[-1] for g in each) for each in gradients}) == 1
        return [6e-6, 4e-6][: len(steps)]

    monkeypatch.setattr(measure, "seconds_of", clock)
    _, rows, slower, _ = measure.report(rank, "cpu")
    assert finite and all(finite)
    *rows, last = [row for row in rows if row[0] != "all uneven"]
    recipes = {layer.cells[0]: layer.recipe for layer in rank.layers}
    for name, _, _, *times in rows:
        is_fp8 = recipes[name.removesuffix(" even").removesuffix(" uneven")] != "bf16"
        assert times == ["3", "2", "1.50"][: 3 if is_fp8 else 1]
    assert not slower and last[0].startswith("all") and 1 < float(last[-1]) <= 1.5
    at = capsys.readouterr().err.splitlines()
    count = len(rank.layers)
    assert len(at) == count and at[0].startswith(f"1 of {count}: timing attention.wq")


def test_what_torchtitan_compiles_is_timed_compiled(monkeypatch):
    """One graph for each arm of a layer, whatever its copies."""
    monkeypatch.setattr(measure, "MOST_COPIES", 2)
    compiled = ("--compile.enable", "--compile.backend", "aot_eager")
    flags = (*SMALL, SHARD, "2", EP, "2")
    plain, rank = (rank_of("deepseek_v3_debug", *flags, *more) for more in ((), compiled))
    assert not any(layer.is_compiled for layer in plain.layers)
    kinds = {layer.cells[0]: layer.is_compiled for layer in rank.layers}
    assert [name for name, is_compiled in kinds.items() if not is_compiled] == [
        "moe.experts",
        "output",
    ]
    layers = [layer for layer in rank.layers if layer.cells[0] in ("attention.wo", "feed_forward")]

    def clock(steps):
        for step in (*steps, *steps):
            step()
        return [1.0] * len(steps)

    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(measure, "seconds_of", clock)
    assert len(measure.report(replace(rank, layers=layers), "cpu")[1]) == 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    gpt_oss = rank_of("llama3_debug", *ONE, "--model.name", "gpt_oss", *compiled)
    assert not any(layer.is_compiled for layer in gpt_oss.layers)  # torchtitan does not


@pytest.mark.parametrize("recipe", ["blockwise", "blockwise_pow2"])
def test_a_weight_that_is_gathered_in_fp8_gives_the_same_values(recipe):
    """The layer of a job with FSDP2, and the same layer that quantizes its weight itself."""
    rank = rank_of("llama3_debug", *SMALL, SHARD, "2", RECIPE, recipe)
    (layer,) = (layer for layer in rank.layers if "attention.wo" in layer.patterns)
    module = measure._module(rank, layer, "cpu", in_fp8=True)
    assert isinstance(module, FP8Linear) and isinstance(module.weight, GatheredWeight)
    x, g, weight = (
        torch.randn(shape, dtype=torch.bfloat16) for shape in ((64, 256), (64, 256), (256, 256))
    )
    x.requires_grad_()
    results = []
    for each in (weight, measure.gathered(weight, recipe)):
        module.weight = torch.nn.Parameter(each)
        y = module(x)
        results.append((y, *torch.autograd.grad(y, (x, module.weight), g)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_small_layers_have_copies_beyond_the_l2_cache(monkeypatch):
    rank, copies = rank_of("llama3_debug", *SMALL, SHARD, "1"), []

    def clock(steps):
        copies.append(sum(g.shape[0] == 1 for g in steps[0]()))  # those of inputs
        return [8e-6, 4e-6]

    monkeypatch.setattr(measure, "seconds_of", clock)
    _, rows, *_ = measure.report(replace(rank, layers=rank.layers[1:2]), "cpu")
    assert copies == [8] and rows[0][-3:] == ["1", "0", "2.00"]


def test_the_clock_gives_seconds_of_each_step():
    short, long = measure.seconds_of([lambda: time.sleep(0.01), lambda: time.sleep(0.03)])
    assert 0.01 <= short < long and long >= 0.03


def test_uneven_experts_are_padded_as_in_a_job():
    rank = rank_of("deepseek_v3_16b")
    (layer,) = (layer for layer in rank.layers if layer.groups)
    fp8 = measure.tokens_of_experts(layer, "uneven", 128).tolist()
    assert all(tokens % 128 == 0 for tokens in fp8) and len(fp8) == layer.groups
    assert max(fp8) / min(fp8) == pytest.approx(4, rel=0.05)
    assert sum(fp8) == pytest.approx(layer.m, rel=0.02)
    assert measure.tokens_of_experts(layer, "even", 8).tolist() == [layer.m // 8] * layer.groups


def test_experts_are_padded_in_bf16_as_in_a_job_without_fp8():
    rank = rank_of("deepseek_v3_debug", *SMALL, SHARD, "2", EP, "1")
    layer = next(layer for layer in rank.layers if layer.groups)
    for in_fp8, unit in ((False, 8), (True, 128), (False, 8)):
        measure._step(rank, layer, "uneven", "cpu", in_fp8, 1)()
        assert unit == moe_utils.TOKEN_GROUP_ALIGN_SIZE_M


def test_what_is_slower_is_left_out(monkeypatch):
    """wo and the experts are slower; the uneven case decides with the even one."""
    rank = rank_of("deepseek_v3_16b")
    times = {"attention.wo": {"": 11}, "moe.experts": {"even": 5, "uneven": 30}}

    def us_of(rank, layer, groups, *others):
        fp8 = [times.get(layer.cells[0], {groups: 5})[groups]]
        return [10, *fp8] if layer.recipe != "bf16" else [10]

    monkeypatch.setattr(measure, "us_of", us_of)
    _, rows, slower, _ = measure.report(rank)
    assert [layer.cells[0] for layer in slower] == [*times]
    # 27 of four linears at 10, 5 or 11, one dense layer, 26 of experts, router and shared experts
    bf16 = 4 * 270 + 10 + 3 * 260 + 10
    for experts, row in ((5, rows[-2]), (30, rows[-1])):
        fp8 = 3 * 135 + 297 + 5 + 26 * (experts + 10 + 5) + 10
        assert row[3:] == [f"{bf16:,}", f"{fp8:,}", f"{bf16 / fp8:.2f}"]
    assert (rows[-2][0], rows[-1][0]) == ("all even", "all uneven")
    assert plan_main.fragment(rank, slower).splitlines()[1:] == [
        "[quantize.linear.titan_fp8]",
        'filter_fqns = ["output", "router.gate", "attention.wo"]',
        "",
        "[quantize.grouped_mm.titan_fp8]",
        'recipe = "bf16"',
    ]


def test_a_filter_has_no_section_of_a_converter_that_is_not_listed():
    rank = rank_of("deepseek_v3_16b")
    rank.config.model.converters = ["quantize.grouped_mm.titan_fp8"]
    text = plan_main.fragment(rank, [layer for layer in rank.layers if layer.groups])
    assert "linear" not in text and 'recipe = "bf16"' in text


def test_a_pattern_that_would_match_other_layers_is_not_written():
    rank = rank_of("deepseek_v3_16b")
    layer = next(layer for layer in rank.layers if layer.patterns == ["attention.wo"])
    other = replace(rank.layers[0], modules=("layers.0.attention.wo_2",))
    changed = replace(rank, layers=[layer, other])
    text = plan_main.fragment(changed, [layer])
    assert "# attention.wo stays" in text and '["output", "router.gate"]' in text


def test_without_a_gpu_tables_give_a_bound(capsys):
    status, printed = plan(capsys, "llama3_8b")
    assert status == 0 and "Nothing is measured" in printed
    assert "output: the output layer" in printed
    rank, (table, _) = rank_of("llama3_8b"), bound.tables()
    assert table["card"] == "NVIDIA H100 80GB HBM3"
    us = {tuple(row[:5]): dict(zip(table["columns"][5:], row[5:])) for row in table["us"]}
    near = [us[op, 0, 8192, 4096, 4096] for op in ("mm", "mm", "wgrad")]
    speed = sum(row["bf16"] for row in near) / sum(row["blockwise"] for row in near)
    assert bound.speed(table, rank.layers[0]) == (pytest.approx(speed), False)
    assert f"{speed:.2f}" == printed.partition("4096, 4096")[2].split()[1]
    assert bound.speed(table, replace(rank.layers[0], m=4 * 8192 + 1))[1]
    # Amdahl: with GEMMs that take no time, only the output layer and attention are left.
    tokens, d = 16384, 4096
    rest = 6 * tokens * d * 128256 + 3 * 2 * 8192**2 * 32 * 256 * 32
    linear = 6 * tokens * 32 * d * (2 * d + 2 * 1024 + 3 * 14336)
    speeds = [1e30, 1e30, 1e30, 1.0]
    assert bound.bound(rank, speeds) == pytest.approx((rest + linear) / rest)


def test_shapes_outside_the_table_are_said(capsys):
    leave_out = ("--quantize.linear.titan_fp8.filter_fqns", "output,router.gate,feed_forward")
    status, printed = plan(capsys, "deepseek_v3_16b", TP, 8, EP, 1, *leave_out)
    experts = next(line for line in printed.splitlines() if "moe.experts" in line)
    assert status == 0 and "64, 98304, 176, 2048" in experts and experts.count("*") == 2
    assert "*: outside the table" in printed


def test_a_model_whose_experts_cannot_be_converted_says_why(capsys):
    flags = ("--model.name", "gpt_oss", "--model.flavor", "20b")
    status, printed = plan(capsys, "llama3_8b", *flags)
    assert status == 0 and "moe.experts: its converter is not listed" in printed
    assert plan(capsys, "deepseek_v3_16b", *flags)[0] == 2


def test_a_run_without_the_plugin_is_told_how_to_add_it(tmp_path, capsys):
    file = tmp_path / "plain.toml"
    file.write_text('[model]\nname = "llama3"\nflavor = "8B"\n')
    assert plan_main.main([str(file), SHARD, "1"]) == 2
    flags = capsys.readouterr().err.strip().partition(" add ")[2].split()
    assert plan_main.main([str(file), SHARD, "1", *flags]) == 0
    file.write_text("[model\n")
    assert plan_main.main([str(file)]) == 2


def test_the_filter_is_written_to_a_new_file(tmp_path, capsys):
    out, flags = tmp_path / "filter.toml", ("--filter", "auto", "--out")
    status, printed = plan(capsys, "llama3_8b", *flags, out)
    assert status == 0 and out.read_text() in printed
    assert out.read_text().endswith('filter_fqns = ["output", "router.gate"]\n')
    assert plan_main.main([str(ROOT / "configs/llama3_8b.toml"), *flags, str(out)]) == 2
    assert "allowed is a new file" in capsys.readouterr().err
