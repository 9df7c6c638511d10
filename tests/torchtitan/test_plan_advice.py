"""What `python -m titan_fp8.plan` advises."""

from dataclasses import replace
from unittest import mock

import pytest
from plan_runs import (
    CP_2,
    FSDP_2,
    HIGH,
    IN_BF16,
    ONE,
    ONE_GPU,
    PLANS,
    PP_2,
    RECIPE,
    ROOT,
    SHORT,
    TP,
    TP_2,
    advice_of,
    run_of,
    speed,
    with_slow_cpu,
)

from titan_fp8.plan import __main__ as plan_main
from titan_fp8.plan import advice, times
from titan_fp8.plan.step import predict

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_what_is_left_is_not_slower_than_bf16(gpu):
    """Of linears that share an input, none pays to leave out alone."""
    flags = ("--model.name", "qwen3", "--model.flavor", "1.7B", RECIPE, "rowwise")
    flags += (*ONE, TP, "8", "--training.local_batch_size", "2")
    run, of = run_of("llama3_8b", flags), times.load(gpu)
    best = advice.without(run, advice.left_out(run, of))
    assert speed(run, of) < 0.999 <= speed(best, of)
    none = "FP8 pays for no layer here" in "\n".join(advice_of(run, of))
    assert none == (speed(best, of) == 1) == (gpu == "h100")


def test_what_makes_fp8_worth_it():
    few, many = (run_of("llama3_8b", (*FSDP_2, *flags, *HIGH)) for flags in (SHORT, ()))
    gathered = run_of("llama3_8b", (*FSDP_2, *SHORT))
    h200 = with_slow_cpu()
    assert speed(gathered, h200) < 1 < speed(few, h200) < speed(many, h200)
    step = predict(few, h200)
    # After a step that is logged, one in five, the CPU has no lead.
    assert step.waiting and step.lead
    assert step.ms == pytest.approx(step.host + step.end - 0.8 * step.lead)
    found = "\n".join(advice_of(few, h200))
    assert f"The GPU waits {step.waiting:.0f} ms for the CPU" in found
    assert "fsdp_all_gather = true would save the GPU" in found
    # With a CPU that takes no time the GPU decides, and FSDP's gathers can be halved.
    idle = dict.fromkeys(("bf16", "blockwise", "rowwise"), 0.0)
    free = {key: idle if isinstance(each, dict) else each for key, each in h200.host.items()}
    fast = replace(h200, host=free | {"block_us": 0.0, "fsdp_block_us": 0.0})
    assert speed(few, fast) > 1
    assert not advice.left_out(few, fast)
    assert "Set fsdp_all_gather = true: the step takes" in "\n".join(advice_of(few, fast))
    assert speed(gathered, fast) > speed(few, fast)


def test_predictions_for_moe_blocks_under_tp_come_with_a_warning(capsys):
    config = str(ROOT / "configs" / "deepseek_v3_16b.toml")
    assert plan_main.main([config, *PLANS["EP 4, TP 2"]]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "Predicted: 0.98x of bf16" in printed
    assert advice.MOE_UNDER_TP in printed
    for others in (("deepseek_v3_16b", PLANS["EP 4"]), ("llama3_8b", PLANS["TP 2, FSDP 2"])):
        assert advice.MOE_UNDER_TP not in advice_of(run_of(*others), times.load("h200"))


def test_fp8_gathers_are_advised_against_where_the_cpu_decides():
    run = run_of("llama3_8b", (*FSDP_2, *SHORT, RECIPE, "rowwise"))
    found = advice_of(run, slow := with_slow_cpu(2))
    starts = ("Set fsdp_all_gather = false: the step takes", "Leave out layers.", "The GPU waits")
    assert len(found) == 3 and all(map(str.startswith, found, starts))
    assert "fsdp_all_gather = false\n" in advice.fragment(run, advice.changes(run, slow), slow)


def test_a_module_that_does_not_pay_is_left_out_and_the_fragment_is_accepted(tmp_path, capsys):
    config, out = str(ROOT / "configs" / "llama3_8b.toml"), tmp_path / "filter.toml"
    flags = [*FSDP_2, *SHORT]
    with mock.patch.object(advice, "left_out", wraps=advice.left_out) as searched:
        assert plan_main.main([config, *flags, "--filter", "auto", "--out", str(out)]) in (0, 1)
    searched.assert_called_once()
    printed, fragment = capsys.readouterr().out, out.read_text()
    assert fragment in printed and "filter_fqns = [" in fragment
    patterns = fragment.partition("[\n")[2].partition("]")[0].replace('"', "").split(",")
    patterns = ",".join(each.strip() for each in patterns if each.strip())
    before = run_of("llama3_8b", tuple(flags))
    after = run_of("llama3_8b", (*flags, "--quantize.linear.titan_fp8.filter_fqns", patterns))
    h200 = times.load("h200")
    assert predict(after, h200).ms <= predict(before, h200).ms
    assert {layer.name for layer in after.layers if layer.recipe != "bf16"} == {
        layer.name for layer in before.layers if layer.recipe != "bf16"
    } - set(advice.left_out(before, h200))
    assert plan_main.main([config, *flags, "--filter", "auto", "--out", str(out)]) == 2


def test_sizes_that_keep_layers_in_bf16_are_named_once():
    run = run_of("llama3_8b", FSDP_2)
    reason = "K = 4104 is not a multiple of 16"
    layers = [replace(layer.in_bf16(reason), k=4104) for layer in run.layers[:2]]
    found = advice_of(replace(run, layers=tuple(layers)), times.load("h200"))
    assert found == [
        "4104 is not a multiple of 16, so layers.*.attention.wq, layers.*.attention.wk must stay "
        "in bf16. With 4096 or 4112 they can run in FP8."
    ]


@pytest.mark.parametrize(
    ("flags", "option"),
    [
        (TP_2, "dtype"),
        ((*TP_2, *IN_BF16), None),
        ((*TP_2, *FSDP_2), None),
        ((*FSDP_2, "--training.mixed_precision_param", "float32"), "mixed_precision_param"),
        ((*ONE, *PP_2), "dtype"),
        ((*ONE, *CP_2), None),
        (ONE_GPU, None),
    ],
)
def test_fp32_is_told_from_bf16(flags, option):
    found = "\n".join(advice_of(run_of("llama3_debug", flags), times.load("h200")))
    assert ("The model computes in float32" in found) == bool(option)
    assert not option or f'with training.{option} = "bfloat16" they hold' in found
