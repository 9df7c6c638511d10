"""torchtitan's attention modules, changed to quantize the input of wq, wk and wv only once.

The gain is memory in eager mode, where each of the three would save its own FP8 copy for backward.
torch.compile merges the equal quantizations by itself.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.deepseek_v3.model import model as deepseek_v3
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.qwen3.model import model as qwen3

from titan_fp8.linear import FP8Linear, shared_input


class SharedInputAttention(nn.Module):
    """The mixin that `share_attention_inputs` puts before a class of torchtitan."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As torchtitan's."""
        if torch.compiler.is_compiling():
            return super().forward(x, *args, **kwargs)
        with shared_input(x):
            return super().forward(x, *args, **kwargs)


class Llama3Attention(SharedInputAttention, llama3.Attention):
    """Llama3's."""


class Llama4Attention(SharedInputAttention, llama4.Attention):
    """Llama4's."""


class Qwen3Attention(SharedInputAttention, qwen3.Attention):
    """Qwen3's."""


class DeepSeekV3Attention(SharedInputAttention, deepseek_v3.Attention):
    """DeepSeek-V3's: its input is shared by wq, or wq_a, and wkv_a."""


_SHARING: dict[type[nn.Module], type[nn.Module]] = {
    sharing.__bases__[1]: sharing
    for sharing in (Llama3Attention, Llama4Attention, Qwen3Attention, DeepSeekV3Attention)
}


def share_attention_inputs(model: nn.Module) -> int:
    """Convert torchtitan's attention modules with FP8Linears, in place; returns how many."""
    modules = [
        module
        for module in model.modules()
        if type(module) in _SHARING and any(type(m) is FP8Linear for m in module.children())
    ]
    for module in modules:
        module.__class__ = _SHARING[type(module)]
    return len(modules)
