"""The export as a program: its files when it is killed, its memory, its output and its errors."""

import contextlib
import dataclasses
import json
import os
import runpy
import shutil
import signal
import sys
import tracemalloc
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

import exports
import pytest
import torch
import torch.distributed.checkpoint as dcp
from exports import SHARD_BYTES, config_of, toml, write_checkpoint
from safetensors import SafetensorError
from torch.profiler import ProfilerActivity, profile
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.llama3 import llama3_args

from titan_fp8.export import __main__ as command
from titan_fp8.export import exporter
from titan_fp8.export.checkpoint import Checkpoint
from titan_fp8.export.exporter import export
from titan_fp8.export.run import Run

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")


def in_child(function: Callable[[], object]) -> int:
    """Runs `function` in a fork of this process and returns its exit status, or minus a signal."""
    if (pid := os.fork()) == 0:
        status = 1
        with contextlib.suppress(BaseException):
            function()
            status = 0
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def read_header(path: Path) -> dict:
    """The header of a safetensors file, which must have every byte that it speaks of."""
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    header.pop("__metadata__")
    end = max(entry["data_offsets"][1] for entry in header.values())
    assert path.stat().st_size == 8 + size + end
    return header


def check_whole(folder: Path) -> bool:
    """Every file with a final name must be whole. Returns whether the export looks finished."""
    names = {path.name for path in folder.iterdir() if path.suffix != exporter.PARTIAL}
    found = set()
    for name in names:
        if name.endswith(".safetensors"):
            found |= read_header(folder / name).keys()
        elif name.endswith(".json"):
            json.loads((folder / name).read_text())
    if exporter.INDEX in names:
        index = json.loads((folder / exporter.INDEX).read_text())["weight_map"]
        assert found == index.keys() and names >= set(index.values())
    if exporter.CONFIG in names:
        assert names >= {exporter.INDEX, "tokenizer.json", "tokenizer_config.json"}
    return exporter.CONFIG in names


def test_whenever_an_export_is_killed_what_is_there_is_whole(monkeypatch, tmp_path, text):
    config = config_of("llama3", tmp_path, text)
    checkpoint = write_checkpoint(tmp_path / "step-1", config)

    def killed_at(call: int, out: Path) -> int:
        """Kills an export before its call number `call` of a function that changes the folder."""
        calls = iter(range(1000))

        def dying(function):
            def call_or_die(*args, **options):
                if next(calls) == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **options)

            return call_or_die

        def run() -> None:
            for name in ("touch", "chmod", "rename", "mkdir"):
                setattr(Path, name, dying(getattr(Path, name)))
            export(checkpoint, out, config, shard_bytes=1_500_000, log=lambda line: None)

        return in_child(run)

    looks_finished = []
    for call in range(1000):
        out = tmp_path / f"out{call}"
        status = killed_at(call, out)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        looks_finished.append(out.exists() and check_whole(out))
        if out.exists() and not looks_finished[-1]:
            with pytest.raises(FileExistsError, match="without config.json: not a complete export"):
                export(checkpoint, out, config)
    assert check_whole(out) and not list(out.glob(f"*{exporter.PARTIAL}"))
    (tmp_path / "file").touch()
    assert {path.stat().st_mode for path in [tmp_path / "file", *out.iterdir()]} == {
        (tmp_path / "file").stat().st_mode
    }
    # It is finished when config.json gets its name, and then it ends.
    shards = len(list(out.glob("*.safetensors")))
    assert shards > 2 and len(looks_finished) >= 3 * (shards + 4) and not any(looks_finished)


llama3_args["deep"] = dataclasses.replace(llama3_args["tiny"], dim=512, n_layers=8)
deepseekv3_args["wide"] = dataclasses.replace(
    deepseekv3_args["tiny"],
    **{"dim": 512, "moe_inter_dim": 256, "n_layers": 3},
    moe_args=dataclasses.replace(deepseekv3_args["tiny"].moe_args, num_experts=24),
)


def peak_bytes(function: Callable[[], object], trace: Path) -> int:
    """The bytes that tensors and Python's objects take at most while `function` runs.

    Both allocators count; the memory of the process would depend on what they keep of what earlier
    tests freed. The two peaks are added, so this is an upper bound.
    """
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    _, of_python = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    profiler.export_chrome_trace(str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "[memory]"]
    totals = [event["args"]["Total Allocated"] for event in sorted(events, key=itemgetter("ts"))]
    return max(totals) - totals[0] + of_python


@pytest.mark.parametrize("model, flavor", [("llama3", "deep"), ("deepseek_v3", "wide")])
def test_an_export_holds_no_more_than_a_file(monkeypatch, tmp_path, text, model, flavor):
    config = config_of(model, tmp_path, text, "--model.flavor", flavor)
    checkpoint = write_checkpoint(tmp_path / "step-1", config)
    sizes = [t.size.numel() * 4 for t in Checkpoint(checkpoint).tensors.values()]
    limit = 4_000_000

    def run() -> None:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        export(checkpoint, out, config, shard_bytes=limit, log=lambda line: None)

    # A tensor as it was saved and as it is read, and temporaries of its quantization.
    bound = 2 * max(sizes) + 2 * limit
    assert limit < peak_bytes(run, tmp_path / "trace.json") < bound < sum(sizes) / 2

    # The same, if the tensors that were read are kept.
    kept, read = [], Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda *args: kept.append(read(*args)) or kept[-1])
    assert peak_bytes(run, tmp_path / "trace.json") > bound


def run_command(capsys, *args: object) -> tuple[int, str, str]:
    status = command.main([str(arg) for arg in args])
    return status, *capsys.readouterr()


def test_the_command_shows_its_progress(capsys, tmp_path, text):
    config = config_of("llama3", tmp_path, text)
    checkpoint, out = write_checkpoint(tmp_path / "step-1", config), tmp_path / "new" / "out"
    toml_file = ("--config", tmp_path / "job.toml")
    flags = ("--model.hf_assets_path", text, "--shard_gb", SHARD_BYTES / 1e9)
    status, shown, errors = run_command(capsys, checkpoint, out, *toml_file, *flags)
    assert status == 0 and not errors
    *lines, last = shown.splitlines()
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert [line.partition(":")[0] for line in lines] == shards and len(shards) > 2
    assert all(" of 3.7 MB in " in line for line in lines)
    assert last == f"{out}: 14 weights in FP8, 7 tensors in high precision"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (text / name).read_bytes()
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 1

    again = (checkpoint, out, *toml_file, *flags)
    assert run_command(capsys, *again) == (
        2,
        "",
        f"titan_fp8.export: OUT = {out} exists; name a new folder or delete this one\n",
    )


def test_the_module_is_the_command(capsys, monkeypatch, tmp_path, text):
    checkpoint = write_debug_checkpoint(tmp_path, text)
    model = ("--model.name", "llama3", "--model.flavor=debugmodel")
    monkeypatch.setattr(sys, "argv", ["", str(checkpoint), str(tmp_path / "out"), *model])
    with pytest.raises(SystemExit) as done:
        runpy.run_module("titan_fp8.export", run_name="__main__", alter_sys=True)
    shown = capsys.readouterr().out
    assert done.value.code == 0 and "has no tokenizer" in shown
    assert "42 weights in FP8, 15 tensors in high precision" in shown
    assert (tmp_path / "out/config.json").exists()


def write_debug_checkpoint(folder: Path, text: Path) -> Path:
    config = config_of("llama3", folder, text, "--model.flavor", "debugmodel")
    return write_checkpoint(folder / "step-1", config)


for _name, _layers in (("short", 1), ("long", 3)):
    llama3_args[_name] = dataclasses.replace(llama3_args["export"], n_layers=_layers)


MISTYPED = {
    '[training]\nmixed_precision_param = "fp8"': "mixed_precision_param = 'fp8': allowed are 'f",
    '[model]\nflavor = ["8B"]': "model.flavor = ['8B']: allowed for llama3 are",
    "[experimental]\ncustom_import = 1": "experimental.custom_import = 1: AttributeError",
}
"""TOMLs, and what is said of them."""


TOKENIZERS = [
    ("tokenizer.json", "{", ""),
    ("tokenizer.json", "{}", ""),
    ("tokenizer.json", "[" * 100000, "invalid type"),
    ("tokenizer_config.json", "{", "Expecting"),
    ("tokenizer_config.json", "[1]", ""),
    ("tokenizer_config.json", '{"bos_token": 3}', "Could not parse bos_token"),
]
"""Files of a tokenizer, their content, and what is said of it."""

MODULES = {"exits": "import sys\nsys.exit(7)", "unfinished": "x = ("}


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory, text):
    """A folder with the checkpoints of two steps, their TOML, and what may be taken for either."""
    folder = tmp_path_factory.mktemp("mistaken")
    (folder / "empty").mkdir()
    (folder / "bad.toml").write_text("[job")
    config = config_of("llama3", folder, text)
    for step in (2, 10):
        write_checkpoint(folder / f"step-{step}", config)
    (folder / "latin.toml").write_bytes("# é".encode("latin-1"))
    for i, content in enumerate(MISTYPED):
        (folder / f"{i}0.toml").write_text(content)
    for i, (name, content, _) in enumerate(TOKENIZERS):
        shutil.copytree(text, folder / f"assets{i}")
        (folder / f"assets{i}" / name).write_text(content)
    for name, content in MODULES.items():
        (folder / f"{name}.py").write_text(content)
    return folder


RUN = ["step-2", "out", "--config", "job.toml"]
NO_MODEL = "CHECKPOINT does not say which model it has: name the TOML of the run by --config, or "


@pytest.mark.parametrize(
    "args, message",
    [
        *(
            ([name, "out", "--config", "job.toml"], f"CHECKPOINT = {name} has no .metadata: allow")
            for name in ("none", ".", "empty")
        ),
        (["step-2", "out", "--config", "latin.toml"], "--config = latin.toml: 'utf-8' codec can't"),
        (["step-2", "out", "--job.config-file=latin.toml"], "--config = latin.toml: 'utf-8' codec"),
        *(
            (["step-2", "out", "--config", f"{i}0.toml"], message)
            for i, message in enumerate(MISTYPED.values())
        ),
        *(
            ([*RUN, "--model.hf_assets_path", f"assets{i}"], f"path = 'assets{i}': {message}")
            for i, (_, _, message) in enumerate(TOKENIZERS)
        ),
        ([*RUN, "--job.custom_config_module=nope"], "--config = job.toml: ModuleNotFoundError("),
        ([*RUN, "--job.custom_config_module=unfinished"], "--config = job.toml: SyntaxError("),
        *(
            (
                [*run, f"--experimental.custom_import={name}"],
                f"experimental.custom_import = '{name}': {error}",
            )
            for run in (RUN, ["step-2", "out", "--model.name=llama3", "--model.flavor=export"])
            for name, error in (
                ("nope", "ModuleNotFoundError"),
                ("exits", "SystemExit(7)"),
                ("unfinished", "SyntaxError"),
            )
        ),
        (["step-2", "out"], NO_MODEL + "the model by --model.name and --model.flavor"),
        (
            ["step-2", "out", "--config", "none.toml"],
            "--config = none.toml: [Errno 2] No such",
        ),
        (["step-2", "out", "--config", "bad.toml"], "--config = bad.toml: "),
        (["step-2", "empty", "--config", "job.toml"], "OUT = empty exists, without config.json"),
        *(
            ([*RUN, "--shard_gb", gb], f"--shard_gb = {gb}: all")
            for gb in ("0.0", "inf", "nan", "1e+300")
        ),
        ([*RUN, "--tp", "0"], "--tp = 0: allowed are positive integers"),
        (
            ["step-2", "job.toml/out", "--config", "job.toml"],
            "File exists: 'job.toml'",
        ),
        (
            ["step-2", "out", "--model.name", "llama4", "--model.flavor", "8B"],
            "model.name = 'llama4': allowed are 'llama3', 'qwen3', 'deepseek_v3'",
        ),
        (
            [*RUN, "--model.flavor", "9B"],
            "model.flavor = '9B': allowed for llama3 are 'debugmodel', ",
        ),
        (
            [*RUN, "--model.flavor", "tiny"],
            "step-2: tok_embeddings.weight has shape (2048, 256), expected (2048, 128): is llama3 "
            "tiny the model of the run?",
        ),
        (
            [*RUN, "--model.flavor", "short"],
            "step-2 has 9 tensors that the model lacks, layers.1.attention.wq.weight first: is "
            "llama3 short the model of the run?",
        ),
        (
            [*RUN, "--model.flavor", "long"],
            "step-2 lacks 9 of 30 tensors, layers.2.attention.wq.weight first: is llama3 long the ",
        ),
        (
            [*RUN, "--quantize.linear.titan_fp8.filter_fqns", "none"],
            "filter_fqns = ['none']: no module's name contains 'none'",
        ),
        (
            [*RUN, "--quantize.linear.titan_fp8.filter_fqns", "layers,output"],
            "llama3 export has no weight to export in FP8: the sizes of all are no multiples",
        ),
    ],
)
def test_errors_name_the_thing_and_what_is_allowed(capsys, monkeypatch, mistaken, args, message):
    monkeypatch.chdir(mistaken)
    monkeypatch.syspath_prepend(mistaken)
    status, shown, errors = run_command(capsys, *args)
    assert status == 2 and not shown and message in errors
    assert not Path("out").exists()


INCOMPLETE = "titan_fp8.export: OUT = {} is incomplete, delete it: "


@pytest.mark.parametrize(
    "model, name, message",
    [
        ("llama3", "layers.1.attention.wo.weight", "layers.1.attention.wo.weight has NaN or inf"),
        ("llama3", "norm.weight", INCOMPLETE + "norm.weight has NaN or infinite elements"),
        ("qwen3_moe", "layers.0.moe.experts.w2", "layers.0.moe.experts.w2 of expert 3 has NaN"),
        ("qwen3_moe", "layers.0.moe.expert_bias", "layers.0.moe.expert_bias is not zero, and Hu"),
    ],
)
def test_values_that_cannot_be_exported(capsys, tmp_path, text, model, name, message):
    config = config_of(model, tmp_path, text)
    checkpoint = write_checkpoint(tmp_path / "step-1", config)
    state = {n: torch.zeros(t.shape) for n, t in Run(config).state.items()}
    dcp.load(state, checkpoint_id=checkpoint)
    state[name].view(-1)[-1] = torch.nan
    dcp.save(state, checkpoint_id=tmp_path / "step-2")
    out, flags = tmp_path / "out", ("--config", tmp_path / "job.toml")
    status, _, errors = run_command(capsys, tmp_path / "step-2", out, *flags)
    assert status == 2 and message.format(out) in errors
    assert out.exists() == ("incomplete" in errors) and not (out / exporter.CONFIG).exists()


def test_too_little_space(monkeypatch, tmp_path, text):
    config = config_of("llama3", tmp_path, text)
    checkpoint = write_checkpoint(tmp_path / "step-1", config)
    usage = shutil.disk_usage(tmp_path)._replace(free=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(OSError, match=r"needs 3\.7 MB, and .* has 1\.0 MB left"):
        export(checkpoint, tmp_path / "out", config)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up(capsys, monkeypatch, tmp_path, text):
    def save_file(*_, metadata):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    checkpoint = write_checkpoint(tmp_path / "step-1", config_of("llama3", tmp_path, text))
    monkeypatch.setattr(exporter, "save_file", save_file)
    out, flags = tmp_path / "out", ("--config", tmp_path / "job.toml")
    status, _, errors = run_command(capsys, checkpoint, out, *flags)
    assert status == 2 and INCOMPLETE.format(out) in errors and "No space left" in errors
    assert out.exists() and not (out / exporter.CONFIG).exists()


def test_a_checkpoint_with_gaps(tmp_path, text):
    folder = write_checkpoint(tmp_path / "step-1", config_of("llama3", tmp_path, text))
    saved = Checkpoint(folder)
    saved.tensors["norm.weight"].chunks.clear()
    with pytest.raises(ValueError, match="step-1: norm.weight has 0 of 256 elements"):
        saved.read("norm.weight")


@pytest.mark.parametrize("size", [None, 100])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_checkpoint_with_a_missing_or_damaged_file(capsys, tmp_path, text, name, size):
    folder = write_checkpoint(tmp_path / "step-1", config_of("llama3", tmp_path, text))
    file = folder / name
    file.unlink() if size is None else os.truncate(file, size)
    out, flags = tmp_path / "out", ("--config", tmp_path / "job.toml")
    status, _, errors = run_command(capsys, folder, out, *flags)
    message = "has no .metadata" if (name, size) == (".metadata", None) else "is missing or damaged"
    assert status == 2 and f"CHECKPOINT = {folder}" in errors and message in errors
    assert out.exists() == (INCOMPLETE.format(out) in errors) == (name != ".metadata")
    assert not (out / exporter.CONFIG).exists()


@pytest.mark.parametrize(
    "model, flags, message",
    [
        ("llama3", ["--quantize.linear.titan_fp8.recipe", "rowwise"], 'has recipe "rowwise"'),
        (
            "llama3",
            ["--model.hf_assets_path", "none"],
            "model.hf_assets_path = 'none' has no token",
        ),
        ("deepseek_v3", ["--model.flavor", "tiny"], "router's scores are softmax"),
    ],
)
def test_warnings(tmp_path, text, model, flags, message):
    config = config_of(model, tmp_path, text, *flags)
    lines: list[str] = []
    export(
        write_checkpoint(tmp_path / "step-1", config), tmp_path / "out", config, log=lines.append
    )
    warnings = [line for line in lines if line.startswith("warning: ")]
    (warning,) = (line for line in warnings if "vLLM and SGLang refuse" not in line)
    assert message in warning


@pytest.mark.parametrize(
    "model, changes, moe_changes, message",
    [
        ("qwen3", {"qk_norm": False}, {}, "qwen3 export has qk_norm = False"),
        ("qwen3_moe", {}, {"score_func": "sigmoid"}, "moe_args.score_func = 'sigmoid'"),
        ("qwen3_moe", {}, {"route_scale": 2.0}, "moe_args.route_scale = 2.0"),
        ("deepseek_v3", {}, {"score_before_experts": True}, "score_before_experts = True"),
        ("deepseek_v3", {}, {"gate_bias": True}, "layers.1.moe.router.gate.bias: torchtitan's ad"),
    ],
)
def test_models_that_hugging_face_lacks(
    monkeypatch, tmp_path, text, model, changes, moe_changes, message
):
    flavors = {"qwen3": exports.qwen3_args, "deepseek_v3": exports.deepseekv3_args}
    name, flavor = exports.MODELS[model]
    args = flavors[name][flavor]
    moe_args = dataclasses.replace(args.moe_args, **moe_changes)
    changed = dataclasses.replace(args, moe_args=moe_args, **changes)
    monkeypatch.setitem(flavors[name], flavor, changed)
    config = config_of(model, tmp_path, text)
    checkpoint = write_checkpoint(tmp_path / "step-1", config)
    with pytest.raises(ValueError, match=message):
        export(checkpoint, tmp_path / "out", config)
    assert not (tmp_path / "out").exists()


def test_flags_replace_what_the_toml_says(capsys, tmp_path, text):
    config = config_of("qwen3", tmp_path, text)
    checkpoint, out = write_checkpoint(tmp_path / "step-1", config), tmp_path / "out"
    (tmp_path / "other.toml").write_text(toml("llama3"))
    flags = ("--model.name", "qwen3", "--model.hf_assets_path", text)
    args = (checkpoint, out, "--config", tmp_path / "other.toml", *flags)
    assert run_command(capsys, *args)[0] == 0
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3"
