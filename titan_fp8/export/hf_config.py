"""config.json: what Hugging Face's model needs to compute what torchtitan's computes.

The fields are those of LlamaConfig, Qwen3Config, Qwen3MoeConfig and DeepseekV3Config, with
`rope_theta` and `rope_scaling` apart, as in DeepSeek-V3's own file; transformers 5 reads that, too.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from titan_fp8.export.loaders import MERGED, in_fp8, layers_of
from titan_fp8.export.run import Run
from titan_fp8.export.tensors import HFTensor
from titan_fp8.layouts import BLOCK


def content(run: Run, tensors: Sequence[HFTensor]) -> dict[str, Any]:
    """The content of config.json.

    Raises:
        ValueError: Hugging Face's model has no setting for something that this model computes.
    """
    args = run.args
    fields = {"llama3": _llama, "qwen3": _qwen3, "deepseek_v3": _deepseek_v3}[run.name](run)
    return fields | {
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": float(args.rope_theta),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": run.tied,
        "bos_token_id": run.bos_id,
        "eos_token_id": run.eos_id,
        "torch_dtype": str(run.dtype).removeprefix("torch."),
        "quantization_config": _quantization(run, tensors),
    }


def warnings_of(run: Run) -> list[str]:
    """What other software may not compute as the run did."""
    found = []
    if run.name == "deepseek_v3" and run.args.moe_args.score_func != "sigmoid":
        found.append(
            f"the router's scores are {run.args.moe_args.score_func} (scoring_func in config.json);"
            " DeepseekV3ForCausalLM of transformers ignores that and computes sigmoid scores. "
            "Load the export with software that reads scoring_func, as vLLM does"
        )
    return found


def _quantization(run: Run, tensors: Sequence[HFTensor]) -> dict[str, Any]:
    left = ["lm_head"] if run.tied else []
    for tensor in tensors:
        if tensor.source in run.linears and not tensor.quantized:
            module, of_expert, _ = tensor.name.removesuffix(".weight").partition(".experts.")
            left.append(f"{module}.experts" if of_expert else module)
    config: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": list(dict.fromkeys(left)),
    }
    # SGLang knows which parts a layer has left out only from here.
    layers = layers_of(run, tensors).items()
    names = {name.rpartition(".")[2] for name, layer in layers if not in_fp8(layer)}
    if merged := {name: list(parts) for name, parts in MERGED.items() if name in names}:
        config["packed_modules_mapping"] = merged
    if run.scale_fmt == "ue8m0":
        config["scale_fmt"] = "ue8m0"
    return config


def _require(run: Run, settings: Mapping[str, object]) -> None:
    for key, allowed in settings.items():
        if (value := operator.attrgetter(key)(run.args)) != allowed:
            raise ValueError(
                f"{run.description} has {key} = {value!r}, and Hugging Face's model supports only "
                f"{allowed!r}: it cannot be exported"
            )


def _llama(run: Run) -> dict[str, Any]:
    args, rope = run.args, run.args.rope_scaling_args
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": run.state["layers.0.feed_forward.w1.weight"].shape[0],
        "max_position_embeddings": max(run.flavor_seq_len, args.max_seq_len),
        "num_key_value_heads": args.n_kv_heads or args.n_heads,
        "head_dim": args.dim // args.n_heads,
        "mlp_bias": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": float(rope.scaling_factor),
            "low_freq_factor": float(rope.low_freq_factor),
            "high_freq_factor": float(rope.high_freq_factor),
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        },
    }


def _qwen3(run: Run) -> dict[str, Any]:
    args = run.args
    _require(run, {"qk_norm": True})
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": args.hidden_dim,
        "max_position_embeddings": max(run.flavor_seq_len, args.max_seq_len),
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "rope_scaling": None,
    }
    if not args.moe_enabled:
        return fields
    moe = args.moe_args
    only = {"score_before_experts": False, "score_func": "softmax", "route_scale": 1.0}
    only |= {"num_shared_experts": 0, "num_expert_groups": None}
    _require(run, {f"moe_args.{key}": value for key, value in only.items()})
    return fields | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": args.moe_inter_dim,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.route_norm,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _deepseek_v3(run: Run) -> dict[str, Any]:
    args, moe = run.args, run.args.moe_args
    _require(run, {"moe_args.score_before_experts": False})
    # torchtitan applies YaRN only to runs with longer sequences than this.
    yarn = None
    if args.max_seq_len > args.original_seq_len:
        yarn = {
            "type": "yarn",
            "factor": float(args.rope_factor),
            "beta_fast": float(args.beta_fast),
            "beta_slow": float(args.beta_slow),
            "mscale": args.mscale,
            "mscale_all_dim": args.mscale,
            "original_max_position_embeddings": args.original_seq_len,
        }
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "intermediate_size": args.inter_dim,
        "max_position_embeddings": args.max_seq_len,
        "moe_intermediate_size": args.moe_inter_dim,
        "num_key_value_heads": args.n_heads,
        "q_lora_rank": args.q_lora_rank or None,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_nope_head_dim,
        "qk_rope_head_dim": args.qk_rope_head_dim,
        "v_head_dim": args.v_head_dim,
        "first_k_dense_replace": args.n_dense_layers,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.num_shared_experts,
        "num_experts_per_tok": moe.top_k,
        "n_group": moe.num_expert_groups or 1,
        "topk_group": moe.num_limited_groups or 1,
        "topk_method": "noaux_tc",
        "scoring_func": moe.score_func,
        "norm_topk_prob": moe.route_norm,
        "routed_scaling_factor": moe.route_scale,
        "rope_scaling": yarn,
    }
