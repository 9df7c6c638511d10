"""The fields of the converters and of the overrides: defaults, and the error for each mistake."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import titan_0_3
from parsing import parse_args
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config.override import OverrideConfig, apply_overrides, override
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.rope import ComplexRoPE

from titan_fp8.recipe import RECIPE_NAMES
from titan_fp8.torchtitan_0_3 import FP8GroupedExpertsConverter, FP8LinearConverter
from titan_fp8.torchtitan_0_3.experts import FP8Experts
from titan_fp8.torchtitan_0_3.linear import FP8Linear

ADAPTER = "titan_fp8.torchtitan_0_3"
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/torchtitan_0_3.md"


def test_the_documented_defaults():
    linear, experts = FP8LinearConverter.Config(), FP8GroupedExpertsConverter.Config()
    assert linear.recipe == experts.recipe == "blockwise"
    assert linear.filter_fqns == ["lm_head", "router.gate"] and experts.fqns == ["experts"]
    assert linear.emulate is experts.emulate is False
    assert linear.fsdp_all_gather is experts.fsdp_all_gather is False
    assert linear.health_freq == experts.health_freq == 0
    assert isinstance(linear.build(), QuantizationConverter)
    assert isinstance(experts.build(), QuantizationConverter)


def test_the_docs_show_the_defaults():
    text = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(from titan_fp8.torchtitan_0_3 .*?)```", text, re.DOTALL)
    names: dict = {}
    exec(block, names)
    config = names["deepseek_v3_16b_fp8"]()
    model = config.model_spec.model
    assert names["converters"] == [FP8LinearConverter.Config(), FP8GroupedExpertsConverter.Config()]
    assert any(model.traverse(FP8Linear.Config))
    commands = re.findall(r"--override.imports '(titan_fp8.torchtitan_0_3.*?)'", text)
    for model, command in zip(titan_0_3.MODELS, commands, strict=True):
        parsed = titan_0_3.parse(f"{model}_plain", "--override.imports", command)
        assert apply_overrides(parsed.override, parsed)


STUB = """#!/bin/sh
case "$*" in
    *distributed.run*) printf '%s\\n' "$@" >"$(mktemp run.XXXX)" ;;
    *device_count*) echo 0 ;;
esac
"""
"""In place of Python: writes the arguments of each run to a file."""


@pytest.mark.parametrize("model", titan_0_3.MODELS)
def test_torchtitan_takes_what_the_quickstart_runs(monkeypatch, tmp_path, model):
    """CI's own quickstart is one for 0.2."""
    for folder in ("scripts", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (python := tmp_path / "python").write_text(STUB)
    python.chmod(0o755)
    monkeypatch.setenv("TITAN_FP8_PYTHON", str(python))
    monkeypatch.syspath_prepend(ROOT / "configs")
    command = ("scripts/quickstart.sh", model, "--torchtitan", "0.3", "--steps", "20")
    subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    runs = {}
    for file in tmp_path.glob("run.*"):
        *_, arguments = file.read_text().partition("\ntitan_fp8.cpu_host\n")
        config = parse_args(arguments.splitlines())
        assert apply_overrides(config.override, config)
        name = Path(config.dump_folder).name.partition("-")[0]
        runs[name] = recipes(config.model_spec.model), config.training.mixed_precision_param
        assert name == "seed" or config.training.steps == 20
    fp8 = {"blockwise"}, {"blockwise"} if model == "deepseek_v3" else set()
    want = {"seed": "bfloat16", "bf16": "bfloat16", "blockwise": "bfloat16"}
    want |= {"fp32": "float32"} if model == "deepseek_v3" else {}
    high = set(), set()
    assert runs == {name: (fp8 if name == "blockwise" else high, p) for name, p in want.items()}


LIST, ONE_MORE, BOOL = ("list of strings",), ("empty string",), ("true", "false")
MISTAKES = [
    *(
        (converter, "recipe", value, RECIPE_NAMES)
        for converter in (FP8LinearConverter, FP8GroupedExpertsConverter)
        for value in ("blokwise", "", "Rowwise", 3, True, ["rowwise"])
    ),
    *(
        (converter, field, value, BOOL)
        for converter in (FP8LinearConverter, FP8GroupedExpertsConverter)
        for field in ("emulate", "fsdp_all_gather", "host_speedups")
        for value in ("yes", 1, [])
    ),
    *(
        (converter, "health_freq", value, ("whole numbers of steps", "0 for never"))
        for converter in (FP8LinearConverter, FP8GroupedExpertsConverter)
        for value in (-1, True, 1.5, "10")
    ),
    *((FP8LinearConverter, "filter_fqns", value, LIST) for value in ("lm_head", True, [1])),
    (FP8LinearConverter, "filter_fqns", ["lm_head", ""], ONE_MORE),
    *((FP8GroupedExpertsConverter, "fqns", value, LIST) for value in ("experts", True, [1])),
    (FP8GroupedExpertsConverter, "fqns", [""], ONE_MORE),
    (FP8GroupedExpertsConverter, "fqns", [], ("convert nothing",)),
]


@pytest.mark.parametrize("converter, field, value, allowed", MISTAKES)
def test_a_mistake_names_field_value_and_what_is_allowed(converter, field, value, allowed):
    with pytest.raises(ValueError) as caught:
        converter.Config(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{converter.__name__}: {field} = {value!r}")
    assert all(word in message for word in allowed)


def overridden(model: str, *entries: object):
    """The config of a model after these overrides."""
    config = titan_0_3.small(model)
    config.override = OverrideConfig(imports=list(entries))
    apply_overrides(config.override, config)
    return config.model_spec.model


def recipes(model) -> tuple[set[str], set[str]]:
    """The recipes of the linears and of the experts."""
    experts = [c for _, c, *_ in model.traverse(GroupedExperts.Config)]
    return (
        {linear.recipe for _, linear, *_ in model.traverse(FP8Linear.Config)},
        {e.recipe for e in experts if issubclass(e._owner, FP8Experts)},
    )


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("model", titan_0_3.MODELS)
def test_every_recipe_is_an_override(model, recipe):
    fp8 = set() if recipe == "bf16" else {recipe}
    linears, experts = recipes(overridden(model, f"{ADAPTER}.{recipe}"))
    assert linears == fp8 and experts == (fp8 if model == "deepseek_v3" else set())


def test_an_override_takes_the_fields_of_the_converters():
    arguments = {
        "filter_fqns": ["wo"],
        "emulate": True,
        "fqns": ["layers.1"],
        "host_speedups": False,
    }
    model = overridden("deepseek_v3", (f"{ADAPTER}.rowwise", arguments))
    left = [n for n, c, *_ in model.traverse(Linear.Config) if type(c) is Linear.Config]
    assert left == [
        "layers.0.attention.wo",
        "layers.1.attention.wo",
        "layers.1.moe.router.gate",
    ]
    experts = model.layers[1].moe.routed_experts
    assert experts.inner_experts.emulate and model.lm_head.emulate
    assert type(experts.token_dispatcher).__qualname__ == "AllToAllTokenDispatcher.Config"


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"filter_fqns": ["typo"]}, ValueError, "filter_fqns = ['typo']: no module's name"),
        ({"fqns": ["experts"]}, ValueError, "which has no grouped experts: leave out"),
        ({"emulate": "yes"}, ValueError, "emulate = 'yes': allowed are true and false"),
        ({"health_freq": 1.5}, ValueError, "health_freq = 1.5: allowed are whole numbers"),
        ({"filter_fqns": None}, ValueError, "filter_fqns = None: allowed is a list of strings"),
        *(
            ({key: 1}, ValueError, f"{ADAPTER}.blockwise: {key!r} is no key: allowed are filter_")
            for key in ("recipe", "config", "fqn")
        ),
    ],
)
def test_a_mistake_in_an_override_is_an_error(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        overridden("llama3", (f"{ADAPTER}.blockwise", arguments))


def test_an_override_can_leave_the_experts():
    model = overridden("deepseek_v3", (f"{ADAPTER}.rowwise", {"fqns": []}))
    assert recipes(model) == ({"rowwise"}, set())


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_an_override_of_a_converted_config_is_an_error(recipe):
    config = titan_0_3.small("deepseek_v3", titan_0_3.converters("deepseek_v3"))
    config.override = OverrideConfig(imports=[f"{ADAPTER}.{recipe}"])
    message = f"recipe = '{recipe}': layers.0.attention.wq is already converted, 'blockwise'"
    with pytest.raises(ValueError, match=re.escape(message)):
        apply_overrides(config.override, config)


def test_an_override_keeps_the_sharding():
    config = titan_0_3.small("llama3")
    config.model_spec.model.update_from_config(config=config)
    before = {n: c.sharding_config for n, c, *_ in config.model_spec.model.traverse(Linear.Config)}
    config.override = OverrideConfig(imports=[f"{ADAPTER}.blockwise"])
    apply_overrides(config.override, config)
    after = {n: c.sharding_config for n, c, *_ in config.model_spec.model.traverse(Linear.Config)}
    assert after == before and all(after.values())


def test_torchtitan_refuses_an_override_of_a_part_beside_it():
    @override(target=ComplexRoPE.Config)
    def rope(config):
        return config

    with pytest.raises(ValueError, match="an ancestor of"):
        overridden("llama3", f"{ADAPTER}.blockwise", f"{__name__}.rope")
