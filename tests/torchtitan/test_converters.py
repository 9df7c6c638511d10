"""The two converters on torchtitan's models: what they convert, what they leave, what they log.

Models are built on the meta device, as torchtitan's trainer builds them.
"""

import logging
import sys
from unittest.mock import MagicMock

import pytest
import torch
from titan import BOTH, CONVERTERS, GROUPED_MM, LINEAR, build, convert, converted, job, of_type
from torch import nn
from torchtitan.distributed import expert_parallel
from torchtitan.models.moe import utils as moe_utils
from torchtitan.models.moe.moe import GroupedExperts, MoE

import titan_fp8
from titan_fp8.host.torchtitan_0_2 import token_exchange
from titan_fp8.host.torchtitan_0_2.moe import GatherMoE
from titan_fp8.patches import Patch
from titan_fp8.torchtitan_0_2 import patches
from titan_fp8.torchtitan_0_2.experts import FP8GroupedExperts

ALIGNMENT = {"blockwise": 128, "rowwise": 16, "rowwise_with_gw_hp": 16}
DENSE = [
    ("llama3", "debugmodel"),
    ("llama3_ft", "debugmodel"),
    ("qwen3", "debugmodel"),
    ("gpt_oss", "debugmodel"),
    ("flux", "flux-debug"),
]
MOE = [
    ("deepseek_v3", "debugmodel"),
    ("deepseek_v3", "16B"),
    ("qwen3", "debugmodel_moe"),
    ("llama4", "debugmodel"),
]

# Flux imports them for its text encoders and checkpoint files, which are not used here.
FLUX_IMPORTS = ("transformers", "safetensors", "safetensors.torch")


@pytest.fixture(autouse=True)
def log(caplog, fresh_torchtitan):
    caplog.set_level(logging.INFO)


def report(log: str) -> dict[str, tuple[str, str]]:
    """The lines of the tables in a log: name to shape, and recipe or reason."""
    rows = (line.split("  ") for line in log.splitlines() if line.startswith("  "))
    rows = ([cell.strip() for cell in row if cell.strip()] for row in rows)
    table = {row[0]: (row[1], " ".join(row[2:])) for row in rows if len(row) > 2}
    table.pop("module", None)
    return table


def converts_by_default(name: str, linear: nn.Linear) -> bool:
    multiples_of_16 = not linear.in_features % 16 and not linear.out_features % 16
    return multiples_of_16 and "output" not in name and "router.gate" not in name


@pytest.mark.parametrize("model, flavor", DENSE + MOE)
def test_every_model_converts_and_keeps_its_parameters(
    tmp_path, monkeypatch, caplog, model, flavor
):
    for package in FLUX_IMPORTS if model == "flux" else ():
        monkeypatch.setitem(sys.modules, package, MagicMock())
    is_moe = (model, flavor) in MOE
    config = job(tmp_path, model, flavor=flavor, converters=BOTH if is_moe else (LINEAR,))
    built = build(config)
    parameters = dict(built.named_parameters())
    state = {name: (t.shape, t.dtype) for name, t in built.state_dict().items()}
    linears = of_type(built, nn.Linear)
    expected = {name for name, linear in linears.items() if converts_by_default(name, linear)}
    expected_experts = of_type(built, GroupedExperts).keys()

    convert(config, built)

    assert of_type(built, titan_fp8.FP8Linear).keys() == expected and expected
    assert of_type(built, FP8GroupedExperts).keys() == (expected_experts if is_moe else set())
    after = dict(built.named_parameters())
    assert after.keys() == parameters.keys()
    assert all(after[name] is parameters[name] for name in after)
    assert {name: (t.shape, t.dtype) for name, t in built.state_dict().items()} == state

    table = report(caplog.text)
    for name, linear in linears.items():
        shape, outcome = table[name]
        assert shape == f"{linear.out_features} x {linear.in_features}"
        assert (outcome == "blockwise") == (name in expected), f"{name}: {outcome}"
    assert all(table[name][1] == "blockwise" for name in expected_experts)


def test_llama3_converts_attention_and_feed_forward(tmp_path):
    model = converted(job(tmp_path, "llama3", converters=(LINEAR,), flavor="tiny"))
    attention = {f"attention.{name}" for name in ("wq", "wk", "wv", "wo")}
    feed_forward = {f"feed_forward.{name}" for name in ("w1", "w2", "w3")}
    names = of_type(model, titan_fp8.FP8Linear).keys()
    assert names == {f"layers.{i}.{name}" for i in (0, 1) for name in attention | feed_forward}


def test_linears_with_a_bias_convert(tmp_path):
    model = converted(job(tmp_path, "gpt_oss", converters=(LINEAR,)))
    assert all(m.bias is not None for m in of_type(model, titan_fp8.FP8Linear).values())


def test_the_table_says_why_a_linear_was_left(tmp_path, caplog):
    config = job(tmp_path, "llama3", converters=(LINEAR,), body=f"[{LINEAR}]\nfilter_fqns=['wk']\n")
    model = build(config)
    model.odd_n, model.odd_k = nn.Linear(64, 40), nn.Linear(40, 64)
    model.half = nn.Linear(64, 64, dtype=torch.float16)
    convert(config, model)
    table = report(caplog.text)
    assert table["odd_n"] == ("40 x 64", "- N = 40 is not a multiple of 16")
    assert table["odd_k"] == ("64 x 40", "- K = 40 is not a multiple of 16")
    assert "float16" in table["half"][1]
    assert table["layers.0.attention.wk"] == ("256 x 256", '- filtered by "wk"')
    assert table["output"] == ("2048 x 256", "blockwise")
    assert "converted 37 of 46 linears, blockwise" in caplog.text


def test_the_default_list_leaves_the_output_layer_of_hugging_face(tmp_path):
    for written in ("", 'filter_fqns = ["output", "router.gate"]', 'filter_fqns = ["output"]'):
        body = f"[{LINEAR}]\n{written}\n"
        config = job(tmp_path, "llama3", converters=(LINEAR,), flavor="tiny", body=body)
        model = build(config)
        model.lm_head = nn.Linear(64, 64)
        convert(config, model)
        assert (type(model.lm_head) is nn.Linear) == (written != 'filter_fqns = ["output"]')
        assert type(model.output) is nn.Linear


def test_an_empty_filter_converts_every_linear(tmp_path):
    config = job(tmp_path, "qwen3", flavor="debugmodel_moe", body=f"[{LINEAR}]\nfilter_fqns = []\n")
    model = converted(config)
    assert of_type(model, titan_fp8.FP8Linear).keys() == of_type(model, nn.Linear).keys()


@pytest.mark.parametrize("patterns", ["wq_typo", "output,wq_typo"])
def test_a_filter_that_matches_nothing_is_an_error(tmp_path, patterns):
    config = job(tmp_path, "llama3", f"--{LINEAR}.filter_fqns", patterns, converters=(LINEAR,))
    with pytest.raises(ValueError) as caught:
        converted(config)
    assert f"[{LINEAR}] filter_fqns = {patterns.split(',')!r}" in str(caught.value)
    assert "'wq_typo'" in str(caught.value)


@pytest.mark.parametrize("recipe", ["blockwise", "bf16"])
@pytest.mark.parametrize("patterns", ["expertz", "experts,layers.99", "shared_experts"])
def test_fqns_that_convert_nothing_are_an_error(tmp_path, patterns, recipe):
    flags = (f"--{GROUPED_MM}.fqns", patterns, f"--{GROUPED_MM}.recipe", recipe)
    with pytest.raises(ValueError) as caught:
        converted(job(tmp_path, "deepseek_v3", *flags))
    message = str(caught.value)
    assert f"[{GROUPED_MM}] fqns = {patterns.split(',')!r}" in message
    assert f"{patterns.split(',')[-1]!r} converts nothing" in message
    assert "layers.1.moe.experts" in message


def test_a_model_without_experts_needs_no_converter_of_experts(tmp_path):
    with pytest.raises(ValueError) as caught:
        converted(job(tmp_path, "llama3"))
    for words in (f"[{GROUPED_MM}] fqns = ['experts']", "no grouped experts: leave out the conv"):
        assert words in str(caught.value)


def test_biased_experts_are_refused_with_the_reason(tmp_path):
    with pytest.raises(ValueError) as caught:
        converted(job(tmp_path, "gpt_oss"))
    message = str(caught.value)
    assert f"[{GROUPED_MM}] fqns = ['experts']" in message
    assert "layers.0.moe.experts" in message and "GptOssGroupedExperts" in message
    assert "bias" in message


def test_the_table_says_which_sizes_keep_experts_in_bf16(tmp_path, caplog):
    config = job(tmp_path, "deepseek_v3")
    model = build(config)
    for layer, width in (("1", 40), ("2", 0)):
        model.layers[layer].moe.experts = GroupedExperts(256, width, 8, use_grouped_mm=True)
    convert(config, model)
    table = report(caplog.text)
    assert table["layers.1.moe.experts"][1] == "- w1: N = 40 is not a multiple of 16"
    assert table["layers.2.moe.experts"][1] == "- w1: N = 0 is not a positive multiple of 16"


def test_fqns_choose_among_the_experts(tmp_path, caplog):
    flags = (f"--{GROUPED_MM}.fqns", "layers.1.moe,layers.3.moe")
    model = converted(job(tmp_path, "deepseek_v3", *flags))
    chosen = {"layers.1.moe.experts", "layers.3.moe.experts"}
    assert of_type(model, FP8GroupedExperts).keys() == chosen
    assert report(caplog.text)["layers.2.moe.experts"][1] == "- no pattern of fqns matches"


@pytest.mark.parametrize("recipe", ALIGNMENT)
def test_experts_follow_the_linear_recipe_and_align_their_tokens(tmp_path, recipe):
    model = converted(job(tmp_path, "deepseek_v3", f"--{LINEAR}.recipe", recipe))
    assert {m.recipe for m in of_type(model, FP8GroupedExperts).values()} == {recipe}
    assert {m.recipe for m in of_type(model, titan_fp8.FP8Linear).values()} == {recipe}
    assert ALIGNMENT[recipe] == moe_utils.TOKEN_GROUP_ALIGN_SIZE_M


def test_experts_may_have_a_recipe_of_their_own(tmp_path):
    flags = (f"--{LINEAR}.recipe", "bf16", f"--{GROUPED_MM}.recipe", "rowwise")
    model = converted(job(tmp_path, "deepseek_v3", *flags))
    assert {m.recipe for m in of_type(model, FP8GroupedExperts).values()} == {"rowwise"}
    assert not of_type(model, titan_fp8.FP8Linear)


def replaced(group: tuple[Patch, ...]) -> set[str]:
    """The names of those of these patches that have replaced something."""
    return {p.name for p in group if any(getattr(*t.locate()) != t.original() for t in p.targets)}


def test_bf16_leaves_modules_alignment_checkpointing_and_compiler_alone(tmp_path, caplog):
    compilers = (torch._inductor.config, torch._dynamo.config, torch._functorch.config)
    flags = (f"--{LINEAR}.recipe", "bf16", "--compile.enable")
    config = job(tmp_path, "deepseek_v3", *flags)
    model = build(config)
    modules = {name: (module, type(module)) for name, module in model.named_modules()}
    settings = [compiler.get_config_copy() for compiler in compilers]

    with torch.autograd.set_multithreading_enabled(True):
        convert(config, model)
        assert torch._C._is_multithreading_enabled()

    assert {name: (module, type(module)) for name, module in model.named_modules()} == modules
    assert moe_utils.TOKEN_GROUP_ALIGN_SIZE_M == 8
    assert [compiler.get_config_copy() for compiler in compilers] == settings
    assert not replaced(patches.ON_CONVERSION)
    assert "emulated" not in caplog.text
    assert {outcome for _, outcome in report(caplog.text).values()} == {'- recipe = "bf16"'}


EP = ("--parallelism.expert_parallel_degree", 2)
SPEEDUPS = f"--{LINEAR}.host_speedups"


@pytest.mark.parametrize("name", CONVERTERS)
@pytest.mark.parametrize("recipe, speedups", [("bf16", "True"), ("rowwise", "False")])
def test_the_key_decides_about_all_that_is_not_fp8(tmp_path, name, recipe, speedups):
    """On one of two ranks, which have FSDP and, with experts, expert parallelism."""
    flags = (f"--{LINEAR}.recipe", recipe, SPEEDUPS, speedups, "--compile.enable")
    flags += ("--parallelism.data_parallel_shard_degree", 2)
    is_moe = name == "deepseek_v3"
    config = job(tmp_path, name, *flags, *EP * is_moe, converters=CONVERTERS[name])
    with torch.autograd.set_multithreading_enabled(True):
        convert(config, build(config), ranks=2)
        assert torch._C._is_multithreading_enabled() == (speedups == "False")
    gains = {"gradient reduction", "profiler ranges", *["token exchange"] * is_moe}
    assert replaced(patches.FOR_HOST) == (gains if speedups == "True" else set())
    assert bool(replaced(patches.FOR_FP8)) == (recipe != "bf16")


DEEPEP = (*EP, "--parallelism.expert_parallel_comm_backend", "deepep")
NO_EP = ()


@pytest.mark.parametrize("plan", [EP, DEEPEP, NO_EP], ids=["EP", "DeepEP", "no EP"])
@pytest.mark.parametrize("setting", [None, "gather", "host"])
@pytest.mark.parametrize("recipe", ["rowwise", "bf16"])
def test_the_permutation_is_replaced_where_there_is_one(
    tmp_path, monkeypatch, caplog, recipe, setting, plan
):
    monkeypatch.setitem(sys.modules, "torchtitan.distributed.deepep", MagicMock())
    flags = () if setting is None else (f"--{GROUPED_MM}.permutation", setting)
    exchange = expert_parallel.ExpertParallel
    before = exchange._token_dispatch, exchange._token_combine
    config = job(tmp_path, "deepseek_v3", f"--{LINEAR}.recipe", recipe, *flags, *plan)
    for _ in range(2):
        layers = of_type(converted(config), MoE)
    by_gathers = setting == "gather" or (setting is None and recipe != "bf16")
    replaced = by_gathers and plan is not DEEPEP
    assert all((type(layer) is GatherMoE) == replaced for layer in layers.values()) and layers
    ours = token_exchange.token_dispatch, token_exchange.token_combine
    there = exchange._token_dispatch, exchange._token_combine
    assert there == (ours if replaced and plan is EP else before)
    assert (f"{len(layers)} MoE layers permute their tokens by gathers" in caplog.text) == replaced
    warned = any('permutation = "gather"' in r.message for r in caplog.records)
    assert warned == (setting == "gather" and not replaced)
    if recipe == "bf16":
        assert moe_utils.TOKEN_GROUP_ALIGN_SIZE_M == 8
