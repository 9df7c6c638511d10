"""The models of the paired runs: small copies of the production models, as flavors of torchtitan.

`register` adds them to torchtitan's own. "paired" has about 110 million active parameters, and
"paired_tiny" is for CPUs. All dimensions that FP8 divides into blocks are multiples of
128 in "paired", except DeepSeek-V3's own 576 of wkv_a. The vocabulary is small, so that the output
layer, which stays in bf16, does not dominate.
"""

import dataclasses
from typing import Any

from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

VOCABULARY = 8192
ROUTING = {"score_func": "softmax", "score_before_experts": False}

FLAVORS: dict[str, dict[str, Any]] = {
    "llama3": {
        "paired": TransformerModelArgs(
            dim=1024,
            n_layers=8,
            n_heads=8,
            n_kv_heads=4,
            rope_theta=500000,
            vocab_size=VOCABULARY,
        ),
        "paired_tiny": TransformerModelArgs(dim=128, n_layers=2, n_heads=2, vocab_size=512),
    },
    "deepseek_v3": {
        "paired": DeepSeekV3ModelArgs(
            vocab_size=VOCABULARY,
            dim=1024,
            inter_dim=2816,
            moe_inter_dim=512,
            n_layers=8,
            n_dense_layers=1,
            n_heads=8,
            moe_args=MoEArgs(num_experts=32, num_shared_experts=1, top_k=4, **ROUTING),
            kv_lora_rank=512,
            qk_nope_head_dim=64,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
    },
    "qwen3": {
        "paired": Qwen3ModelArgs(
            vocab_size=VOCABULARY,
            dim=1024,
            n_layers=10,
            n_heads=8,
            n_kv_heads=4,
            head_dim=128,
            hidden_dim=2816,
            moe_enabled=True,
            moe_inter_dim=512,
            moe_args=MoEArgs(
                num_experts=32, num_shared_experts=0, top_k=4, route_norm=True, **ROUTING
            ),
        ),
    },
}


def register(name: str, **builders: Any) -> None:
    """Registers torchtitan's model `name` anew, with FLAVORS and with other `build_*_fn`."""
    spec = get_train_spec(name)
    model_args = {**spec.model_args, **FLAVORS.get(name, {})}
    register_train_spec(name, dataclasses.replace(spec, model_args=model_args, **builders))
