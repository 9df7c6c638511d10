"""The export warns of what vLLM, SGLang and transformers refuse or misread, and avoids it.

The rules of vLLM and SGLang are stated again here, for the files that an export wrote: those of
`is_layer_skipped`, `validate_fp8_block_shape` and `per_token_group_quant_fp8`.
"""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import exports
import pytest
import torch
from exports import config_of, write_checkpoint
from safetensors import safe_open
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.qwen3 import qwen3_args

from titan_fp8.export import __main__ as command
from titan_fp8.export import loaders
from titan_fp8.export.exporter import export
from titan_fp8.export.run import Run
from titan_fp8.export.tensors import plan_tensors

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")

FILTER = "--quantize.linear.titan_fp8.filter_fqns"


def read_headers(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of each tensor."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                part = file.get_slice(name)
                found[name] = part.get_dtype(), part.get_shape()
    return found


def check_engines_accept(folder: Path, tp: int = 1) -> None:
    """ValueError if vLLM or SGLang would raise, or would load FP8 into a layer without scales."""
    config = json.loads((folder / "config.json").read_text())
    left = config["quantization_config"]["modules_to_not_convert"]
    mapping = config["quantization_config"].get("packed_modules_mapping", {})
    headers = read_headers(folder)
    weights = {name[:-7]: header for name, header in headers.items() if name.endswith(".weight")}

    def check(layer: str, parts: list[str], split: str = "", merged: bool = True) -> None:
        parts = [part for part in parts if part in weights]
        if not parts:
            return
        skipped = {
            part in left or part.partition(".experts.")[0] + ".experts" in left for part in parts
        }
        if len(skipped) > 1:
            raise ValueError(f"some but not all shards of {layer} are quantized")
        names = [part.rpartition(".")[2] for part in parts]
        in_mapping = ".experts" in layer or mapping.get(layer.rpartition(".")[2]) == names
        if skipped == {True} and len(parts) > 1 and not in_mapping:
            raise ValueError(f"SGLang does not know the parts of {layer}")
        for i, part in enumerate(parts):
            dtype, (n, k) = weights[part]
            if (dtype == "F8_E4M3") == (skipped == {True}):
                raise ValueError(f"{part} is {dtype}, skipped: {skipped}")
            if dtype != "F8_E4M3":
                continue
            if headers[f"{part}.weight_scale_inv"][1] != [-(-n // 128), -(-k // 128)]:
                raise ValueError(f"scales of {part}")
            rank_k = k / tp if split == "row" else k
            rank_n = n / tp if split == "column" else n
            last = i == len(parts) - 1
            if rank_k % 128 or (
                rank_n % 128 and ((merged and not last) or (split == "column" and tp > 1))
            ):
                raise ValueError(f"{part}: {rank_n} x {rank_k} is not divisible by 128")

    for i in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        if config["model_type"] == "deepseek_v3":
            names = ["q_a_proj", "kv_a_proj_with_mqa"]
            check(f"{attention}.fused_qkv_a_proj_with_mqa", [f"{attention}.{n}" for n in names])
            for name in ("q_proj", "q_b_proj", "kv_b_proj"):
                check(f"{attention}.{name}", [f"{attention}.{name}"], "column")
            dtype, (n, k) = weights[f"{attention}.kv_b_proj"]
            if dtype == "F8_E4M3" and (n % 128 or k % 128):
                raise ValueError("scaled_dequantize of kv_b_proj")
        else:
            names = ["q_proj", "k_proj", "v_proj"]
            check(f"{attention}.qkv_proj", [f"{attention}.{n}" for n in names], "column")
        check(f"{attention}.o_proj", [f"{attention}.o_proj"], "row")
        for parent in (mlp, f"{mlp}.shared_experts"):
            names = [f"{parent}.{n}_proj" for n in ("gate", "up")]
            check(f"{parent}.gate_up_proj", names, "column")
            check(f"{parent}.down_proj", [f"{parent}.down_proj"], "row")
        for expert in range(sum(f"{mlp}.experts." in name for name in weights) // 3):
            names = [f"{mlp}.experts.{expert}.{n}_proj" for n in ("gate", "up")]
            check(f"{mlp}.experts", [*names, names[0]], "column")
            check(f"{mlp}.experts", [f"{mlp}.experts.{expert}.down_proj"], "row")
        if weights.get(f"{mlp}.gate", ("BF16",))[0] == "F8_E4M3":
            raise ValueError("a router's gate has no scales")
    if weights.get("lm_head", ("BF16",))[0] == "F8_E4M3":
        raise ValueError("lm_head has no scales")


deepseekv3_args["short_dense"] = dataclasses.replace(deepseekv3_args["export"], inter_dim=336)
deepseekv3_args["misread_kv_a"] = dataclasses.replace(
    deepseekv3_args["export"], n_heads=4, kv_lora_rank=256, qk_rope_head_dim=32
)
deepseekv3_args["short_kv_b"] = dataclasses.replace(
    deepseekv3_args["export"], n_heads=1, v_head_dim=192, qk_nope_head_dim=128
)
deepseekv3_args["short_experts"] = dataclasses.replace(deepseekv3_args["export"], moe_inter_dim=192)
deepseekv3_args["one_shared"] = dataclasses.replace(
    deepseekv3_args["export"],
    moe_args=dataclasses.replace(
        deepseekv3_args["export"].moe_args, num_experts=256, num_shared_experts=1
    ),
)


def exported(folder: Path, text: Path, model: str, *flags: object, **options) -> list[str]:
    """Exports random values to folder / "out" and returns the warnings."""
    folder.mkdir(exist_ok=True)
    config = config_of(model, folder, text, *flags)
    checkpoint = write_checkpoint(folder / "step-1", config)
    lines: list[str] = []
    export(checkpoint, folder / "out", config, log=lines.append, **options)
    return [line for line in lines if line.startswith("warning: ")]


def flavor(name: str) -> tuple[str, str]:
    return "--model.flavor", name


qwen3_args["sixteen"] = dataclasses.replace(
    qwen3_args["export_moe"],
    **{"head_dim": 128, "n_kv_heads": 2},
    moe_args=dataclasses.replace(qwen3_args["export_moe"].moe_args, num_experts=16),
)
SIXTEEN = flavor("sixteen")
ENGINES = [
    (
        "llama3",
        (FILTER, "output,attention.wk,attention.wv"),
        1,
        ".*.self_attn.qkv_proj (q_proj 256",
    ),
    ("llama3", (FILTER, "output,0.feed_forward.w1"), 1, "layers.0.mlp.gate_up_proj (up_proj"),
    ("llama3", (FILTER, "wo"), 1, "lm_head (lm_head 2048 x 256)"),
    ("llama3", (), 2, ".*.self_attn.qkv_proj (q_proj 256 x 256, k_proj 128 x 256"),
    ("deepseek_v3", (FILTER, "output,router.gate,wkv_a"), 1, "(q_a_proj 128 x 128) in 2"),
    ("deepseek_v3", (FILTER, "output,router.gate,shared_experts.w3"), 1, "shared_experts.gate_up"),
    ("deepseek_v3", flavor("short_dense"), 1, "layers.0.mlp.gate_up_proj (gate_proj 336 x 128"),
    ("deepseek_v3", flavor("short_kv_b"), 1, "(kv_b_proj 320 x 128) in 2 layers"),
    ("qwen3", (FILTER, "output,attention.wk"), 1, ".*.self_attn.qkv_proj (q_proj "),
    ("qwen3_moe", (FILTER, "output", *SIXTEEN), 1, ".*.mlp.gate (gate 16 x 128) in 2 layers"),
]


@pytest.mark.parametrize("model, flags, tp, named", ENGINES)
def test_what_vllm_and_sglang_refuse_is_named_and_avoided(tmp_path, text, model, flags, tp, named):
    warnings = exported(tmp_path / "as_asked", text, model, *flags, tp=tp)
    with pytest.raises(ValueError):
        check_engines_accept(tmp_path / "as_asked/out", tp)
    warnings = [line for line in warnings if "vLLM and SGLang refuse this export" in line]
    assert any(named in line for line in warnings), warnings

    assert not exported(tmp_path / "fused", text, model, *flags, tp=tp, fuse=True)
    check_engines_accept(tmp_path / "fused/out", tp)


@pytest.mark.parametrize("model", ["llama3", "qwen3", "deepseek_v3"])
def test_whole_blocks_are_accepted_without_a_warning(tmp_path, text, model):
    assert not exported(tmp_path, text, model)
    check_engines_accept(tmp_path / "out")


@pytest.mark.parametrize("flags, tp, size", [(flavor("short_experts"), 1, 192), ((), 4, 128)])
def test_experts(tmp_path, text, flags, tp, size):
    """A run has no fqns that leave out all experts. With tp = 4 a rank has 32 rows of each."""
    warning, *_ = exported(tmp_path / "as_asked", text, "deepseek_v3", *flags, tp=tp)
    with pytest.raises(ValueError):
        check_engines_accept(tmp_path / "as_asked/out", tp)
    assert f"layers.1.mlp.experts (gate_proj {size} x 128, " in warning
    assert warning.endswith("Pass --fuse to write them in high precision")
    assert not exported(tmp_path / "fused", text, "deepseek_v3", *flags, tp=tp, fuse=True)
    check_engines_accept(tmp_path / "fused/out", tp)
    assert "model.layers.0.self_attn.q_a_proj.weight_scale_inv" in read_headers(
        tmp_path / "fused/out"
    )


def test_sglang_computes_a_shared_expert_beside_256_as_one_of_them(tmp_path, text):
    flags = (*flavor("one_shared"), FILTER, "output,router.gate,shared_experts")
    (warning,) = exported(tmp_path, text, "deepseek_v3", *flags, shard_bytes=10**9)
    assert "of these merged layers only the parts in brackets" in warning
    assert "model.layers.1.mlp.experts (gate_proj 128 x 128" in warning


def test_transformers_and_a_short_last_block(tmp_path, text):
    """kv_a_proj_with_mqa has 288 rows, which transformers takes for three blocks of 96."""
    model = "misread_kv_a"
    transformers = pytest.importorskip("transformers", reason="transformers is missing")
    pytest.importorskip("accelerate", reason="accelerate is missing: transformers reads no FP8")

    def misread(folder: Path) -> set[str]:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "out",
            dtype=torch.float32,
            quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
        ).state_dict()
        run = Run(config_of("deepseek_v3", folder, text, *flavor(model)))
        fp8 = {name for name, (dtype, _) in read_headers(folder / "out").items() if "F8" in dtype}
        quantized = {
            source for source in run.quantized if fp8 & set(run.to_hf(source, run.state[source]))
        }
        ours = exports.dequantized(exports.expected_tensors(run, folder / "step-1", quantized))
        assert set(theirs) & fp8
        return {n for n in set(theirs) & set(ours) if not torch.equal(theirs[n].float(), ours[n])}

    (warning,) = exported(tmp_path / "as_asked", text, "deepseek_v3", *flavor(model))
    assert "transformers dequantizes to wrong values, without an error" in warning
    assert "kv_a_proj_with_mqa 288 x 128) in 2 layers" in warning
    check_engines_accept(tmp_path / "as_asked/out")
    kv_a = {f"model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight" for i in range(2)}
    assert misread(tmp_path / "as_asked") == kv_a

    assert not exported(tmp_path / "fused", text, "deepseek_v3", *flavor(model), fuse=True)
    check_engines_accept(tmp_path / "fused/out")
    assert not misread(tmp_path / "fused")


def test_the_command_says_what_it_fused(capsys, tmp_path, text):
    write_checkpoint(tmp_path / "step-1", config_of("llama3", tmp_path, text))
    paths = [str(tmp_path / name) for name in ("step-1", "out")]
    flags = ["--config", str(tmp_path / "job.toml"), "--model.hf_assets_path", str(text)]
    flags += [FILTER, "output,wk,wv", "--fuse", "--tp", "1"]
    assert command.main([*paths, *flags]) == 0
    shown = capsys.readouterr().out
    layers = "model.layers.*.self_attn.qkv_proj (q_proj 256 x 256) in 2 layers"
    assert f"in high precision because of --fuse: {layers}\n" in shown and "warning" not in shown
    check_engines_accept(tmp_path / "out")


def test_deepseek_v3_16b(tmp_path, text):
    config = config_of("deepseek_v3", tmp_path, text, *flavor("16B"))
    run = Run(config)
    saved = {name: SimpleNamespace(size=meta.shape) for name, meta in run.state.items()}
    tensors = plan_tensors(run, SimpleNamespace(tensors=saved, folder="step-1"))
    transformers, engines = loaders.warnings_of(run, tensors, tp=1)
    assert "model.layers.0.mlp.gate_up_proj (gate_proj 10944 x 2048, up_proj" in engines
    assert "model.layers.0.mlp.down_proj (down_proj 2048 x 10944)" in engines
    assert "transformers cannot dequantize" in transformers and "576 x 2048" in transformers
    tensors, _ = loaders.fused(run, tensors, tp=1)
    assert not loaders.warnings_of(run, tensors, tp=1)
    left = {t.name for t in tensors if t.source in run.quantized and not t.quantized}
    kv_a = {f"model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight" for i in range(27)}
    assert left == kv_a | {f"model.layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
