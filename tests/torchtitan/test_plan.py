"""`python -m titan_fp8.plan`: the shapes of a rank, predictions beside measured runs, output."""

import json
from dataclasses import replace

import pytest
from plan_runs import (
    EP_2,
    FOUR,
    FSDP_2,
    HIGH,
    ONE,
    ONE_GPU,
    PLANS,
    PP_2,
    PP_4,
    RECIPE,
    ROOT,
    SHARD,
    SHORT,
    TP,
    run_of,
    speed,
    with_slow_cpu,
)

from titan_fp8.plan import __main__ as plan_main
from titan_fp8.plan import advice, times
from titan_fp8.plan.costs import gemm_us, quantize_us
from titan_fp8.plan.run import Run
from titan_fp8.plan.step import baseline, predict

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")

RUNS = json.loads((ROOT / "docs/benchmarks/plan/runs_h200.json").read_text(encoding="utf-8"))


def shapes(run: Run) -> dict[str, tuple[int, ...]]:
    return {
        f"{each.name} {each.count}": (each.groups, each.m, each.n, each.k) for each in run.layers
    }


@pytest.mark.parametrize(
    "measured", RUNS["runs"], ids=lambda run: f"{run['config']} {run['plan']} {run['code']}"
)
def test_predictions_are_within_5_points_of_runs(measured):
    run = run_of(measured["config"], (*PLANS[measured["plan"]], RECIPE, measured["recipe"]))
    predicted = speed(run, times.load("h200"))
    close = predicted == pytest.approx(measured["fp8"] / measured["bf16"], abs=0.05)
    assert close == measured.get("predicted", True), predicted
    # Readers find the same numbers.
    table = (ROOT / "docs/benchmarks/summary.md").read_text(encoding="utf-8")
    assert f"| {predicted:.2f}x | {measured['fp8'] / measured['bf16']:.2f}x" in table


@pytest.mark.parametrize(
    "config, flags",
    [("llama3_8b", FSDP_2), ("deepseek_v3_16b", EP_2), ("llama3_debug", FSDP_2)],
)
def test_the_rows_of_layers_add_up_to_the_step(config, flags):
    run = run_of(config, flags)
    h200 = times.load("h200")
    step = predict(run, h200)
    gemms = sum(row.layer.count * gemm_us(row.layer, row.cost) for row in step.rows)
    quantizers = sum(row.layer.count * quantize_us(row.layer, row.cost, run) for row in step.rows)
    parts = step.parts
    both = parts["GEMMs of linears"] + parts.get("GEMMs of experts", 0)
    assert both == pytest.approx(gemms * run.batches.micro_batches / 1e3)
    assert parts["quantizers"] == pytest.approx(quantizers * run.batches.micro_batches / 1e3)
    assert step.gpu == pytest.approx(sum(parts.values()))
    assert step.ms == step.gpu + step.waiting


def test_every_second_linear_of_a_block_is_repeated():
    """In the order of calls, wq, wk, wv, wo, w1, w3, w2, and not the output layer."""
    run = run_of("llama3_8b", FSDP_2)
    names = [layer.name.rpartition(".")[2] for layer in run.layers if layer.repeats]
    assert sorted(names) == ["w3", "wk", "wo"]
    full = run_of("llama3_8b", (*FSDP_2, "--activation_checkpoint.mode", "full"))
    assert [layer.repeats for layer in full.layers] == 7 * [1] + [0]
    moe = run_of("deepseek_v3_16b", EP_2)
    assert all(layer.repeats for layer in moe.layers if layer.in_moe)


def test_layers_take_what_benchmarks_of_layers_measured():
    """bench_linear.py, whose layers are apart from the GEMMs and quantizers of the table."""
    layer = run_of("llama3_8b", ONE_GPU).layers[0]
    run = run_of("llama3_8b", ONE_GPU)
    for row in json.loads((ROOT / "docs" / "benchmarks" / "linear.json").read_text())["rows"]:
        m, n, k = map(int, row["M,N,K"].split(","))
        one = replace(layer, m=m, n=n, k=k, recipe=row["layer"], share=1.0)
        cost = advice.cost_of(one, run, times.load("h200"))
        us = advice.layer_us(one, cost, run)
        assert us == pytest.approx(row["us"], rel=0.13), row


def test_compiled_forward_quantizes_only_the_rows_of_inputs():
    ops, h200 = ("quantize_1x128", "quantize_128x1_t", "quantize_1x128_128x1_t"), times.load("h200")
    rows, columns, both = (h200.quantize_us(op, 8192 * 4096) for op in ops)

    def saved(run: Run, at: int) -> float:
        layer, eager = run.layers[at], replace(run, compiled=False)
        costs = [(advice.cost_of(layer, each, h200), each) for each in (eager, run)]
        before, after = (quantize_us(layer, *each) for each in costs)
        return before - after

    run = run_of("llama3_8b", FSDP_2)
    assert saved(run, 0) == pytest.approx(run.layers[0].share * (2 * both - rows - columns))
    # Backward repeats the GEMM of wo, so it quantizes the rows again, too.
    assert saved(run, 3) == pytest.approx(both - rows)
    # Under checkpointing a block with experts is compiled in parts.
    moe = run_of("deepseek_v3_16b", EP_2)
    assert not any(saved(moe, at) for at, layer in enumerate(moe.layers) if layer.in_moe)


def test_tensor_parallel_shards():
    run = run_of("llama3_8b", (*FSDP_2, TP, "4"))
    assert run.dims.world_size == 8
    assert shapes(run) == {
        "layers.*.attention.wq 32": (0, 8192, 1024, 4096),
        "layers.*.attention.wk 32": (0, 8192, 256, 4096),
        "layers.*.attention.wv 32": (0, 8192, 256, 4096),
        "layers.*.attention.wo 32": (0, 8192, 4096, 1024),
        "layers.*.feed_forward.w1 32": (0, 8192, 3584, 4096),
        "layers.*.feed_forward.w2 32": (0, 8192, 4096, 3584),
        "layers.*.feed_forward.w3 32": (0, 8192, 3584, 4096),
        "output 1": (0, 8192, 32064, 4096),
    }
    assert not any(layer.fused for layer in run.layers)
    assert [round(layer.share, 3) for layer in run.layers[:3]] == [0.667, 0.167, 0.167]


@pytest.mark.parametrize("etp, local", [(1, (32, 49152, 1408, 2048)), (2, (32, 98304, 704, 2048))])
def test_expert_parallel_shards(etp, local):
    flags = (*EP_2, TP, "2", "--parallelism.expert_tensor_parallel_degree", str(etp))
    run = run_of("deepseek_v3_16b", flags)
    assert shapes(run)["layers.*.moe.experts 26"] == local
    assert shapes(run)["layers.*.moe.shared_experts.w2 26"] == (0, 16384, 2048, 1408)
    assert shapes(run)["layers.*.attention.wkv_a 1"] == (0, 16384, 576, 2048)


@pytest.mark.parametrize(
    "model, flavor, experts",
    [
        ("gpt_oss", "20b", (32, 65536, 2880, 2880)),
        ("qwen3", "30B-A3B", (128, 131072, 768, 2048)),
        ("llama4", "17bx16e", (16, 16384, 8192, 5120)),
    ],
)
def test_experts_of_other_models(model, flavor, experts):
    run = run_of("llama3_8b", ("--model.name", model, "--model.flavor", flavor))
    (layer,) = (layer for layer in run.layers if layer.groups)
    assert (layer.groups, layer.m, layer.n, layer.k) == experts
    assert layer.reason == "its converter is not listed"


def test_a_run_without_the_plugin_is_told_how_to_add_it(tmp_path, capsys):
    file = tmp_path / "plain.toml"
    file.write_text('[model]\nname = "llama3"\nflavor = "8B"\n')
    assert plan_main.main([str(file), "--ngpu", "1"]) == 2
    flags = capsys.readouterr().err.strip().partition(" add ")[2].split()
    assert plan_main.main([str(file), "--ngpu", "1", *flags]) == 0
    file.write_text("[model\n")
    assert plan_main.main([str(file)]) == 2


def test_batches_pipelines_and_all_ranks():
    flags = (SHARD, "-1", "--training.global_batch_size", "64")
    run = run_of("llama3_8b", flags, 16)
    assert (run.dims.dp_shard, run.batches.micro_batches, run.tokens) == (16, 2, 2 * 8192)
    piped = run_of("llama3_8b", (*flags, *PP_2), 16)
    assert (piped.dims.dp_shard, piped.batches.micro_batches, piped.tokens) == (8, 8, 8192)
    assert not piped.reshards and run.reshards


def test_fsdp_gathers_and_reduces_once_for_each_pipeline():
    """As torchtitan with PP 2 and FSDP 2 does: its schedule keeps what it has gathered."""
    h200 = times.load("h200")
    assert run_of("llama3_8b", FSDP_2).can_exchange_gradients
    accumulated = ("--training.global_batch_size", "32", "--training.local_batch_size", "4")
    runs = {}
    for size in ("1", "2", "4"):
        micro = ("--parallelism.pipeline_parallel_microbatch_size", size)
        runs[size] = run_of("llama3_8b", (*PP_4, *accumulated, *micro))
    counts = [(run.batches.micro_batches, run.gathers, run.batches.rounds) for run in runs.values()]
    assert counts == [(16, 4, 4), (8, 4, 4), (4, 4, 4)]
    assert not any(run.can_exchange_gradients for run in runs.values())
    fsdp = [predict(run, h200).parts["FSDP"] for run in runs.values()]
    assert fsdp == pytest.approx([fsdp[0]] * 3)
    # Four pipelines, each of four micro-batches on four stages, fill and drain: 4 x (4 + 3).
    looped = replace(runs["1"], batches=replace(runs["1"].batches, stages=2))
    ratio = predict(runs["1"], h200).parts["attention"] / predict(looped, h200).parts["attention"]
    assert ratio == pytest.approx((1 + 3 / 4) / (1 + 3 / 8))


def test_tokens_per_gpu(capsys):
    config, printed = str(ROOT / "configs" / "llama3_8b.toml"), {}
    for tp in ("1", "2"):
        assert plan_main.main([config, *ONE, TP, tp]) == 0
        last = next(line for line in capsys.readouterr().out.splitlines() if "Predicted" in line)
        printed[tp] = float(last.split()[-4].replace(",", ""))
    assert printed["2"] < printed["1"]  # two ranks share the same tokens


def test_replicas_are_ddp_without_shards():
    flags = (*ONE, "--parallelism.data_parallel_replicate_degree", "2")
    ddp, hsdp = run_of("llama3_8b", flags), run_of("llama3_8b", (*flags, *FOUR))
    assert "2 GPUs (DDP 2)" in ddp.description
    assert "8 GPUs (HSDP 2, FSDP 4)" in hsdp.description


def test_small_gemms_take_as_long_as_their_bytes():
    h200 = times.load("h200")
    for family, size in (("bf16", 2), ("blockwise", 1), ("rowwise", 1)):
        moved = size * (16384 * 4096 + 64 * 4096) + 2 * 16384 * 64
        assert h200.gemm_us(family, "mm", 0, 16384, 64, 4096) == h200.copy_us(moved)
    assert h200.is_small(0, 16384, 64, 4096) and h200.is_small(8, 1024, 2048, 2048)
    assert not h200.is_small(0, 1024, 512, 512) and not h200.is_small(8, 2048, 2048, 2048)


def test_where_the_cpu_waits_for_the_gpu():
    h200 = times.load("h200")
    four = (*FSDP_2, *SHORT, "--training.global_batch_size", "8")
    runs = run_of("llama3_8b", four), run_of("deepseek_v3_16b", EP_2)
    fp8, moe = (predict(run, h200) for run in runs)
    assert (fp8.waits, fp8.lead) == (1 / 4, pytest.approx(0.89 * fp8.parts["optimizer"]))
    bf16 = predict(baseline(runs[0]), h200)
    assert [(step.waits, step.lead) for step in (bf16, moe)] == [(1, 0), (1, 0)]
    # Of the four micro-batches only the first can wait, after a step that was logged.
    behind = (fp8.host_forward - fp8.gpu_forward) / 4
    assert 0 < behind < fp8.lead
    assert fp8.waiting == pytest.approx(behind / fp8.log_freq)


def test_output_and_exit_status(capsys, monkeypatch):
    config = str(ROOT / "configs" / "llama3_8b.toml")
    assert plan_main.main([config]) == 0
    printed = capsys.readouterr().out
    assert 'output: filtered by "output"' in printed
    assert "feed_forward.w1  32" in printed and "Predicted: 1." in printed
    monkeypatch.setattr("titan_fp8.plan.command.load", lambda gpu: with_slow_cpu())
    assert plan_main.main([config, *FSDP_2, *SHORT]) == 1
    assert "Predicted: 0.9" in capsys.readouterr().out


def test_what_was_not_measured_on_an_h100_is_said(capsys):
    config, flags = str(ROOT / "configs" / "llama3_8b.toml"), [*FSDP_2, *SHORT, *HIGH]
    printed = {}
    for gpu in ("h100", "h200"):
        assert plan_main.main([config, "--gpu", gpu, *flags]) == 0
        printed[gpu] = " ".join(capsys.readouterr().out.split())
    assert (
        "Not measured on NVIDIA H200: - estimated from runs on NVIDIA H200: how far collectives "
        "overlap ms per step"
    ) in printed["h200"]
    assert (
        "Not measured on NVIDIA H100 80GB HBM3: - scaled by the bandwidth of copies from NVIDIA "
        "H200: elementwise kernels, optimizer, FSDP2's copies of gradients - taken as they are "
        "from NVIDIA H200: collectives, CPU time of dense blocks, what FSDP2 adds to it, what "
        "several ranks add - estimated from runs on NVIDIA H200: how far collectives overlap ms "
        "per step"
    ) in printed["h100"]
    run = run_of("llama3_8b", tuple(flags))
    h100, h200 = (predict(run, times.load(gpu)) for gpu in ("h100", "h200"))
    assert h100.parts.keys() == h200.parts.keys()
    assert all(h100.parts[part] != h200.parts[part] for part in h100.parts)
    assert h100.host > h200.host
    for gpu in ("h100", "h200"):
        assert plan_main.main([str(ROOT / "configs" / "deepseek_v3_16b.toml"), "--gpu", gpu]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert "CPU time of MoE blocks" in printed.partition("- estimated from runs on")[2]
        assert "CPU time of MoE blocks under TP" not in printed
    # With bf16 parameters the bandwidth does not limit the optimizer.
    one = run_of("llama3_8b", ONE_GPU)
    h100, h200 = (predict(one, times.load(gpu)) for gpu in ("h100", "h200"))
    assert h100.parts["optimizer"] == h200.parts["optimizer"]
