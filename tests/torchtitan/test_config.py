"""The contract of the TOML: what a user may write, what is read, and the error for each mistake.

A mistake raises while the file is read, before a trainer exists.
"""

import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from titan import BOTH, GROUPED_MM, LINEAR, parse, toml
from torchtitan import train
from torchtitan.config import ConfigManager
from torchtitan.config import JobConfig as TorchtitanConfig
from torchtitan.protocols import model_converter
from torchtitan.tools import utils

from titan_fp8.recipe import RECIPE_NAMES as RECIPES

HEAD = toml("deepseek_v3")
SECTIONS = f"""
[{LINEAR}]
recipe = "rowwise"
filter_fqns = ["output", "wkv_a"]
emulate = true
host_speedups = false

[{GROUPED_MM}]
recipe = "rowwise_with_gw_hp"
fqns = ["layers.1.moe.experts"]
emulate = true
permutation = "host"
"""
FLAGS = (
    *(f"--{LINEAR}.recipe", "rowwise", f"--{LINEAR}.filter_fqns", "output,wkv_a"),
    *(f"--{LINEAR}.emulate", f"--{GROUPED_MM}.recipe", "rowwise_with_gw_hp"),
    *(f"--{GROUPED_MM}.fqns", "layers.1.moe.experts", f"--{GROUPED_MM}.emulate"),
    *(f"--{GROUPED_MM}.permutation", "host", f"--{LINEAR}.host_speedups", "False"),
)
NEEDS_NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def sections(config):
    """The settings of both sections as plain values."""
    linear, experts = config.quantize.linear.titan_fp8, config.quantize.grouped_mm.titan_fp8
    return (
        (linear.recipe, linear.filter_fqns, linear.emulate, linear.host_speedups),
        (experts.recipe, experts.fqns, experts.emulate, experts.permutation),
    )


ALL_SET = (
    ("rowwise", ["output", "wkv_a"], True, False),
    ("rowwise_with_gw_hp", ["layers.1.moe.experts"], True, "host"),
)


def test_one_line_loads_the_plugin_with_its_documented_defaults(tmp_path):
    config = parse(tmp_path, HEAD)
    assert sections(config) == (
        ("blockwise", ["output", "router.gate"], False, None),
        (None, ["experts"], False, None),
    )


def test_the_docs_show_the_defaults(tmp_path):
    page = (Path(__file__).parents[2] / "docs/configuration.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    config = parse(tmp_path, block.replace("[model]", '[model]\nname = "deepseek_v3"'))
    assert sections(config) == sections(parse(tmp_path, HEAD))


def test_the_lines_of_the_readme_convert_a_dense_model_and_one_with_experts(tmp_path):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    block, for_experts = re.findall(r"```toml\n(.*?)```", readme, re.DOTALL)
    config = parse(tmp_path, block.replace("[model]", '[model]\nname = "llama3"'))
    linear, _ = sections(config)
    assert config.model.converters == [LINEAR] and linear[0] == "blockwise"
    block = re.sub("converters = .*\n# with experts:", "converters =", block) + for_experts
    config = parse(tmp_path, block)
    assert config.model.converters == list(BOTH)
    assert config.quantize.linear.titan_fp8.cuda_graph
    assert config.quantize.grouped_mm.titan_fp8.exchange == "fp8"


def test_every_key_is_read_from_the_toml(tmp_path):
    assert sections(parse(tmp_path, HEAD + SECTIONS)) == ALL_SET


def test_every_key_is_a_flag(tmp_path):
    assert sections(parse(tmp_path, HEAD, *FLAGS)) == ALL_SET


def test_flags_override_the_toml_key_by_key(tmp_path):
    flags = (f"--{LINEAR}.recipe", "bf16", f"--{LINEAR}.no-emulate", f"--{GROUPED_MM}.fqns", "moe")
    linear, experts = sections(parse(tmp_path, HEAD + SECTIONS, *flags))
    assert linear == ("bf16", ["output", "wkv_a"], False, False)
    assert experts == ("rowwise_with_gw_hp", ["moe"], True, "host")


@pytest.mark.parametrize("section", BOTH)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_may_be_written(tmp_path, section, recipe):
    config = parse(tmp_path, HEAD + f'[{section}]\nrecipe = "{recipe}"\n')
    assert recipe in [settings[0] for settings in sections(config)]


def test_an_empty_filter_may_be_written(tmp_path):
    config = parse(tmp_path, HEAD + f"[{LINEAR}]\nfilter_fqns = []\n")
    assert config.quantize.linear.titan_fp8.filter_fqns == []


LIST = ("list of strings",)
BOOL = ("true", "false")
ONE_MORE = ("empty string",)
PERMUTATIONS = ("'gather'", "'host'")
RECIPE_MISTAKES = ('"blokwise"', '""', '"Rowwise"', "3", "true", '["rowwise"]')
LIST_MISTAKES = (('"output"', LIST), ("true", LIST), ("[1]", LIST), ('["output", ""]', ONE_MORE))
MISTAKES = [
    *((section, "recipe", value, RECIPES) for section in BOTH for value in RECIPE_MISTAKES),
    *((section, "emulate", value, BOOL) for section in BOTH for value in ('"yes"', "1", "[]")),
    *((LINEAR, "host_speedups", value, BOOL) for value in ('"yes"', "1", "[]")),
    (LINEAR, "cuda_graph", '"yes"', BOOL),
    *((LINEAR, "filter_fqns", value, allowed) for value, allowed in LIST_MISTAKES),
    *((GROUPED_MM, "fqns", value, allowed) for value, allowed in LIST_MISTAKES),
    (GROUPED_MM, "fqns", "[]", ("convert nothing",)),
    *((GROUPED_MM, "permutation", value, PERMUTATIONS) for value in ('"gathers"', "true", "[]")),
]


@pytest.mark.parametrize("section, key, value, allowed", MISTAKES)
def test_a_mistake_in_the_toml_names_key_value_and_what_is_allowed(
    tmp_path, section, key, value, allowed
):
    with pytest.raises(ValueError) as caught:
        parse(tmp_path, HEAD + f"[{section}]\n{key} = {value}\n")
    message = str(caught.value)
    assert f"[{section}] {key} = " in message
    written = {"true": "True"}.get(value, value).replace('"', "'")
    assert written in message
    assert all(word in message for word in allowed)


def test_an_unknown_key_is_named(tmp_path):
    with pytest.raises(ValueError, match="recipes"):
        parse(tmp_path, HEAD + f'[{LINEAR}]\nrecipes = "rowwise"\n')


@pytest.mark.parametrize("table", ["quantize", *BOTH, *(s.rpartition(".")[0] for s in BOTH)])
@pytest.mark.parametrize("value", ["false", "true", "3", '"rowwise"', "[1]", "[{emulate = true}]"])
def test_a_value_in_place_of_a_table_is_refused(tmp_path, table, value):
    """Whoever writes false means off, so the message says how."""
    parent, _, name = table.rpartition(".")
    text = f"[{parent}]\n{name} = {value}\n" if parent else f"{name} = {value}\n"
    with pytest.raises(ValueError) as caught:
        parse(tmp_path, text + HEAD)
    written = {"false": "False", "true": "True"}.get(value, value[:2].replace('"', "'"))
    assert f"[{table}] is {written}" in str(caught.value)
    assert "allowed is a table" in str(caught.value) and 'recipe = "bf16"' in str(caught.value)


FLAG_MISTAKES = [
    *((section, "recipe", "blokwise", RECIPES) for section in BOTH),
    (LINEAR, "filter_fqns", "output,,wk", ONE_MORE),
    (GROUPED_MM, "fqns", "", ONE_MORE),
    (GROUPED_MM, "permutation", "gathers", ("gather", "host")),
]


@pytest.mark.parametrize("section, key, value, allowed", FLAG_MISTAKES)
def test_a_mistake_in_a_flag_names_key_value_and_what_is_allowed(
    tmp_path, capsys, section, key, value, allowed
):
    with pytest.raises(SystemExit) as caught:
        parse(tmp_path, HEAD, f"--{section}.{key}", value)
    assert caught.value.code != 0
    # torchtitan's command line wraps its messages and writes flags with dashes.
    message = " ".join(capsys.readouterr().err.replace("\u2502", " ").split()).replace("-", "_")
    assert section in message and key in message
    assert all(item in message for item in (*filter(None, value.split(",")), *allowed))


def test_a_boolean_flag_takes_no_value(tmp_path):
    with pytest.raises(SystemExit):
        parse(tmp_path, HEAD, f"--{LINEAR}.emulate", "7")


OTHER = {LINEAR: GROUPED_MM, GROUPED_MM: LINEAR}
DEFAULTS = {
    LINEAR: 'recipe = "blockwise"\nfilter_fqns = ["output", "router.gate"]\nemulate = false\n',
    GROUPED_MM: 'fqns = ["experts"]\nemulate = false\n',
}


@pytest.mark.parametrize("section", BOTH)
@pytest.mark.parametrize("body", ["other values", "default values", "nothing", "bf16"])
@pytest.mark.parametrize("listed", ["the other", "none"])
def test_a_section_whose_converter_is_not_listed_is_refused(tmp_path, section, body, listed):
    bodies = {
        "other values": 'recipe = "rowwise"\n',
        "default values": DEFAULTS[section],
        "nothing": "",
        "bf16": 'recipe = "bf16"\n',
    }
    head = toml("deepseek_v3", (OTHER[section],) if listed == "the other" else ())
    with pytest.raises(ValueError) as caught:
        parse(tmp_path, head + f"[{section}]\n{bodies[body]}")
    assert f"[{section}]" in str(caught.value) and "model.converters" in str(caught.value)


@pytest.mark.parametrize(
    "section, flag",
    [
        *((section, ("recipe", "rowwise")) for section in BOTH),
        (LINEAR, ("recipe", "blockwise")),
        (GROUPED_MM, ("fqns", "experts")),
    ],
)
@pytest.mark.parametrize("spelling", ["_ and space", "- and ="])
def test_a_flag_whose_converter_is_not_listed_is_refused(tmp_path, section, flag, spelling):
    """Even one that repeats the default."""
    head = toml("deepseek_v3", (OTHER[section],))
    key, value = f"--{section}.{flag[0]}", flag[1]
    flags = (f"{key.replace('_', '-')}={value}",) if "=" in spelling else (key, value)
    with pytest.raises(ValueError) as caught:
        parse(tmp_path, head, *flags)
    assert f"[{section}]" in str(caught.value) and "model.converters" in str(caught.value)


@pytest.mark.parametrize(
    "listed, message",
    [
        (f'"{LINEAR}"', f"model.converters = '{LINEAR}': allowed is a list of strings"),
        (f'["{LINEAR}", ["q"]]', f"model.converters = ['{LINEAR}', ['q']]: allowed is a list of"),
        (f'["{LINEAR}", "{LINEAR}"]', f"lists '{LINEAR}' twice"),
    ],
)
def test_a_list_of_converters_that_is_none_is_refused(tmp_path, listed, message):
    head = toml("llama3", ()).replace("converters = []", f"converters = {listed}")
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(tmp_path, head)


@pytest.mark.parametrize(
    "name",
    ["quantize.linear.titanfp8", "quantize.linears.titan_fp8", "titan_fp8", f" {LINEAR}", "", "q"],
)
@pytest.mark.parametrize("flags", [False, True])
def test_a_misspelled_converter_is_refused(tmp_path, name, flags):
    args = ["--experimental.custom_import", "json"]  # which registers no converter
    args += ["--model.converters", f"{GROUPED_MM},{name}"] if flags else []
    with pytest.raises(ValueError) as caught:
        parse(tmp_path, toml("llama3", () if flags else (GROUPED_MM, name)), *args)
    message = str(caught.value)
    assert f"model.converters = {[GROUPED_MM, name]}: there is no {name!r}; allowed are " in message
    allowed = message.partition("allowed are ")[2].split(", ")
    assert {repr(LINEAR), repr(GROUPED_MM), "'quantize.linear.float8'"} <= set(allowed)


def test_another_projects_converters_may_be_listed(tmp_path, monkeypatch):
    registry = model_converter._registry_model_converter_cls
    monkeypatch.setattr(model_converter, "_registry_model_converter_cls", dict(registry))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "their_module.py").write_text(
        "from torchtitan.protocols.model_converter import register_model_converter\n"
        "register_model_converter(object, 'theirs')\n"
    )
    names = [LINEAR, "theirs"]
    config = parse(tmp_path, toml("llama3", names), "--experimental.custom_import", "their_module")
    assert config.model.converters == names
    del sys.modules["their_module"]


def test_a_converter_listed_by_flag_has_its_section(tmp_path):
    head = toml("deepseek_v3", ())
    config = parse(tmp_path, head + SECTIONS, "--model.converters", ",".join(BOTH))
    assert sections(config) == ALL_SET


def test_torchtitans_own_sections_are_still_read(tmp_path):
    config = parse(tmp_path, HEAD + '[quantize.linear.float8]\nfilter_fqns = ["wo"]\n')
    assert config.quantize.linear.float8.filter_fqns == ["wo"]
    assert config.quantize.grouped_mm.mx.recipe_name == "mxfp8"


def test_another_projects_nested_sections_merge_with_ours(tmp_path, monkeypatch):
    (tmp_path / "their_plugin.py").write_text(
        """
from dataclasses import dataclass, field
import titan_fp8.plugin
from torchtitan.config import ConfigManager

@dataclass
class Theirs:
    strength: int = 3

@dataclass
class QuantizedLinear:
    theirs: Theirs = field(default_factory=Theirs)

@dataclass
class Quantize:
    linear: QuantizedLinear = field(default_factory=QuantizedLinear)

@dataclass
class Own:
    quantize: Quantize = field(default_factory=Quantize)

JobConfig = ConfigManager._merge_configs(titan_fp8.plugin.JobConfig, Own)
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = HEAD.replace("titan_fp8.plugin", "their_plugin")
    config = parse(tmp_path, text + SECTIONS + "[quantize.linear.theirs]\nstrength = 5\n")
    assert sections(config) == ALL_SET
    assert config.quantize.linear.theirs.strength == 5
    with pytest.raises(ValueError, match="blokwise"):
        parse(tmp_path, text + f'[{LINEAR}]\nrecipe = "blokwise"\n')
    del sys.modules["their_plugin"]


def test_a_job_without_the_plugin_still_parses_once_it_is_imported(tmp_path):
    parse(tmp_path, HEAD)
    config = parse(tmp_path, '[model]\nname = "llama3"\n')
    assert isinstance(config, TorchtitanConfig) and not hasattr(config.quantize.linear, "titan_fp8")
    assert isinstance(ConfigManager().parse_args([]), TorchtitanConfig)


@pytest.fixture
def manager(tmp_path, monkeypatch):
    """Runs `python -m torchtitan.config.manager` on a TOML, in this process."""

    def run(text: str) -> None:
        (tmp_path / "job.toml").write_text(text)
        monkeypatch.setattr(sys, "argv", ["", f"--job.config_file={tmp_path / 'job.toml'}"])
        runpy.run_module("torchtitan.config.manager", run_name="__main__")

    return run


def test_torchtitans_config_manager_shows_the_sections(manager, capsys):
    manager(HEAD + SECTIONS)
    shown = "".join(capsys.readouterr().out.split())
    assert "titan_fp8=TitanFP8Linear(recipe='rowwise',emulate=True," in shown
    assert "filter_fqns=['output','wkv_a']" in shown
    assert "TitanFP8GroupedMM(recipe='rowwise_with_gw_hp',emulate=True," in shown
    assert "fqns=['layers.1.moe.experts']" in shown


def test_torchtitans_config_manager_refuses_what_training_refuses(manager):
    with pytest.raises(ValueError, match=re.escape(f"[{LINEAR}]")):
        manager(toml("llama3", ()) + f"[{LINEAR}]\n")


@NEEDS_NO_GPU
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plain_torchtitan_warns_without_a_gpu_before_it_fails(
    tmp_path, monkeypatch, caplog, device
):
    """torchtitan takes "cuda" for its device where nobody has prepared the CPU."""
    monkeypatch.setattr(utils, "device_type", device)
    parse(tmp_path, HEAD)
    warned = "no GPU found" in caplog.text and "scripts/train.sh" in caplog.text
    assert warned == (device == "cuda")


def test_a_run_with_a_mistake_ends_before_it_has_a_trainer(tmp_path, monkeypatch):
    (tmp_path / "job.toml").write_text(HEAD + f'[{LINEAR}]\nrecipe = "blokwise"\n')
    parse_args, flags = ConfigManager.parse_args, [f"--job.config_file={tmp_path / 'job.toml'}"]
    monkeypatch.setattr(ConfigManager, "parse_args", lambda self: parse_args(self, flags))
    monkeypatch.setattr(train, "init_logger", lambda: None)  # which outlives this test
    trainer = mock.Mock()
    with pytest.raises(ValueError, match="recipe = 'blokwise'"):
        train.main(trainer)
    trainer.assert_not_called()
