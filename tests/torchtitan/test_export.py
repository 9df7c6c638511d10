"""Exports hold the reference's FP8 weights, and other software reads them to the same values.

What reads them: the safetensors package, PyTorch's reader of quantized checkpoints, the FP8
dequantization of transformers, and torchtitan, whose next run starts from them.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import exports
import gloo
import pytest
import torch
import torch.distributed.checkpoint as dcp
from exports import MODELS, SHARD_BYTES, config_of, dequantized, expected_tensors, fp8_weights
from titan import one_process, trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.train import Trainer

from titan_fp8.export.exporter import export
from titan_fp8.export.run import Run
from titan_fp8.reference import dequantize_1x128, quantize_1x128

safe_open = pytest.importorskip("safetensors", reason="safetensors is missing").safe_open
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers", reason="transformers is missing")
pytest.importorskip("accelerate", reason="accelerate is missing: transformers reads no FP8")
from torch.distributed.checkpoint.quantized_hf_storage import (  # imports safetensors
    QuantizedHuggingFaceStorageReader,
)

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")
INDEX, W = "model.safetensors.index.json", "model.layers.0.self_attn.q_proj.weight"
LOAD_EXPORT = ("--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_in_hf_quantized")


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.float(), b.float())


def read_files(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the files in the index, each from the file that the index names."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118  (no mapping)
                assert index[name] == path.name
                tensors[name] = file.get_tensor(name)
    assert tensors.keys() == index.keys()
    return tensors


def check_export(out: Path, expected: dict[str, Tensor]) -> None:
    found = read_files(out)
    assert found.keys() == expected.keys()
    assert all(same(found[name], tensor) for name, tensor in expected.items())


def check_pytorch_reads(out: Path, values: dict[str, Tensor]) -> None:
    target = {name: torch.full_like(tensor, torch.nan) for name, tensor in values.items()}
    dcp.load(target, storage_reader=QuantizedHuggingFaceStorageReader(str(out)))
    assert all(same(target[name], tensor) for name, tensor in values.items())


def quantization_of(out: Path) -> dict:
    return json.loads((out / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("model", MODELS)
def test_every_reader_finds_the_reference(model, tmp_path, text):
    run, checkpoint, out = exports.exported(tmp_path, model, text)
    assert run.quantized == fp8_weights(run) and len(list(out.glob("*.safetensors"))) > 2
    expected = expected_tensors(run, checkpoint, fp8_weights(run))

    check_export(out, expected)

    values = dequantized(expected)
    check_pytorch_reads(out, values)

    theirs, problems = load_in_transformers(out)
    assert not any(problems.values())
    assert type(theirs).__name__ == theirs.config.architectures[0]
    state = theirs.state_dict()
    for name, tensor in fuse_experts(values).items():
        assert same(state.pop(name).float(), tensor), name
    assert set(state) <= {"lm_head.weight"}  # a tied one
    config = quantization_of(out)
    gates = [f"model.layers.{i}.mlp.gate" for i in range(2) if f"layers.{i}.moe" in str(run.state)]
    assert set(config.pop("modules_to_not_convert")) == {"lm_head", *gates}
    assert config == {
        **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
        "weight_block_size": [128, 128],
    }


def test_short_last_blocks(tmp_path, text):
    """320 = 2.5 x 128 rows and columns, which transformers 5 cannot dequantize."""
    run, checkpoint, out = exports.exported(
        tmp_path, "llama3", text, "--model.flavor", "export_ragged"
    )
    expected = expected_tensors(run, checkpoint, fp8_weights(run))
    assert expected["model.layers.0.self_attn.o_proj.weight_scale_inv"].shape == (3, 3)
    check_pytorch_reads(out, dequantized(expected))


def load_in_transformers(folder: Path):
    """Hugging Face's model in FP32, with dequantized weights, and a report of what was wrong."""
    config = transformers.FineGrainedFP8Config(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=config,
        experts_implementation="eager",
        output_loading_info=True,
    )


def fuse_experts(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts' weights stacked, as transformers 5 has them."""
    result, experts = {}, {}
    for name, tensor in values.items():
        layer, is_expert, rest = name.partition(".experts.")
        if is_expert:
            projection = rest.split(".")[1]
            experts.setdefault((layer, projection), []).append(tensor)
        else:
            result[name] = tensor
    for layer in {layer for layer, _ in experts}:
        gate, up, down = (
            torch.stack(experts[layer, f"{name}_proj"]) for name in ("gate", "up", "down")
        )
        result[f"{layer}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        result[f"{layer}.experts.down_proj"] = down
    return result


@contextlib.contextmanager
def quantized_inputs(left: set[Tensor]) -> Iterator[None]:
    """Inside, F.linear reads its input through 1x128 blocks in FP8, unless the weight is `left`."""
    linear = torch.nn.functional.linear
    storages = {weight.untyped_storage().data_ptr() for weight in left}

    @functools.wraps(linear)
    def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.untyped_storage().data_ptr() not in storages:
            x = dequantize_1x128(*quantize_1x128(x.flatten(0, -2))).view(x.shape)
        return linear(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", fp8_linear)
        yield


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("model", MODELS)
def test_logits_of_transformers_are_those_of_torchtitan(model, tmp_path, text):
    # FP32, so that nothing differs but the order of sums.
    config = config_of(model, tmp_path, text, "--training.mixed_precision_param", "float32")
    with one_process(), trainer(config) as t, torch.no_grad():
        ours = t.model_parts[0]
        for name, buffer in ours.named_buffers():
            if name.endswith("expert_bias") and model == "deepseek_v3":
                buffer.copy_(torch.linspace(-0.1, 0.1, len(buffer)))
        t.checkpointer.save(curr_step=1, last_step=True)
        tokens = torch.randint(2048, (2, 96), generator=torch.Generator().manual_seed(0))
        logits = ours(tokens)
    export(tmp_path / "checkpoint/step-1", tmp_path / "out", config, log=lambda line: None)

    theirs, _ = load_in_transformers(tmp_path / "out")
    for name, module in theirs.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = Run(config).args.norm_eps  # always 1e-6 in transformers
    gates = {m.weight for name, m in theirs.named_modules() if name.endswith("mlp.gate")}
    with torch.no_grad():
        high_precision = relative_error(theirs(tokens).logits, logits)
        with quantized_inputs({theirs.lm_head.weight, *gates}):
            fp8 = relative_error(theirs(tokens).logits, logits)
    # Measured: below 1e-5, and 3e-4 to 1e-2. Another order of sums may move a few inputs across a
    # rounding boundary of e4m3.
    assert fp8 < 1e-3 and fp8 < 0.1 * high_precision


def dense(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def check_loaded(t, run: Run, expected: dict[str, Tensor]) -> None:
    """The model of trainer t has the `expected` values, as Hugging Face names them."""
    t.checkpointer.load()
    state = {name: dense(tensor).detach() for name, tensor in t.model_parts[0].state_dict().items()}
    assert state.keys() == run.state.keys()
    for source, value in state.items():
        for name, tensor in run.to_hf(source, value).items():
            assert same(tensor, expected[name]), name


@pytest.mark.parametrize("model", MODELS)
def test_a_run_starts_from_an_export(model, tmp_path, text):
    run, checkpoint, out = exports.exported(tmp_path, model, text)
    expected = dequantized(expected_tensors(run, checkpoint, fp8_weights(run)))
    start = ("--checkpoint.initial_load_path", out)
    config = config_of(model, tmp_path / "next", text, *start, *LOAD_EXPORT)
    with one_process(), trainer(config) as t:
        check_loaded(t, run, expected)


@pytest.mark.parametrize("model", ["llama3", "deepseek_v3"])
def test_a_run_does_not_start_without_the_scales(model, tmp_path, text):
    exports.exported(tmp_path, model, text)
    message = "has FP8 weights, and checkpoint.initial_load_in_hf_quantized = false"
    check_refused(model, tmp_path, text, LOAD_EXPORT[:1], message)


def check_refused(
    model: str, folder: Path, text: Path, flags: tuple[str, ...], message: str
) -> None:
    """A run does not start from folder / "out": ValueError before anything is loaded."""
    t = ready_trainer(model, text, flags)
    t.checkpointer.initial_load_path = str(folder / "out")
    before = {name: p.clone() for name, p in t.model_parts[0].named_parameters()}
    with one_process(), pytest.raises(ValueError, match=message):
        t.checkpointer.load()
    after = dict(t.model_parts[0].named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())


@functools.cache
def ready_trainer(model: str, text: Path, flags: tuple[str, ...]) -> Trainer:
    """A trainer that has not loaded anything, for all tests of a process."""
    (folder := text / f"start-{model}-{len(flags)}").mkdir()
    with one_process():
        return Trainer(config_of(model, folder, text, *flags))


SCALE = W + "_scale_inv"


def scales(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({SCALE: change(tensors[SCALE]).contiguous()})


def per_tensor(tensors: dict[str, Tensor]) -> None:
    tensors[W + "_scale"] = tensors.pop(SCALE).amax()


ALLOWED = f".*allowed are matrices {W} in F8_E4M3 with {SCALE} in {INDEX}, a scale for each 128x128"


@pytest.mark.parametrize(
    "change, message",
    [
        (per_tensor, rf"{W} is F8_E4M3 of shape \(256, 256\):{ALLOWED}"),
        (lambda tensors: tensors.pop(SCALE), f"{W} is F8_E4M3.*{ALLOWED}"),
        (
            lambda t: t.update({W + "_scale_2": t[SCALE].clone()}),
            rf"{W}_scale_2 is F32 of shape \(2, 2\):{ALLOWED}",
        ),
        (scales(Tensor.amax), ALLOWED),
        (scales(lambda s: s.new_ones(256, 1)), ALLOWED),
        (scales(lambda s: s.repeat(2, 2)), ALLOWED),
        (scales(lambda s: s.to(torch.float8_e8m0fnu)), ALLOWED),
        (scales(lambda s: s.int()), ALLOWED),
        (lambda t: t.update({W: t[W].float().to(torch.float8_e5m2)}), f"{W} is F8_E5M2.*{ALLOWED}"),
        (lambda t: t.update({W: t[W].to(torch.bfloat16)}), f"{SCALE} is F32.*{ALLOWED}"),
        (lambda t: t.update({"x.weight_scale_inv": torch.ones(1, 1)}), "x.weight_scale_inv is F32"),
        (lambda t: t.update({"x": t[W].clone()}), "x is F8_E4M3 .* matrices x.weight in F8_E4M3"),
        (
            lambda t: t.update({"x.weight": t[W].view(1, 256, 256).clone()}),
            r"x.weight is F8_E4M3 of shape \(1, 256, 256\)",
        ),
    ],
)
def test_a_run_does_not_start_with_other_scales(change, message, tmp_path, text):
    _, _, out = exports.exported(tmp_path, "llama3", text)
    index = json.loads((out / INDEX).read_text())
    file = out / index["weight_map"][W]
    tensors = load_file(file)
    scale_file = out / index["weight_map"][SCALE]
    tensors[SCALE] = load_file(scale_file)[SCALE]
    assert scale_file == file
    change(tensors)
    save_file(tensors, file)
    where = {n: f for n, f in index["weight_map"].items() if f != file.name}
    (out / INDEX).write_text(json.dumps({"weight_map": where | dict.fromkeys(tensors, file.name)}))
    check_refused("llama3", tmp_path, text, LOAD_EXPORT, f"{out}: .*{message}")


def converted(convert: Callable[[Tensor], Tensor]) -> Callable[[dict], dict[str, Tensor]]:
    is_fp8 = torch.float8_e4m3fn
    return lambda ts: {n: convert(t) if t.dtype == is_fp8 else t for n, t in ts.items()}


@pytest.mark.parametrize("flags", [LOAD_EXPORT, LOAD_EXPORT[:1]])
@pytest.mark.parametrize(
    "change, message",
    [
        (converted(lambda t: t.view(torch.uint8)), "weight is U8 of shape"),
        (converted(lambda t: t.float().round().char()), "weight is I8 of shape"),
        (converted(Tensor.short), "weight is I16 of shape"),
        (converted(Tensor.bfloat16), "weight_scale_inv is F32 of shape"),
    ],
)
def test_a_run_does_not_start_from_other_formats(change, message, flags, tmp_path, text):
    """No header has FP8."""
    _, _, out = exports.exported(tmp_path, "llama3", text)
    for file in out.glob("*.safetensors"):
        save_file(change(load_file(file)), file)
    check_refused("llama3", tmp_path, text, flags, f"{out}: .*{message}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_half_the_size(dtype, tmp_path, text):
    """Qwen's checkpoints have them in bf16."""
    run, checkpoint, out = exports.exported(tmp_path, "llama3", text)
    expected = expected_tensors(run, checkpoint, fp8_weights(run))
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        half = {n: t.to(dtype) if n.endswith("_scale_inv") else t for n, t in tensors.items()}
        expected |= {n: t.float() for n, t in half.items() if n.endswith("_scale_inv")}
        save_file(half, file)
    start = ("--checkpoint.initial_load_path", out)
    config = config_of("llama3", tmp_path / "next", text, *start, *LOAD_EXPORT)
    with one_process(), trainer(config) as t:
        check_loaded(t, run, dequantized(expected))


def test_scales_that_the_index_lacks_and_damaged_files(tmp_path, text):
    _, _, out = exports.exported(tmp_path, "llama3", text)
    index = json.loads((out / INDEX).read_text())
    file = index["weight_map"].pop(SCALE)
    (out / INDEX).write_text(json.dumps(index))
    check_refused("llama3", tmp_path, text, LOAD_EXPORT, f" with {SCALE} in {INDEX}")
    (out / INDEX).unlink()
    check_refused("llama3", tmp_path, text, LOAD_EXPORT, f"weight_scale_inv in {INDEX}")
    (out / file).write_bytes(b"x")
    check_refused("llama3", tmp_path, text, LOAD_EXPORT, f"{file}: ")


def save_export_and_load(rank: int, folder: Path, text: Path) -> None:
    """On one of two ranks."""
    degrees = ["--parallelism.data_parallel_shard_degree", 2]
    save_export_and_load_model(rank, "llama3", folder / "llama3", text, degrees)
    degrees += ["--parallelism.expert_parallel_degree", 2]
    save_export_and_load_model(rank, "deepseek_v3", folder / "deepseek_v3", text, degrees)


def save_export_and_load_model(
    rank: int, model: str, folder: Path, text: Path, flags: list[object]
) -> None:
    folder.mkdir(exist_ok=True)
    config = config_of(model, folder / str(rank), text, *flags, "--job.dump_folder", folder)
    with trainer(config) as t:
        t.checkpointer.save(curr_step=1, last_step=True)
    checkpoint, out = folder / "checkpoint/step-1", folder / "out"
    if rank == 0:
        export(checkpoint, out, config, shard_bytes=SHARD_BYTES, log=lambda line: None)
    torch.distributed.barrier()
    run = Run(config)
    expected = expected_tensors(run, checkpoint, fp8_weights(run))
    check_export(out, expected)

    start = ("--checkpoint.initial_load_path", out, *LOAD_EXPORT)
    flags = [*flags, *start, "--job.dump_folder", folder / "next"]
    with trainer(config_of(model, folder / str(rank), text, *flags)) as t:
        check_loaded(t, run, dequantized(expected))


def test_parallel_runs_save_and_load(tmp_path, text):
    gloo.spawn(save_export_and_load, 2, tmp_path, text)


def test_modules_that_the_run_leaves_out_stay_in_high_precision(tmp_path, text):
    flags = ("--quantize.linear.titan_fp8.filter_fqns", "output,router.gate,wkv_b,0.feed_forward")
    run, checkpoint, out = exports.exported(tmp_path, "deepseek_v3", text, *flags)
    left = {"wkv_b", "layers.0.feed_forward"}
    quantized = {n for n in fp8_weights(run) if not any(pattern in n for pattern in left)}
    expected = expected_tensors(run, checkpoint, quantized)
    check_export(out, expected)
    mlp = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    kv = [f"model.layers.{i}.self_attn.kv_b_proj" for i in range(2)]
    expected_list = {"lm_head", "model.layers.1.mlp.gate", *mlp, *kv}
    assert set(quantization_of(out)["modules_to_not_convert"]) == expected_list
    _, problems = load_in_transformers(out)
    assert not any(problems.values())


def test_experts_that_the_run_leaves_out(tmp_path, text):
    flags = ("--quantize.grouped_mm.titan_fp8.fqns", "layers.1.moe.experts")
    run, checkpoint, out = exports.exported(tmp_path, "qwen3_moe", text, *flags)
    quantized = {name for name in fp8_weights(run) if "layers.0.moe" not in name}
    expected = expected_tensors(run, checkpoint, quantized)
    check_export(out, expected)
    assert "model.layers.0.mlp.experts" in quantization_of(out)["modules_to_not_convert"]


def test_scales_of_blockwise_pow2_are_powers_of_two(tmp_path, text):
    flags = ("--quantize.linear.titan_fp8.recipe", "blockwise_pow2")
    run, checkpoint, out = exports.exported(tmp_path, "llama3", text, *flags)
    assert run.scale_fmt == "ue8m0"
    expected = expected_tensors(run, checkpoint, fp8_weights(run))
    found = read_files(out)
    assert all(same(found[name], tensor) for name, tensor in expected.items())
    scales = [tensor for name, tensor in expected.items() if name.endswith("_scale_inv")]
    assert scales and all((scale.log2() % 1 == 0).all() for scale in scales)
    assert quantization_of(out)["scale_fmt"] == "ue8m0"
