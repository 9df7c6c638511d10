"""torchtitan's transformer blocks with experts, compiled as one region up to the experts.

torchtitan compiles these blocks in parts, attention, each norm, the router and so on. Calling one
takes the CPU about 0.2 ms, in forward, in the recomputation and in backward. Where the GPU is fast,
the CPU limits the speed.

Here one compiled region goes from the block's input to the rows that the experts get. FSDP2's hooks
on the experts, the exchange of tokens, and the shared experts, which run during it, stay outside.

Under op-level checkpointing, the checkpoint's dispatch mode sees each op that the block calls. Of
those that the region's code calls it saves only attention, and not FlexAttention, which is
compiled. So a region with FlexAttention runs without the mode, in forward and when recomputed. Of
what follows the region it saves the all-to-alls, for which the mode comes back
(`host/all_to_all.py`). It would also save every second matmul of experts that run in a loop
(`use_grouped_mm = false`); here these are computed again.

A hook on the MoE layer or on the compiled wrapper of a part would be skipped. A block with such a
hook runs as torchtitan has compiled it; under tensor parallelism these are all.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torchtitan.models.attention import FlexAttentionWrapper
from torchtitan.models.deepseek_v3.model import model as deepseek_v3
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.qwen3.model import model as qwen3

from titan_fp8.compile.activation_checkpointing import outside_checkpoint
from titan_fp8.host.torchtitan_0_2.moe import GatherMoE, Routed
from titan_fp8.modules.feed_forward import has_hooks


def before_experts(
    attention_norm: nn.Module,
    attention: nn.Module,
    ffn_norm: nn.Module,
    router: nn.Module,
    reorderer: nn.Module,
    moe: GatherMoE,
    x: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Routed]:
    """The block's residual stream after attention (batch, seq, dim), and its tokens, routed."""
    # The view makes autograd add the norm's two gradients of x before that of the residual sum, as
    # between compiled parts. So all gradients are bit for bit those of torchtitan's block.
    x = x + attention(attention_norm(x.view_as(x)), *args, **kwargs)
    return x, moe.route(ffn_norm(x.flatten(0, -2)), router, reorderer)


@functools.cache
def compiled_before_experts(backend: str) -> Callable[..., tuple[Tensor, Routed]]:
    return torch.compile(before_experts, backend=backend, fullgraph=True)


class MoEBlock(nn.Module):
    """The mixin that `compile_up_to_experts` puts before a class of torchtitan."""

    compile_backend: str
    attention_norm: nn.Module
    attention: nn.Module
    ffn_norm: nn.Module
    moe: GatherMoE

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As torchtitan's; x (batch, seq, dim)."""
        moe = self.moe
        parts = self.attention_norm, self.attention, self.ffn_norm, moe.router, moe.reorderer
        compiled = all(isinstance(part, OptimizedModule) for part in parts)
        if not compiled or any(map(has_hooks, (*parts, moe))):
            return super().forward(x, *args, **kwargs)
        region = compiled_before_experts(self.compile_backend)
        modules = [part._orig_mod for part in parts]
        is_flex = isinstance(self.attention.inner_attention, FlexAttentionWrapper)
        saves_nothing = is_flex and self.compile_backend == "inductor"
        with outside_checkpoint() if saves_nothing else nullcontext():
            h, routed = region(*modules, moe, x, *args, **kwargs)
        with outside_checkpoint():
            return h + moe.finish(routed).view_as(h)


class DeepSeekV3Block(MoEBlock, deepseek_v3.TransformerBlock):
    """DeepSeek-V3's."""


class Llama4Block(MoEBlock, llama4.TransformerBlock):
    """Llama4's."""


class Qwen3Block(MoEBlock, qwen3.TransformerBlock):
    """Qwen3's."""


_COMPILED = {each.__bases__[1]: each for each in (DeepSeekV3Block, Llama4Block, Qwen3Block)}


def compile_up_to_experts(model: nn.Module, backend: str) -> int:
    """Converts the blocks of `model` with a GatherMoE, in place, and returns how many.

    They run as torchtitan's until torchtitan has compiled their parts.
    """
    blocks: list[Any] = [
        module
        for module in model.modules()
        if type(module) in _COMPILED and isinstance(getattr(module, "moe", None), GatherMoE)
    ]
    for block in blocks:
        block.__class__ = _COMPILED[type(block)]
        block.compile_backend = backend
    return len(blocks)
