"""What a patch is, and that the targets of every patch of `patches.py` are here.

A missing or changed target ends the run if the patch is required. Otherwise it leaves a warning,
and training goes on with the same results. What each patch brings is tested with its replacement.
"""

import dataclasses
import logging
import runpy
from pathlib import Path

import gloo
import pytest
import torch
from titan import (
    AC,
    CHECKPOINTING,
    CONVERTERS,
    converted,
    job,
    loss_and_gradients,
    of_type,
    one_process,
    parse,
    toml,
    trainer,
    training,
)
from unpatched import restore

import titan_fp8
from titan_fp8.patches import SAC_POLICY, Patch, Target
from titan_fp8.torchtitan_0_2 import patches
from titan_fp8.torchtitan_0_2.experts import FP8GroupedExperts

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")

EP = ("--parallelism.expert_parallel_degree", 2)


def remove(monkeypatch, target: Target) -> None:
    monkeypatch.delattr(*target.locate())


def change(monkeypatch, target: Target) -> None:
    """Gives the target another signature, or removes it if it has none."""
    if target.parameters is None:
        remove(monkeypatch, target)
    else:
        monkeypatch.setattr(*target.locate(), lambda other: None)


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.name)
def test_targets_are_here_and_take_what_the_replacement_relies_on(patch):
    assert not [t.problem() for t in (*patch.targets, *patch.relies_on) if t.problem()]


class Owner:
    """Has something to replace."""

    value = "original"

    def function(self, x, y):
        pass


VALUE = f"{__name__}:Owner.value"


def patch_of(target: Target, relies_on: tuple[Target, ...] = (), required: bool = False) -> Patch:
    fields = {"targets": (target,), "relies_on": relies_on, "required": required}
    return dataclasses.replace(patches.STEP_METRICS, name="test", **fields)


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize(
    "path, parameters, problem",
    [
        (f"{__name__}:Owner.none", None, "is missing"),
        ("torch:none.f", None, "is missing"),
        ("titan_fp8.none:f", None, "is missing"),
        (f"{__name__}:Owner.function", ("self", "x"), "takes (self, x, y), expected (self, x)"),
        (f"{__name__}:Owner.function", ("z", ...), "takes (self, x, y), expected (z)"),
    ],
)
def test_a_target_that_does_not_fit(caplog, path, parameters, problem, required):
    """It ends the run or leaves one warning, which say what that means, and changes nothing."""
    bad, good = Target(path, parameters), Target(VALUE)
    for patch in (patch_of(bad, required=required), patch_of(good, (bad,), required)):
        restore([])  # The log names each problem once.
        caplog.clear()
        if required:
            with pytest.raises(RuntimeError) as caught:
                patch.apply(lambda value: "replaced")
            message = str(caught.value)
        else:
            assert not any(patch.apply(lambda value: "replaced") for _ in range(2))
            (record,) = caplog.records
            assert record.levelno == logging.WARNING
            message = record.getMessage()
        assert all(text in message for text in ("'test'", f"{path} {problem}", patch.why))
        assert Owner.value == "original"


def test_other_parameters_may_be_there():
    assert Target(f"{__name__}:Owner.function", ("self", "y", ...)).problem() is None


def test_the_last_replacement_counts_and_starts_from_the_original():
    patch = patch_of(Target(VALUE))
    assert patch.apply(lambda value: f"{value}, once") and Owner.value == "original, once"
    assert patch.apply(lambda value: f"{value}, twice") and Owner.value == "original, twice"
    Owner.value = "another's"
    assert patch.apply(lambda value: f"{value}, patched") and Owner.value == "another's, patched"
    for _ in range(2):
        restore([patch])
        assert Owner.value == "another's"
    patch.apply(lambda value: f"{value}, patched")
    Owner.value = "original"
    restore([patch])
    assert Owner.value == "original"


def test_targets_are_replaced_together_or_not_at_all():
    patch = patch_of(Target(VALUE))
    patch = dataclasses.replace(patch, targets=(*patch.targets, Target("torch:none")))
    assert not patch.apply(lambda value: "replaced", lambda value: "replaced")
    assert Owner.value == "original"


def test_what_was_absent_is_absent_again():
    patch = patch_of(Target(f"{__name__}:Owner.new", may_be_absent=True))
    for _ in range(2):
        assert patch.apply(lambda original: 1) and Owner.new == 1
    restore([patch])
    assert not hasattr(Owner, "new")


def test_no_target_is_replaced_by_two_patches():
    assert len({patch.name for patch in patches.PATCHES}) == len(patches.PATCHES)
    paths = [target.path for patch in patches.PATCHES for target in patch.targets]
    assert len(set(paths)) == len(paths)


def test_the_plugin_does_not_load_without_its_check(monkeypatch):
    remove(monkeypatch, *patches.CONFIG_CHECK.targets)
    with pytest.raises(RuntimeError, match="^titan_fp8: patch 'config check'"):
        runpy.run_module("titan_fp8.plugin")


@pytest.mark.parametrize("change", [remove, change])
def test_a_conversion_goes_on_without_a_patch_and_says_so_once(
    monkeypatch, tmp_path, caplog, change
):
    change(monkeypatch, patches.TOKEN_EXCHANGE.targets[0])
    caplog.set_level(logging.INFO)
    config = job(tmp_path, "deepseek_v3", *EP)
    for _ in range(2):
        model = converted(config)
    assert of_type(model, titan_fp8.FP8Linear) and of_type(model, FP8GroupedExperts)
    assert caplog.text.count("patch 'token exchange' does not apply") == 1
    assert caplog.text.count("patch 'selective checkpointing policy' replaces torchtitan") == 1


def without(monkeypatch, left_out: Patch) -> None:
    apply_patch = Patch.apply

    def apply_others(patch: Patch, *makes) -> bool:
        return patch is not left_out and apply_patch(patch, *makes)

    monkeypatch.setattr(Patch, "apply", apply_others)


def gradients(folder: Path, text: Path, model: str, *flags: object) -> dict[str, torch.Tensor]:
    restore(patches.ON_CONVERSION)
    flags = (*training(text, folder), "--debug.deterministic", *flags)
    with trainer(parse(folder, toml(model, CONVERTERS[model]), *flags)) as t:
        return loss_and_gradients(t)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_checkpointed_training_is_the_same_without(monkeypatch, tmp_path, text):
    with one_process():
        expected = gradients(tmp_path, text, "llama3", *CHECKPOINTING["op"])
        without(monkeypatch, SAC_POLICY)
        assert same(gradients(tmp_path, text, "llama3", *CHECKPOINTING["op"]), expected)


def train_without(rank: int, folder: Path, text: Path) -> None:
    """On one of two ranks."""
    folder = folder / str(rank)
    folder.mkdir()
    expected = gradients(folder, text, "deepseek_v3", *EP, f"{AC}.mode", "none")
    with pytest.MonkeyPatch.context() as monkeypatch:
        without(monkeypatch, patches.TOKEN_EXCHANGE)
        got = gradients(folder, text, "deepseek_v3", *EP, f"{AC}.mode", "none")
    assert same(got, expected)


def test_expert_parallel_training_is_the_same_without(tmp_path, text):
    gloo.spawn(train_without, 2, tmp_path, text)
