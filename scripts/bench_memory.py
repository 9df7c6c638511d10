"""What a Llama3-8B block saves for backward, and its peak memory beyond that, on one GPU.

    python scripts/bench_memory.py [--json FILE]

One block of torchtitan at 8192 tokens in bf16, converted as the plugin converts it, eager and
compiled. "MiB kept" is what forward saves for backward, without weights. "MiB peak" is the most
that forward or backward allocates beyond that; backward's includes the gradients of the weights.
"""

import torch
from bench_common import Layer, parser, randn, report
from torch import Tensor
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.llama3.model.model import TransformerBlock, precompute_freqs_cis

import titan_fp8
from titan_fp8.patches import RECOMPUTABLE_QUANTIZERS
from titan_fp8.recipe import BF16, RECIPES
from titan_fp8.recomputation import with_recomputable_quantizers
from titan_fp8.torchtitan_0_2.attention import share_attention_inputs
from titan_fp8.torchtitan_0_2.feed_forward import fuse_feed_forwards

KINDS = (BF16, *RECIPES)
ABOUT = "Memory of one Llama3-8B block at 8192 tokens: saved for backward, and peaks beyond that."
ARGS, TOKENS = llama3_args["8B"], 8192


def make_block(kind: str, compiled: bool) -> Layer:
    torch._dynamo.reset()
    with torch.device("cuda"):
        block = TransformerBlock(0, ARGS).bfloat16()
    if kind != BF16:
        titan_fp8.convert_linears(block, recipe=kind)
        fuse_feed_forwards(block)
        share_attention_inputs(block)
        RECOMPUTABLE_QUANTIZERS.apply(with_recomputable_quantizers)
    head_dim = ARGS.dim // ARGS.n_heads
    freqs = precompute_freqs_cis(head_dim, TOKENS, ARGS.rope_theta, ARGS.rope_scaling_args).cuda()
    run = torch.compile(block, fullgraph=True) if compiled else block
    return Layer(lambda x: run(x, freqs, None), tuple(block.parameters()))


def peaks(layer: Layer, x: Tensor, g: Tensor) -> tuple[int, int]:
    """Peak bytes of forward and of backward, beyond what is kept between the two."""
    torch.cuda.reset_peak_memory_stats()
    y = layer.forward(x)
    kept, forward = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(y, (x, *layer.weights), g)
    return forward - kept, torch.cuda.max_memory_allocated() - kept


def main() -> None:
    args = parser(__doc__.partition("\n")[0]).parse_args()
    x, g = randn(1, TOKENS, ARGS.dim, requires_grad=True), randn(1, TOKENS, ARGS.dim)
    rows = []
    for compiled in (False, True):
        for kind in KINDS:
            layer = make_block(kind, compiled)
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
    report(rows, args.json, "Memory of a block", ABOUT)


if __name__ == "__main__":
    main()
