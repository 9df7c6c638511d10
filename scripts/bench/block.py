"""A transformer block for benchmarks, converted and compiled as the plugin and torchtitan do it."""

from collections.abc import Callable

import torch
from bench.common import Layer
from torch import Tensor, nn
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import TransformerBlock, precompute_freqs_cis

import titan_fp8
from titan_fp8.compile.graph_passes import SmallerQuantizers
from titan_fp8.compile.recomputation import with_recomputable_quantizers
from titan_fp8.patches import RECOMPUTABLE_QUANTIZERS, SMALLER_QUANTIZERS
from titan_fp8.recipe import BF16
from titan_fp8.torchtitan_0_2.feed_forward import fuse_feed_forwards


def block_layer(args: TransformerModelArgs, tokens: int, kind: str, compiled: bool) -> Layer:
    """A Llama3 block in bf16 or a recipe, without activation checkpointing."""
    with torch.device("cuda"):
        block = TransformerBlock(0, args).bfloat16()
    run = converted(block, kind, compiled)
    head_dim = args.dim // args.n_heads
    freqs = precompute_freqs_cis(head_dim, tokens, args.rope_theta, args.rope_scaling_args).cuda()
    return Layer(lambda x: run(x, freqs, None), tuple(block.parameters()))


def converted(block: nn.Module, kind: str, compiled: bool) -> Callable[..., Tensor]:
    """Converts a block in place, and returns it or its compiled version.

    The patches of the compiler stay until the process ends; they change FP8 layers only.
    """
    if kind != BF16:
        titan_fp8.convert_linears(block, recipe=kind)
        fuse_feed_forwards(block)
        if compiled:
            RECOMPUTABLE_QUANTIZERS.apply(with_recomputable_quantizers)
            SMALLER_QUANTIZERS.apply(SmallerQuantizers.after)
    return torch.compile(block, fullgraph=True) if compiled else block
