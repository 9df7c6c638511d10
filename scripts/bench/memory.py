"""What a Llama3-8B block saves for backward at 8192 tokens, and its peak memory beyond that.

One block of torchtitan in bf16, converted as the plugin converts it, eager and compiled. "MiB kept"
is what forward saves for backward, without weights. "MiB peak" is the most that forward or backward
allocates beyond that; backward's includes the gradients of the weights.
"""

import torch
from bench.block import block_layer
from bench.common import Layer, Result, randn
from torch import Tensor
from torchtitan.models.llama3 import llama3_args

from titan_fp8.recipe import BF16, RECIPES

TITLE = "Memory of a block"
ARGS, TOKENS = llama3_args["8B"], 8192


def peaks(layer: Layer, x: Tensor, g: Tensor) -> tuple[int, int]:
    """Peak bytes of forward and of backward, beyond what is kept between the two."""
    torch.cuda.reset_peak_memory_stats()
    y = layer.forward(x)
    kept, forward = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(y, (x, *layer.weights), g)
    return forward - kept, torch.cuda.max_memory_allocated() - kept


def measure() -> Result:
    x, g = randn(1, TOKENS, ARGS.dim, requires_grad=True), randn(1, TOKENS, ARGS.dim)
    rows = []
    for compiled in (False, True):
        for kind in (BF16, *RECIPES):
            torch._dynamo.reset()
            layer = block_layer(ARGS, TOKENS, kind, compiled)
            layer.step(x, g)  # compiles
            forward, backward = peaks(layer, x, g)
            rows.append(
                {
                    "block": f"{kind}, {'compiled' if compiled else 'eager'}",
                    "MiB kept": layer.kept_bytes(x) / 2**20,
                    "MiB peak forward": forward / 2**20,
                    "MiB peak backward": backward / 2**20,
                }
            )
    return rows, {}
