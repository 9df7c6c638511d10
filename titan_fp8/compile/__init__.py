"""What torch.compile and activation checkpointing are told about FP8 ops."""

from titan_fp8.patches import RECOMPUTABLE_QUANTIZERS, SAC_POLICY, SMALLER_QUANTIZERS


def apply_patches(*, compiles: bool = True, recomputes: bool = True) -> None:
    """Applies what FP8 layers need of torchtitan and PyTorch (`patches.py`).

    Args:
        compiles: whether torch.compile may compile the model.
        recomputes: whether its partitioner may recompute quantizers.
    """
    # They import torch._dynamo, and Triton with it.
    from titan_fp8.compile import activation_checkpointing, graph_passes, recomputation

    SAC_POLICY.apply(activation_checkpointing.with_fp8_policy)
    if compiles and recomputes:
        RECOMPUTABLE_QUANTIZERS.apply(recomputation.with_recomputable_quantizers)
    if compiles:
        SMALLER_QUANTIZERS.apply(graph_passes.SmallerQuantizers.after)
